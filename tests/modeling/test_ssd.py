"""The state space of Mamba-2: the mixers' contract, Hugging Face's own mixer and kernel, its fields, long rows."""

from typing import Any, ClassVar

import pytest
import torch
from layouts import rows_of_mixer
from mixer_contract import MixerContract
from transformers import BambaConfig
from transformers.cache_utils import DynamicCache
from transformers.models.bamba.modeling_bamba import BambaMixer

from fratrie import FratrieDecoderConfig, FratrieDecoderForCausalLM

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}

CONFIG = FratrieDecoderConfig(**SIZES, mixer_types=["ssd"] * 2)


class TestStateSpace(MixerContract):
    mixer = "ssd"
    layer_type = "linear_attention"
    fields: ClassVar[dict[str, Any]] = {
        **{"mamba_n_heads": 4, "mamba_d_head": 3, "mamba_n_groups": 2, "mamba_d_state": 5, "mamba_d_conv": 3},
        **{"mamba_proj_bias": True, "mamba_time_step_limit": [0.02, 1.5], "linear_chunk_size": 3},
    }
    degenerate = ({"linear_chunk_size": 50}, {"linear_chunk_size": 2})

    def plain(self, mixer, hidden, causal, angles, real):
        """Token after token, head after head (Dao and Gu 2024, equation 1 and figure 6)."""
        silu, softplus = torch.nn.functional.silu, torch.nn.functional.softplus
        places = [place for place in range(len(hidden)) if real[place]]
        states, outputs = [torch.zeros(5, 3, dtype=hidden.dtype)] * 4, []
        for place in range(len(hidden)):
            gate, _, step = mixer.in_proj(hidden[place]).split((12, 12 + 20, 4))
            if not real[place]:
                outputs.append(self.rows_without_keys(mixer, hidden)[place])
                continue
            mixed = mixer.conv1d.bias
            for age, other in enumerate(reversed([p for p in places if p <= place][-3:])):
                mixed = mixed + mixer.conv1d.weight[:, 0, 2 - age] * mixer.in_proj(hidden[other])[12:44]
            x, key, query = silu(mixed).split((12, 10, 10))
            step, parts = softplus(step + mixer.dt_bias).clamp(0.02, 1.5), []
            for head in range(4):
                value = x[head * 3 : head * 3 + 3]
                shared = slice(head // 2 * 5, head // 2 * 5 + 5)
                decay = torch.exp(-torch.exp(mixer.A_log[head]) * step[head])
                states[head] = decay * states[head] + torch.outer(key[shared], step[head] * value)
                parts.append(states[head].T @ query[shared] + mixer.D[head] * value)
            gated = (torch.cat(parts) * silu(gate)).view(2, 6)
            normed = gated / torch.sqrt(gated.square().mean(-1, keepdim=True) + mixer.norm.eps)
            outputs.append(mixer.out_proj(normed.flatten() * mixer.norm.weight))
        return torch.stack(outputs)

    def rows_without_keys(self, mixer, hidden):
        return mixer.out_proj.bias.expand_as(hidden)


def build(**fields):
    torch.manual_seed(0)
    fields = {**SIZES, "mixer_types": ["ssd"] * fields.get("num_hidden_layers", 2), "mamba_d_state": 6, **fields}
    return FratrieDecoderForCausalLM(FratrieDecoderConfig(**fields)).eval()


@pytest.mark.parametrize("length", [1, 9, 70])
def test_equals_the_mixer_of_bamba(length):
    """With weights of theirs, on texts without padding; their kernel computes in float32, up to 2e-5 off float64."""
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 6}
    config = BambaConfig(hidden_size=16, num_hidden_layers=1, time_step_limit=(0.1, 2.0), rms_norm_eps=1e-3, **sizes)
    theirs = BambaMixer(config, 0)
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    mixer = build(**sizes, mamba_time_step_limit=[0.1, 2.0], norm_eps=1e-3).model.layers[0].mixer
    mixer.load_state_dict(theirs.state_dict())
    hidden = torch.randn(2, length, 16)
    torch.testing.assert_close(mixer(hidden, rows_of_mixer(mixer, hidden))[0], theirs(hidden), rtol=0, atol=3e-5)


