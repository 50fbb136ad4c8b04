"""Attention by blocks in whole models, ours and Hugging Face's, equals sdpa and eager; in blocks of three tokens."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from combinations import DECODER, ENCODER, SEQ2SEQ, Case, case_of, cases, documents, output_mask, padded_inputs
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fratrie.modeling.blockwise import blockwise_attention_forward

SIZES = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
BART = {"decoder_ffn_dim": 20, "encoder_ffn_dim": 20, "decoder_attention_heads": 2, "encoder_attention_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": LLAMA,
    "GPT2": {"n_embd": 16, "n_head": 4, "n_layer": 2},
    "Llama": {**LLAMA, "num_key_value_heads": 2},
    "Mistral": {**LLAMA, "num_key_value_heads": 2, "sliding_window": 4},
    "ModernBert": {**LLAMA, "local_attention": 4, "num_hidden_layers": 4, "cls_token_id": 1, "sep_token_id": 2},
    "T5": {"d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    "Bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, **BART},
}
HEADS = {
    **dict.fromkeys(("Bert", "ModernBert"), "ForMaskedLM"),
    **{"GPT2": "LMHeadModel", "Llama": "ForCausalLM", "Mistral": "ForCausalLM"},
    **dict.fromkeys(("T5", "Bart"), "ForConditionalGeneration"),
}
OURS = cases(names=("default", "sliding_relative", "all_mixers", "latent", "padding_kept"))


@pytest.fixture(autouse=True)
def blocks_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(blockwise_attention_forward, block_size=3)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "blockwise", small)


def close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def family(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **FAMILIES[name])
    return getattr(transformers, name + HEADS[name])(config).double().eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_hugging_faces_families_give_what_they_give_with_sdpa_and_eager(name: str):
    """Eager in float32, as it makes NaN of rows without keys in float64."""
    model, found = family(name), {}
    ids = torch.randint(3, 40, (2, 10))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    for implementation, dtype in (("eager", torch.float32), ("sdpa", torch.float64), ("blockwise", torch.float64)):
        model.to(dtype).set_attn_implementation(implementation)
        model.zero_grad()
        output = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        output.loss.backward()
        logits = output.logits if model.config.is_encoder_decoder else output.logits[mask.bool()]
        grads = [x.grad for x in model.parameters() if x.grad is not None]
        found[implementation] = logits.detach(), grads
    close(found["blockwise"], found["sdpa"])
    close(found["blockwise"][0].float(), found["eager"][0], 1e-5)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", [name for name in FAMILIES if HEADS[name] != "ForMaskedLM"])
def test_hugging_faces_families_generate_what_they_generate_with_sdpa(name: str, static: bool):
    model, texts = family(name), []
    ids = torch.randint(3, 40, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "output_logits": True}
    settings |= {"return_dict_in_generate": True} | ({"cache_implementation": "static"} if static else {})
    for implementation in ("sdpa", "blockwise"):
        model.set_attn_implementation(implementation)
        output = model.generate(input_ids=ids, attention_mask=mask, **settings)
        texts.append((output.sequences, torch.stack(output.logits)))
    close(*texts)


@pytest.mark.parametrize("case", OURS, ids=str)
def test_our_models_give_what_they_give_with_sdpa(case: Case):
    inputs = padded_inputs(case.sibling, "left")
    mask, found = output_mask(case.sibling, inputs), []
    for implementation in ("sdpa", "blockwise"):
        model = case.build(attn_implementation=implementation).double()
        logits = model(**inputs).logits[mask]
        logits.square().sum().backward()
        with torch.no_grad():
            cached = None if case.sibling == ENCODER else model(**inputs, use_cache=True).logits[mask]
        found.append((logits.detach(), cached, [x.grad for x in model.parameters() if x.grad is not None]))
    close(found[1], found[0], 1e-10)


@pytest.mark.parametrize("case", cases(ENCODER, DECODER, names=("sliding_full",)), ids=str)
@torch.no_grad()
def test_packed_rows_equal_separate_documents(case: Case):
    model = case.build(attn_implementation="blockwise").double()
    rows = documents()
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    separate = torch.cat([model(row[None]).logits[0] for row in rows])
    close(model(torch.cat(rows)[None], position_ids=positions).logits[0], separate)


@pytest.mark.parametrize("sibling", [DECODER, SEQ2SEQ])
def test_generation_with_a_static_cache_equals_sdpa(sibling: str):
    case, texts = case_of(sibling, "sliding_full"), []
    inputs = {name: padded_inputs(ENCODER, "left")[name] for name in ("input_ids", "attention_mask")}
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "cache_implementation": "static"}
    for implementation in ("sdpa", "blockwise"):
        texts.append(case.build(attn_implementation=implementation).double().generate(**inputs, **settings))
    assert torch.equal(*texts)


@torch.no_grad()
def test_a_mask_of_the_callers_own_is_followed():
    model = case_of(DECODER).build(attn_implementation="blockwise").double()
    ids = documents()[0][None]
    seen = torch.rand(1, 1, 9, 9) < 0.7
    seen |= torch.eye(9, dtype=torch.bool)
    added = torch.zeros(1, 1, 9, 9, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    expected = case_of(DECODER).build(attn_implementation="sdpa").double()(ids, attention_mask=seen).logits
    close(model(ids, attention_mask=seen).logits, expected)
    close(model(ids, attention_mask=added).logits, expected)


def test_attention_dropout_acts_in_training_and_follows_the_seed():
    model = case_of(DECODER).build(attn_implementation="blockwise", attention_dropout=0.5)
    ids = documents()[0][None]
    expected = model.eval()(ids).logits
    close(model(ids).logits, expected)
    logits = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        logits.append(model.train()(ids).logits)
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2]) and not torch.allclose(logits[0], expected)
