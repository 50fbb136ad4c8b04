"""In half precision the families' models and ours made from them round alike: logits to the bit, and generations.

Only the texts are one row without padding: kernels may sum in another order for other shapes.
"""

import pytest
import torch
from families import CASES, inputs, our_model, their_loaded_model

from fratrie import FratrieSeq2SeqForConditionalGeneration
from fratrie.conversion import to_hf

DTYPES = [torch.bfloat16, torch.float16]
HEADS = ("ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MTModel", "ForImageClassification",
         "T5ForTokenClassification", "BertForSequenceClassification")  # fmt: skip
# Their attention is written out or runs by another kernel, or their router rounds, in other steps than ours.
OTHER_STEPS = ("deepseek_v3", "longformer", "led", "longt5", "gpt_neo", "big_bird", "lfm2_moe")
OF_EVERY_FAMILY = [case for case in CASES if case.theirs.endswith(HEADS) and case.name[-1] in "012"]
TRIED = [case for case in OF_EVERY_FAMILY if case.model_type not in (*OTHER_STEPS, "bamba")]  # see below
OTHERS = [case for case in OF_EVERY_FAMILY if case.model_type in OTHER_STEPS]


def pair(case, dtype):
    sizes = {"moe_intermediate_size": 16} if "moe_intermediate_size" in case.fields else {}  # the default kernel's
    theirs = their_loaded_model(case, dtype, **sizes)
    ours = our_model(theirs)
    if case.model_type == "gpt2":
        lay_out_as_gpt2(ours)
    if any(
        "expert" in name for name, _ in ours.named_modules()
    ):  # by Hugging Face's default, whose rounding is not that of its plain loop
        theirs.set_experts_implementation("grouped_mm")
        ours.set_experts_implementation("grouped_mm")
    return theirs, ours


def lay_out_as_gpt2(ours):
    """Keep the matrices of the blocks as GPT-2 does, `(in, out)`.

    Kernels for float16 sum in another order over another layout; that is all that tells the two models apart.
    """
    for layer in ours.base_model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = layer.weight.data.T.contiguous().T


def one_row(case, theirs):
    ids = inputs(case, theirs)[1]
    return ids if "pixel_values" in ids else {name: value[:1] for name, value in ids.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", TRIED, ids=[case.name for case in TRIED])
def test_equal_logits_and_generation(case, dtype):
    theirs, ours = pair(case, dtype)
    arguments = one_row(case, theirs)
    with torch.no_grad():
        expected, actual = theirs(**arguments).logits, ours(**arguments).logits
    assert actual.dtype == expected.dtype == dtype and actual.isfinite().all()
    assert torch.equal(actual, expected), (actual - expected).abs().max()
    if case.generates:
        arguments.pop("decoder_input_ids", None)
        if theirs.config.is_encoder_decoder:
            arguments["decoder_start_token_id"] = 0
        elif case.model_type in ("bart", "marian"):
            arguments = {"input_ids": arguments["input_ids"]}  # see test_families.py
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        assert torch.equal(ours.generate(**arguments, **options), theirs.generate(**arguments, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OTHERS, ids=[case.name for case in OTHERS])
def test_what_is_computed_in_other_steps_rounds_otherwise_by_a_few(case, dtype):
    """Ours is no further from the same weights in float64 than theirs."""
    theirs, ours = pair(case, dtype)
    arguments = one_row(case, theirs)
    with torch.no_grad():
        expected, actual = theirs(**arguments).logits.double(), ours(**arguments).logits.double()
        exact = our_model(theirs).double()(**arguments).logits
    assert (actual - exact).norm() < max(1.5 * (expected - exact).norm(), torch.finfo(dtype).eps * exact.norm())


def test_gpt2_in_float16_differs_by_the_layout_of_its_matrices_alone():
    """Ours keeps them `(out, in)` like all other families: a few numbers are one rounding apart, not more."""
    apart = []
    for case in TRIED:
        if case.model_type == "gpt2":
            theirs = their_loaded_model(case, torch.float16)
            arguments = one_row(case, theirs)
            with torch.no_grad():
                expected, actual = theirs(**arguments).logits.float(), our_model(theirs)(**arguments).logits.float()
            apart.append(float((actual - expected).abs().max() / expected.abs().max()))
    assert max(apart) < 4 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bamba_is_no_further_from_the_exact_logits_than_hugging_faces(dtype):
    """Theirs rounds the steps, whose logs the state sums up; ours, like the kernels for a GPU, does not."""
    errors = []
    for case in CASES:
        if case.theirs == "BambaForCausalLM":
            theirs = their_loaded_model(case, dtype)
            ours, arguments = our_model(theirs), one_row(case, theirs)
            with torch.no_grad():
                exact = our_model(theirs).double()(**arguments).logits
                found = [(model(**arguments).logits.double() - exact).norm() for model in (ours, theirs)]
            errors.append([float(error / exact.norm()) for error in found])
    assert all(ours < 1.1 * theirs < 20 * torch.finfo(dtype).eps for ours, theirs in errors), errors


T5 = next(case for case in TRIED if case.theirs == "T5ForConditionalGeneration")


def test_what_t5_keeps_in_float32_stays_so(tmp_path):
    """The last matrix of a feed-forward in float16: there and back, and through a saved model."""
    theirs = their_loaded_model(T5, torch.float16)
    theirs.encoder.block[0].layer[1].DenseReluDense.wo.weight.data.fill_(1e5)  # float16 ends at 65504
    ours = our_model(theirs)
    ours.save_pretrained(tmp_path)
    loaded = FratrieSeq2SeqForConditionalGeneration.from_pretrained(tmp_path)
    for model in (ours, loaded):
        dtypes = {name: weight.dtype for name, weight in model.named_parameters()}
        fine = {name for name, dtype in dtypes.items() if dtype == torch.float32}
        assert fine == {name for name in dtypes if "down_proj" in name} and len(fine) == 5
        assert model.dtype == torch.float16
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = theirs(ids, decoder_input_ids=ids).logits
        assert expected.isfinite().all()
        assert torch.equal(loaded(ids, decoder_input_ids=ids).logits, expected)
    back = to_hf(loaded).state_dict()
    assert all(torch.equal(weight, back[name]) for name, weight in theirs.state_dict().items())


@pytest.mark.parametrize("name", ["BartForConditionalGeneration-0", "MarianMTModel-0"])
def test_a_grown_vocabulary_rounds_as_before(name):
    """Hugging Face makes a new output layer for it; its own bias of the logits becomes float32 then."""
    ours = pair(next(case for case in TRIED if case.name == name), torch.bfloat16)[1]
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        before = ours(ids, decoder_input_ids=ids).logits
        ours.resize_token_embeddings(40)
        after = ours(ids, decoder_input_ids=ids).logits
    assert torch.equal(after[..., :31], before) and after.shape[-1] == len(ours.lm_head.bias) == 40
