"""Gated DeltaNet and Kimi Delta Attention: the mixers' contract, the modules of transformers, their fields."""

from typing import Any, ClassVar

import pytest
import torch
from layouts import rows_of_mixer
from mixer_contract import MixerContract, close
from torch import nn
from transformers import KimiLinearConfig, Qwen3NextConfig
from transformers.cache_utils import DynamicCache
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from fratrie import FratrieDecoderConfig, FratrieDecoderForCausalLM, FratrieDecoderModel
from fratrie.modeling import gated_delta

TAPS = 2
SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


def unit(x):
    return x / (x @ x + 1e-6).sqrt()


class DeltaContract(MixerContract):
    """Token by token: a head is `read` from its state by queries, keys and values of a plain convolution."""

    layer_type = "linear_attention"
    fields: ClassVar[dict[str, Any]] = {
        "linear_chunk_size": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
        "linear_conv_kernel_dim": TAPS,
    }
    degenerate = ({"linear_chunk_size": 50}, {"linear_chunk_size": 2})

    def step_and_gate(self, mixer, state):
        """The step of the decays `(H, 1)` or `(H, C)` and the activated gate `(H, V)` of a token."""
        raise NotImplementedError

    def convolved(self, mixer, hidden, kept, place):
        """Queries, keys and values of the heads of one token."""
        total = 0.0
        for age, other in enumerate(reversed(kept[max(0, place - TAPS + 1) : place + 1])):
            total = total + mixer.conv.weight[:, 0, TAPS - 1 - age] * mixer.qkv_proj(hidden[other])
        query, key, value = (total * total.sigmoid()).split(mixer.widths)
        return query.view(2, 3), key.view(2, 3), value.view(4, 5)

    def plain(self, mixer, hidden, causal, angles, real):
        kept = [place for place in range(len(hidden)) if real[place]]
        outputs, states = torch.zeros_like(hidden), [hidden.new_zeros(3, 5)] * 4
        for number, place in enumerate(kept):
            query, key, value = self.convolved(mixer, hidden, kept, number)
            rate = mixer.rate_proj(hidden[place]).sigmoid()
            step, gate = self.step_and_gate(mixer, hidden[place])
            heads = []
            for head in range(4):
                q, k, decay = unit(query[head // 2]), unit(key[head // 2]), mixer.log_rate[head].exp() * step[head]
                state = (-decay).exp()[:, None] * states[head]
                states[head] = state + torch.outer(k, rate[head] * (value[head] - k @ state))
                read = q @ states[head] * 3**-0.5
                normed = read / (read.square().mean() + mixer.config.norm_eps).sqrt() * mixer.output_norm.weight
                heads.append(normed * gate[head])
            outputs = outputs.index_add(0, torch.tensor([place]), mixer.out_proj(torch.cat(heads))[None])
        return outputs

    def rows_without_keys(self, mixer, hidden):
        return mixer.out_proj.bias.expand_as(hidden)


class TestGatedDelta(DeltaContract):
    mixer = "gated_delta"

    def step_and_gate(self, mixer, state):
        step = (1 + (mixer.step_proj(state) + mixer.step_bias).exp()).log()
        gate = mixer.output_gate_proj(state)
        return step.view(4, 1), (gate * gate.sigmoid()).view(4, 5)


class TestKimiDelta(DeltaContract):
    mixer = "kimi_delta"

    def step_and_gate(self, mixer, state):
        step = mixer.step_up_proj.weight @ mixer.step_down_proj.weight @ state + mixer.step_bias
        gate = mixer.gate_up_proj.weight @ mixer.gate_down_proj.weight @ state
        return (1 + step.exp()).log().view(4, 3), gate.sigmoid().view(4, 5)


def build(mixer, **fields):
    config = FratrieDecoderConfig(
        **{**SIZES, "attention_bias": False, "attention_output_bias": False, "norm_eps": 1e-6, **fields},
        mixer_types=[mixer, "softmax"],
    )
    return FratrieDecoderModel(config).layers[0].mixer


def disturbed(module):
    torch.manual_seed(0)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.4)
    return module


def test_equals_the_module_of_qwen3_next():
    """Which lays out queries, keys, values, gates, and rates and steps, by head of keys."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 4,
             "linear_value_head_dim": 3, "linear_conv_kernel_dim": 3}  # fmt: skip
    config = Qwen3NextConfig(hidden_size=16, num_hidden_layers=2, layer_types=["linear_attention"] * 2, **sizes)
    theirs, ours = disturbed(Qwen3NextGatedDeltaNet(config, 0)), build("gated_delta", **sizes)
    by_head = theirs.in_proj_qkvz.weight.unflatten(0, (2, -1)).split([4, 4, 9, 9], dim=1)
    *parts, gate = (x.flatten(0, 1) for x in by_head)
    rate, step = (x.flatten(0, 1) for x in theirs.in_proj_ba.weight.unflatten(0, (2, -1)).split([3, 3], dim=1))
    maps = {"qkv_proj": torch.cat(parts), "output_gate_proj": gate, "rate_proj": rate, "step_proj": step,
            "conv": theirs.conv1d.weight, "output_norm": theirs.norm.weight,
            "out_proj": theirs.out_proj.weight}  # fmt: skip
    weights = {f"{name}.weight": weight for name, weight in maps.items()}
    ours.load_state_dict({**weights, "log_rate": theirs.A_log, "step_bias": theirs.dt_bias})
    hidden = torch.randn(2, 70, 16)
    close(ours(hidden, rows_of_mixer(ours, hidden))[0], theirs(hidden), 1e-4)


def test_equals_the_module_of_kimi_linear():
    config = KimiLinearConfig(
        hidden_size=16, num_hidden_layers=2, linear_num_heads=4, linear_head_dim=4, rms_norm_eps=1e-6,
        layer_types=["linear_attention"] * 2, mlp_layer_types=["dense"] * 2,
    )  # fmt: skip
    theirs, ours = disturbed(KimiLinearDeltaAttention(config, 0)), build("kimi_delta")
    renamed = {"conv1d": "conv", "b_proj": "rate_proj", "g_a_proj": "gate_down_proj", "g_b_proj": "gate_up_proj",
               "o_norm": "output_norm", "o_proj": "out_proj", "forget_gate.f_a_proj": "step_down_proj",
               "forget_gate.f_b_proj": "step_up_proj"}  # fmt: skip
    weights = {}
    for name, weight in theirs.state_dict().items():
        module, _, kind = name.rpartition(".")
        weights[f"{renamed.get(module, module)}.{kind}"] = weight
    weights["qkv_proj.weight"] = torch.cat([weights.pop(f"{name}_proj.weight") for name in "qkv"])
    weights["log_rate"] = weights.pop("forget_gate.A_log").flatten()
    weights["step_bias"] = weights.pop("forget_gate.dt_bias")
    ours.load_state_dict(weights)
    hidden = torch.randn(2, 70, 16)
    close(ours(hidden, rows_of_mixer(ours, hidden))[0], theirs(hidden), 1e-4)


@pytest.mark.parametrize("mixer", ["gated_delta", "kimi_delta"])
def test_a_state_at_first_holds_tens_to_thousands_of_tokens(mixer, monkeypatch):
    mixer = build(mixer, num_attention_heads=1, linear_num_key_heads=64, linear_num_value_heads=64)
    step = nn.functional.softplus(mixer.step_bias)
    assert step.min() > 0.0009 and step.max() < 0.11 and step.std() > 0.01
    assert mixer.log_rate.exp().min() > 1 and mixer.log_rate.exp().max() < 16
    monkeypatch.setattr(gated_delta, "_STEPS", (2.0, 2.0))
    mixer.initialise()
    torch.testing.assert_close(nn.functional.softplus(mixer.step_bias), torch.full_like(mixer.step_bias, 2.0))


def test_fields_follow_from_those_of_an_attention_and_serve_both_mixers():
    config = FratrieDecoderConfig(**SIZES, mixer_types=["gated_delta", "kimi_delta"])
    assert config.linear_num_key_heads == config.linear_num_value_heads == config.linear_value_head_dim == 4
    config.mixer_types = ["kimi_delta", "softmax"]
    assert config.linear_conv_kernel_dim == 4, "still read"
    config.mixer_types = ["softmax"] * 2
    assert config.linear_conv_kernel_dim is None


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"linear_num_key_heads": 3}, "linear_num_value_heads=4 is not a multiple of linear_num_key_heads=3"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0 must be at least 1"),
        (
            {"mixer_types": ["softmax"] * 2, "linear_key_head_dim": 3},
            "linear_key_head_dim=3 has no use without a 'linear_attention' layer .* is 'gated_delta'",
        ),
    ],
)
def test_what_contradicts_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        FratrieDecoderConfig(**{**SIZES, "mixer_types": ["gated_delta", "softmax"], **fields})


@pytest.mark.parametrize("mixer", ["retention", "gated_delta", "kimi_delta"])
def test_generation_with_a_cache_equals_that_without_and_what_would_crop_it_is_refused_by_name(mixer):
    torch.manual_seed(0)
    fields = {"mixer_types": [mixer, "softmax"], "initializer_range": 0.4, "pad_token_id": 0, "eos_token_id": None}
    model = FratrieDecoderForCausalLM(FratrieDecoderConfig(**SIZES, **fields)).double().eval()
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    for beams in (1, 2):
        outputs = [model.generate(ids, num_beams=beams, use_cache=use, **options) for use in (True, False)]
        assert torch.equal(*outputs)
    with pytest.raises(ValueError, match="Assisted decoding requires a cache that can be cropped"):
        model.generate(ids[1:], max_new_tokens=6, prompt_lookup_num_tokens=2)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(ids, cache=cache)
    model(ids, cache=cache)
    with pytest.raises(RuntimeError, match="`crop` was called, but the current layer does not track past states"):
        cache.crop(-2)
