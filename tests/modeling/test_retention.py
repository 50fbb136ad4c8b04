"""Retention: the mixers' contract, the parallel form and its decays."""

import math
from typing import Any, ClassVar

import pytest
import torch
from mixer_contract import MixerContract, close, turn

from fratrie import FratrieDecoderConfig, FratrieDecoderForCausalLM
from fratrie.modeling.retention import HeadDecays


class TestRetention(MixerContract):
    """In the parallel form: a mask of decays between all pairs of tokens (Sun et al. 2023, equation 5)."""

    mixer = "retention"
    layer_type = "linear_attention"
    fields: ClassVar[dict[str, Any]] = {"linear_chunk_size": 3}
    variants: ClassVar[list[dict[str, Any]]] = [{"num_key_value_heads": 2, "position_type": "rotary"}]
    degenerate = ({"linear_chunk_size": 50}, {"linear_chunk_size": 2})

    def plain(self, mixer, hidden, causal, angles, real):
        size, groups = mixer.head_dim, mixer.num_key_value_groups
        kept = torch.tensor(real).nonzero().flatten()
        age = torch.arange(len(kept), dtype=hidden.dtype)
        states, mixed = hidden[kept], []
        for head in range(mixer.config.num_attention_heads):
            query, key, value = (
                (layer.weight @ states.T + layer.bias[:, None]).T[:, index * size : (index + 1) * size]
                for layer, index in (
                    (mixer.q_proj, head),
                    (mixer.k_proj, head // groups),
                    (mixer.v_proj, head // groups),
                )
            )
            if angles is not None:
                query, key = turn(query, angles[kept]), turn(key, angles[kept])
            decay = (1 - 2.0 ** (-5 - head)) ** (age[:, None] - age).clamp_min(0)
            retained = (query @ key.T * size**-0.5 * decay.tril()) @ value
            centred = retained - retained.mean(-1, keepdim=True)
            mixed.append(centred / (centred.square().mean(-1, keepdim=True) + mixer.config.norm_eps).sqrt())
        gate = mixer.gate_proj(states)
        outputs = mixer.o_proj(gate * gate.sigmoid() * torch.cat(mixed, dim=-1))
        return torch.zeros_like(hidden).index_copy(0, kept, outputs)

    def rows_without_keys(self, mixer, hidden):
        return mixer.o_proj.bias.expand_as(hidden)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_no_head_of_many_rounds_its_decay_away(dtype):
    """In float32 the 20th decay is 1 - 2^-25, of which a rounded logarithm would be 0."""
    found = HeadDecays(40)(torch.zeros((), dtype=dtype)).flatten()
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    expected = torch.tensor([math.log1p(-(2.0 ** (-5 - head))) for head in range(40)], dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def build():
    config = FratrieDecoderConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        mixer_types=["retention", "softmax"],
        initializer_range=0.4,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return FratrieDecoderForCausalLM(config).double().eval()


def test_the_first_head_forgets_sooner_than_the_last():
    """The output of a query that reads one old token falls off as the decays say; the norm is left out."""
    mixer = build().model.layers[0].mixer
    mixer.config.norm_eps = 1e30  # the norm then divides all by 1e15
    query, value = torch.ones(1, 2, 9, 8, dtype=torch.float64), torch.randn(1, 2, 9, 8, dtype=torch.float64)
    key = torch.zeros_like(query)
    key[:, :, 0] = 1.0
    mixed = mixer.attend(query, key, value, None, None)[0] * 1e15
    for head, decay in enumerate((1 - 1 / 32, 1 - 1 / 64)):
        close(mixed[0, 8, head], mixed[0, 0, head] * decay**8)
