"""inseq: what our models attribute to words is what Hugging Face's models with the same weights do."""

import inseq
import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, GPT2Config, GPT2LMHeadModel

from fratrie.conversion import from_hf
from fratrie.tokenization import with_sibling

pytestmark = pytest.mark.ecosystem

SOURCES = ["Ma mère joue avec nous.", "J'ai deux frères et un chat."]
TARGETS = ["Mon père.", "Mes sœurs travaillent."]


@pytest.fixture(scope="module")
def tokenizers(encoder_tokenizer):
    return {sibling: with_sibling(encoder_tokenizer, sibling) for sibling in ("decoder", "seq2seq")}


def hugging_face_model(sibling, tokenizer):
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    common = {"vocab_size": len(tokenizer), "attn_implementation": "eager", "init_std": 0.3, **ids}
    if sibling == "decoder":
        config = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3, **common)
        return GPT2LMHeadModel(config).eval()
    stacks = {f"{stack}_{name}": size for stack in ("encoder", "decoder")
              for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
    start = {"decoder_start_token_id": tokenizer.bos_token_id, "forced_eos_token_id": None}
    config = BartConfig(d_model=32, max_position_embeddings=64, **stacks, **start, **common)
    return BartForConditionalGeneration(config).eval()


def attribute(model, tokenizer, method, sources, targets):
    """The attributions of each text: to the source and to the target written so far."""
    options = {"n_steps": 20} if method == "integrated_gradients" else {}
    if not model.config.is_encoder_decoder:
        targets = [f"{source} {target}" for source, target in zip(sources, targets, strict=True)]
    else:
        options["attribute_target"] = True
    attributed = inseq.load_model(model, method, tokenizer=tokenizer).attribute(
        sources, targets, show_progress=False, **options
    )
    return [(row.source_attributions, row.target_attributions) for row in attributed.sequence_attributions]


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("sibling", ["decoder", "seq2seq"])
@pytest.mark.parametrize("method", ["saliency", "integrated_gradients", "attention"])
def test_attributions_equal_those_of_hugging_faces_model(tokenizers, sibling, method):
    theirs = hugging_face_model(sibling, tokenizers[sibling])
    ours = from_hf(theirs)
    ours.set_attn_implementation("eager")
    found, expected = (
        attribute(model, tokenizers[sibling], method, SOURCES[:1], TARGETS[:1]) for model in (ours, theirs)
    )
    for part, (values, reference) in enumerate(zip(found[0], expected[0], strict=True)):
        if sibling == "decoder" and part == 0:
            assert values is None is reference
        else:
            assert values[~values.isnan()].abs().max() > 1e-4
            close(values, reference)


@pytest.mark.parametrize("sibling", ["decoder", "seq2seq"])
def test_a_padded_batch_is_explained_like_each_of_its_texts_alone(tokenizers, sibling):
    tokenizer = tokenizers[sibling]
    model = from_hf(hugging_face_model(sibling, tokenizer))
    together = attribute(model, tokenizer, "saliency", SOURCES, TARGETS)
    for row, text in enumerate(zip(SOURCES, TARGETS, strict=True)):
        (alone,) = attribute(model, tokenizer, "saliency", *([part] for part in text))
        for ours, theirs in zip(together[row], alone, strict=True):
            if theirs is not None:
                close(ours, theirs)