def test_builds_with_no_field_of_its_own():
    config = FratrieDecoderConfig(**SIZES, mixer_types=["ssd", "linear"])
    assert config.layer_types == ["linear_attention"] * 2
    assert (config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state, config.mamba_d_conv) == (8, 4, 128, 4)
    assert config.to_dict()["mixer_types"] == ["ssd", "linear"], "which its layer type does not tell"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mamba_n_heads": 0}, "mamba_n_heads=0 must be at least 1"),
        ({"mamba_d_state": -2}, "mamba_d_state=-2 must be at least 1"),
        ({"mamba_n_heads": 4, "mamba_n_groups": 3}, "mamba_n_heads=4 is not a multiple of mamba_n_groups=3"),
        ({"mamba_time_step_limit": [2, 1]}, r"mamba_time_step_limit=\[2, 1\] must be two numbers"),
        ({"mamba_time_step_limit": [1.0]}, r"mamba_time_step_limit=\[1.0\] must be two numbers"),
        ({"mixer_types": ["linear"] * 2}, "mamba_d_state=6 has no use"),
    ],
)
def test_what_it_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        build(**fields)


def test_decays_and_steps_start_where_mamba_2_has_them():
    mixer = build(mamba_n_heads=64).model.layers[0].mixer
    rates, steps = mixer.A_log.exp(), torch.nn.functional.softplus(mixer.dt_bias)
    assert 1 <= rates.min() < 3 and 13 < rates.max() <= 16
    assert 1e-3 - 1e-6 <= steps.min() < 2e-3 and 0.05 < steps.max() <= 0.1 + 1e-6
    assert float(steps.log().mean()) == pytest.approx(-4.6, abs=0.6), "even in their logs"


def test_large_steps_forget_all_without_overflow():
    """A step of thousands lets the state decay to nothing, within a chunk and from one to the next."""
    mixer = build(linear_chunk_size=4).double().model.layers[0].mixer
    mixer.dt_bias.data.fill_(3e3)
    x, step = torch.randn(1, 10, 32 + 12, dtype=torch.float64), torch.zeros(1, 10, 8, dtype=torch.float64)
    mixed = mixer.scan(x, step, None, None)
    assert mixed.isfinite().all()
    other = torch.cat((torch.randn_like(x[:, :3]), x[:, 3:]), dim=1)
    torch.testing.assert_close(mixer.scan(other, step, None, None)[:, 6:], mixed[:, 6:], rtol=1e-10, atol=0)


@torch.no_grad()
def test_half_precision_loses_nothing_within_the_state_equation():
    """Steps, decays and states are float32, under autocast too; the convolution here hands on what comes in."""
    mixer, cache = build(num_hidden_layers=1).model.layers[0].mixer.to(torch.bfloat16), DynamicCache(config=CONFIG)
    mixer.conv1d.activation = None
    mixer.conv1d.weight.copy_(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    mixer.conv1d.bias.zero_()
    x, step = torch.randn(1, 30, 32 + 12).to(torch.bfloat16), torch.randn(1, 30, 8).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = mixer.scan(x, step, None, cache)
    assert (cache.get_recurrent_state(0).dtype, cache.get_conv_state(0).dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(mixed.double(), mixer.double().scan(x.double(), step.double(), None, None),
                               rtol=1e-5, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=str)
def test_generates_as_without_a_cache(options):
    model = build(
        mixer_types=["softmax", "ssd"], initializer_range=0.4, pad_token_id=0, position_type="rotary"
    ).double()
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    shared = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, **options}
    shared |= {"return_dict_in_generate": True, "output_logits": True}
    without = {name: value for name, value in shared.items() if name != "cache_implementation"}
    found, expected = model.generate(ids, **shared), model.generate(ids, **without, use_cache=False)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-9, atol=1e-9)
