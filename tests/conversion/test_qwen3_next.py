"""Qwen3-Next beyond what all families are tested for: long texts, models of one kind of layer, what it cannot be."""

import pytest
import torch
from families import CASES, our_model, precise, their_model

from fratrie import FratrieDecoderConfig, FratrieDecoderForCausalLM, norm_slots
from fratrie.conversion import from_hf, to_hf

CASE = next(case for case in CASES if case.theirs == "Qwen3NextForCausalLM")
LINEAR = {"layer_types": ["linear_attention"] * 3}


@torch.no_grad()
def test_a_text_of_several_chunks_read_in_pieces():
    """By the same pieces, and by ours at once; their states keep float32, which `precise` widens."""
    theirs = their_model(CASE)
    ours = our_model(theirs)
    ids = torch.randint(1, 31, (2, 150), generator=torch.Generator().manual_seed(0))
    with precise(CASE):
        whole, caches, read = ours(ids).logits, {}, []
        for piece in ids.split([70, 1, 64, 15], dim=1):
            for model in (theirs, ours):
                outputs = model(piece, cache=caches.get(model), use_cache=True)
                caches[model] = outputs.cache
                read.append(outputs.logits)
    torch.testing.assert_close(torch.cat(read[1::2], dim=1), whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat(read[::2], dim=1), whole, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_model_without_attention():
    """Which Hugging Face runs without a cache alone."""
    theirs = their_model(CASE, **LINEAR, use_cache=False)
    ours, ids = our_model(theirs), torch.randint(1, 31, (2, 9))
    assert ours.config.attention_output_gate is None and ours.config.mixer_types == ["gated_delta"] * 3
    with precise(CASE):
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-10, atol=1e-10)
    assert to_hf(ours).config.layer_types == LINEAR["layer_types"]


@pytest.mark.parametrize(
    ("fields", "changed", "message"),
    [
        ({}, {"attention_output_gate": False}, "attention_output_gate=False"),
        ({}, {"query_key_norm": "rms_norm"}, "query_key_norm='rms_norm'"),
        ({}, {"shared_experts_gate": False}, "shared_experts_gate=False"),
        ({}, {"num_shared_experts": 2}, "num_shared_experts=2"),
        ({}, {"position_type": "none", "rope_parameters": None}, "position_type='none'"),
        ({}, {"attention_bias": True}, "attention_bias=True"),
        (LINEAR, {"mixer_types": ["gated_delta", "linear", "gated_delta"]}, r"mixer_types=\['gated_delta', 'linear'"),
    ],
)
def test_what_it_cannot_be_is_refused_by_name(fields, changed, message):
    ours = from_hf(their_model(CASE, **fields))
    config = type(ours.config)(**{**ours.config.to_dict(), **changed})
    with pytest.raises(ValueError, match=message):
        to_hf(type(ours)(config), "qwen3_next")


@torch.no_grad()
def test_a_model_of_ours_becomes_one():
    """Whose shared expert is as wide as the others, as by default."""
    torch.manual_seed(0)
    config = FratrieDecoderConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
        **norm_slots("pre", "rms_norm_plus_one"), query_key_norm="rms_norm_plus_one", attention_output_gate=True,
        mixer_types=["gated_delta", "softmax"], position_type="rotary", hidden_act="silu", gated_feed_forward=True,
        **dict.fromkeys(("attention_bias", "attention_output_bias", "feed_forward_bias"), False),
        num_experts=4, moe_intermediate_size=12, num_shared_experts=1, shared_experts_gate=True,
        router_aux_loss_scope="model", initializer_range=0.4, experts_implementation="eager",
    )  # fmt: skip
    ours, ids = FratrieDecoderForCausalLM(config).double().eval(), torch.randint(0, 31, (2, 9))
    theirs = to_hf(ours, "qwen3_next")
    theirs.set_experts_implementation("eager")
    assert theirs.config.shared_expert_intermediate_size == 12
    with precise(CASE):
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("changed", [{"hidden_act": "relu"}, {"attention_bias": True}])
def test_what_ours_cannot_be_is_refused_by_name(changed):
    with pytest.raises(ValueError, match=next(iter(changed))):
        from_hf(their_model(CASE, **changed))


def test_other_families_have_no_gate_and_no_norm_plus_one():
    ours = from_hf(
        their_model(CASE, layer_types=["full_attention"] * 3, decoder_sparse_step=4, partial_rotary_factor=1.0)
    )
    with pytest.raises(ValueError, match=r"attention_output_gate=True.*mixer_input_norm='rms_norm_plus_one'"):
        to_hf(ours, "qwen3")
