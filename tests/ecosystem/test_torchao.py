"""torchao: linear layers of 8 and of 4 bits in encoder and decoder, saved, reloaded and generated from."""

import pytest
import torch
from combinations import DECODER, ENCODER, case_of, padded_inputs
from torchao.quantization import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)
from torchao.utils import TorchAOBaseTensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    TorchAoConfig,
)

pytestmark = pytest.mark.ecosystem

# The second keeps a number of four bits in a byte: the packed kernels of Int4WeightOnlyConfig need a GPU.
METHODS = {
    "int8_dynamic": (Int8DynamicActivationInt8WeightConfig(), 0.05),
    "int4_weight_only": (IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)), 0.5),
}
HEADS = {
    ENCODER: ("sequence_classification", AutoModelForSequenceClassification),
    DECODER: ("language_model", AutoModelForCausalLM),
}
CASES = [pytest.param(sibling, method, id=f"{sibling}-{method}") for sibling in HEADS for method in METHODS]


def build(sibling):
    """A model with layers whose sizes fit groups of 32."""
    return case_of(sibling, "llama").build(HEADS[sibling][0], intermediate_size=64, eos_token_id=None)


def logits(model, sibling):
    inputs = padded_inputs(sibling, "left")
    with torch.no_grad():
        values = model(**inputs).logits
    return values if sibling == ENCODER else values[inputs["attention_mask"].bool()]


def assert_near(found, exact, tolerance):
    error = (found - exact).norm() / exact.norm()
    assert 1e-6 < error < tolerance


def quantised_layers(model):
    return {name for name, weight in model.named_parameters() if isinstance(weight, TorchAOBaseTensor)}


@pytest.mark.parametrize(("sibling", "method"), CASES)
def test_a_quantised_model_stays_near(sibling, method):
    model, (config, tolerance) = build(sibling), METHODS[method]
    exact = logits(model, sibling)
    quantize_(model, config)
    assert len(quantised_layers(model)) == 2 * 7 + 1  # in each block 4 of attention, 3 of the feed-forward; the head
    assert_near(logits(model, sibling), exact, tolerance)


@pytest.mark.parametrize(("sibling", "method"), CASES)
def test_a_model_loaded_through_transformers_stays_near_and_is_saved_and_reloaded(sibling, method, tmp_path):
    model, (config, tolerance) = build(sibling), METHODS[method]
    auto_class = HEADS[sibling][1]
    model.save_pretrained(tmp_path / "exact")
    loaded = auto_class.from_pretrained(tmp_path / "exact", quantization_config=TorchAoConfig(config))
    assert len(quantised_layers(loaded)) >= 2 * 7
    assert_near(logits(loaded, sibling), logits(model, sibling), tolerance)
    loaded.save_pretrained(tmp_path / "quantised")
    again = auto_class.from_pretrained(tmp_path / "quantised")
    assert quantised_layers(again) == quantised_layers(loaded)
    assert torch.equal(logits(again, sibling), logits(loaded, sibling))


@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_decoder_generates_with_its_cache_as_without(method):
    model, inputs = build(DECODER), padded_inputs(DECODER, "left")
    quantize_(model, METHODS[method][0])
    cached, uncached = (
        model.generate(**inputs, max_new_tokens=6, do_sample=False, use_cache=use_cache) for use_cache in (True, False)
    )
    assert cached.shape == (3, 15)
    assert cached.tolist() == uncached.tolist()


def bert():
    sizes = {"vocab_size": 71, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return BertForSequenceClassification(BertConfig(**sizes, intermediate_size=64))


@pytest.mark.parametrize("build_model", [bert, lambda: build(ENCODER)], ids=["bert", "ours"])
@pytest.mark.parametrize("packing", ["plain", "plain_int32", "tile_packed_to_4d"])
def test_packed_weights_of_four_bits_need_a_gpu(build_model, packing):
    """Of Hugging Face's BERT as of ours."""
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator, whose kernels may do it")
    with pytest.raises((ImportError, NotImplementedError, AssertionError), match=r"mslk|device 'cpu'|CUDA"):
        quantize_(build_model().bfloat16(), Int4WeightOnlyConfig(group_size=32, int4_packing_format=packing))
