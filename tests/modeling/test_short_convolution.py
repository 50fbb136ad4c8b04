"""The gated short convolution: the mixers' contract, LFM2's own module, its fields."""

from typing import Any, ClassVar

import pytest
import torch
from layouts import rows_of_mixer
from mixer_contract import MixerContract
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from fratrie import FratrieDecoderConfig, FratrieDecoderForCausalLM, FratrieEncoderConfig

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
TAPS = 3


class TestShortConvolution(MixerContract):
    mixer = "short_conv"
    layer_type = "conv"
    fields: ClassVar[dict[str, Any]] = {"short_conv_bias": True}
    degenerate = ({}, {"num_attention_heads": 2})  # it has no heads

    def sees(self, distance, causal):
        return distance > -TAPS

    def plain(self, mixer, hidden, causal, angles, real):
        outputs, places = [], [place for place in range(len(hidden)) if real[place]]
        size, conv = hidden.shape[-1], mixer.conv

        def gates(place):
            return mixer.in_proj(hidden[place]).split(size)

        for place in range(len(hidden)):
            seen = [other for other in places if other <= place][-TAPS:]
            mixed = conv.bias if seen else torch.zeros_like(hidden[place])
            for age, other in enumerate(reversed(seen)):
                into, _, x = gates(other)
                mixed = mixed + conv.weight[:, 0, TAPS - 1 - age] * into * x
            outputs.append(mixer.out_proj(gates(place)[1] * mixed))
        return torch.stack(outputs)

    def rows_without_keys(self, mixer, hidden):
        return mixer.out_proj.bias.expand_as(hidden)


def test_equals_the_module_of_lfm2():
    """With weights of theirs, on texts without padding."""
    theirs = Lfm2ShortConv(
        Lfm2Config(hidden_size=16, num_hidden_layers=1, layer_types=["conv"], conv_L_cache=4, conv_bias=True), 0
    ).double()
    fields = {**SIZES, "short_conv_kernel_size": 4, "short_conv_bias": True, "mixer_types": ["short_conv"] * 2}
    mixer = FratrieDecoderForCausalLM(FratrieDecoderConfig(**fields)).double().model.layers[0].mixer
    mixer.load_state_dict(theirs.state_dict())
    hidden = torch.randn(2, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(mixer(hidden, rows_of_mixer(mixer, hidden))[0], theirs(hidden), rtol=0, atol=1e-12)


def test_the_layer_type_tells_the_mixer_which_is_causal():
    config = FratrieDecoderConfig(**SIZES, layer_types=["conv", "full_attention"])
    assert config.mixer_types == ["short_conv", "softmax"] and config.short_conv_kernel_size == TAPS
    with pytest.raises(ValueError, match=r"mixer_types\[0\]='short_conv' cannot be part of a bidirectional stack"):
        FratrieEncoderConfig(**SIZES, layer_types=["conv", "full_attention"])


@pytest.mark.parametrize("taps", [0, -1])
def test_an_empty_convolution_is_refused(taps):
    with pytest.raises(ValueError, match=f"short_conv_kernel_size={taps} must be at least 1"):
        FratrieDecoderConfig(**SIZES, mixer_types=["short_conv"] * 2, short_conv_kernel_size=taps)


def test_its_fields_go_with_its_layers(tmp_path):
    """Whoever chooses other mixers, or the first layers alone, need not name the fields of those that are gone."""
    config = FratrieDecoderConfig(**SIZES, mixer_types=["softmax", "short_conv"], short_conv_kernel_size=5)
    config.save_pretrained(tmp_path)
    assert FratrieDecoderConfig.from_pretrained(tmp_path).short_conv_kernel_size == 5
    for changes in (
        {"num_hidden_layers": 1},
        {"mixer_types": ["linear"] * 2},
        {"layer_types": ["full_attention"] * 2},
    ):
        assert FratrieDecoderConfig.from_pretrained(tmp_path, **changes).short_conv_kernel_size is None
    config.mixer_types = ["softmax", "linear"]
    assert config.short_conv_kernel_size is None
    FratrieDecoderForCausalLM(config)
    config.mixer_types = ["softmax", "short_conv"]
    assert config.short_conv_kernel_size == TAPS


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("mixers", [["short_conv"] * 2, ["softmax", "short_conv"]], ids=str)
def test_generates_as_without_a_cache(mixers, options):
    torch.manual_seed(0)
    fields = {**SIZES, "mixer_types": mixers, "initializer_range": 0.4, "pad_token_id": 0, "position_type": "rotary"}
    model = FratrieDecoderForCausalLM(FratrieDecoderConfig(**fields)).double().eval()
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    shared = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, **options}
    without = {name: value for name, value in shared.items() if name != "cache_implementation"}
    assert torch.equal(model.generate(ids, **shared), model.generate(ids, **without, use_cache=False))
