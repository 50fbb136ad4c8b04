"""That a mixer is one class and one line of the registry: one of a new kind, made here, under the whole contract.

The running mean gives each token the mean of those up to it, each weighing less the further back it lies.
"""

from typing import Any, ClassVar

import pytest
import torch
from mixer_contract import MixerContract
from torch import nn
from transformers import initialization as init

from fratrie import FratrieDecoderConfig, FratrieDecoderForCausalLM, FratrieEncoderConfig, export_code
from fratrie.modeling.mixer import Mixer
from fratrie.modeling.mixers import MIXERS
from fratrie.modeling.states import keep_state


class RunningMean(Mixer):
    """`o(Σ decay^(t-s) v_s ÷ Σ decay^(t-s))` over the tokens s up to t; the two sums are its cache."""

    layer_types = ("linear_attention",)
    runs_bidirectional = False

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.decay_logit = nn.Parameter(torch.empty(()))

    def initialise(self, std):
        init.constant_(self.decay_logit, 1.0)

    def forward(self, hidden_states, layout, position_bias=None, cache=None, **kwargs):
        def kernel(value, mask, _):
            return self.sums(value, mask, cache), None

        mixed, _ = layout.run(kernel, [self.v_proj(hidden_states)], (self.mask_form, self.layer_type))
        return self.o_proj(mixed), None

    def sums(self, value_BTD, mask, cache):
        value_BTD, given = value_BTD.to(torch.promote_types(value_BTD.dtype, torch.float32)), value_BTD.dtype
        decay, batch = self.decay_logit.to(value_BTD.dtype).sigmoid(), value_BTD.shape[0]
        past_B1W = cache.get_recurrent_state(self.layer_idx) if cache is not None else None
        if past_B1W is None:
            past_B1W = value_BTD.new_zeros(batch, 1, value_BTD.shape[-1] + 1)
        real_BT1 = (torch.ones_like(value_BTD[..., 0]) if mask is None else mask.to(value_BTD.dtype)).unsqueeze(-1)
        parts_BTW = torch.cat((value_BTD * real_BT1, real_BT1), dim=-1)
        age_BT1 = real_BT1.cumsum(1)  # padding does not age
        power_BTS = (age_BT1 - age_BT1.transpose(1, 2)).clamp_min(0)
        weights_BTS = (decay**power_BTS).tril()
        sums_BTW = weights_BTS @ parts_BTW + decay**age_BT1 * past_B1W
        keep_state(cache, self.layer_idx, sums_BTW[:, -1:])
        number_BT1 = sums_BTW[..., -1:]
        return (sums_BTW[..., :-1] / number_BT1.masked_fill(number_BT1 == 0, 1.0)).to(given)

    @classmethod
    def tensor_parallel_plan(cls, config):
        return {"v_proj": "colwise_gather_output"}

    def flops(self, length):
        return 2 * length * length * (self.config.hidden_size + 1)

    @classmethod
    def cache_bytes(cls, config, layer_type, length, dtype):
        return (config.hidden_size + 1) * torch.promote_types(torch.float32, dtype).itemsize

    @classmethod
    def activation_numbers(cls, config, layer_type, length, dtype):
        return 4 * config.hidden_size + 2 * length


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(MIXERS, "running_mean", RunningMean)


class TestRunningMean(MixerContract):
    mixer = "running_mean"
    layer_type = "linear_attention"
    fields: ClassVar[dict[str, Any]] = {"attention_bias": False}
    degenerate = ({}, {"num_attention_heads": 2})  # it has no heads

    @classmethod
    def directions(cls):
        return [True]  # asked for before the registry has it

    def plain(self, mixer, hidden, causal, angles, real):
        decay, outputs = mixer.decay_logit.sigmoid(), []
        for place in range(len(hidden)):
            seen = [other for other in range(place + 1) if real[other]]
            weights = [decay ** sum(real[other + 1 : place + 1]) for other in seen]
            values = [mixer.v_proj(hidden[other]) for other in seen]
            mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights) if seen else hidden[0] * 0
            outputs.append(mixer.o_proj(mean))
        return torch.stack(outputs)

    def rows_without_keys(self, mixer, hidden):
        return mixer.o_proj.bias.expand_as(hidden)


def test_one_line_of_the_registry_makes_it_known():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = FratrieDecoderConfig(**sizes, mixer_types=["running_mean", "softmax"])
    assert config.layer_types == ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"mixer_types\[0\]='running_mean' cannot be part of a bidirectional stack"):
        FratrieEncoderConfig(**sizes, mixer_types=["running_mean"] * 2)


def test_a_mixer_that_does_not_say_what_it_costs_is_refused_by_the_accounting(monkeypatch):
    from fratrie.accounting import activation_bytes, cache_bytes, forward_flops

    for name in ("flops", "cache_bytes", "activation_numbers"):
        monkeypatch.delattr(RunningMean, name)
    config = FratrieDecoderConfig(hidden_size=16, num_hidden_layers=1, mixer_types=["running_mean"])
    for count in (forward_flops, cache_bytes, activation_bytes):
        with pytest.raises(ValueError, match=r"of a RunningMean ha(s|ve) no formula"):
            count(config, 1, 4)


def test_the_code_of_a_mixer_from_elsewhere_is_not_exported(tmp_path):
    config = FratrieDecoderConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=4, mixer_types=["running_mean"]
    )
    with pytest.raises(ValueError, match=r"'running_mean' is .*RunningMean, which is no part of fratrie"):
        export_code(FratrieDecoderForCausalLM(config), tmp_path / "model")
    assert not (tmp_path / "model").exists()
