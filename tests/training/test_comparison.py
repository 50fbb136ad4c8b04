"""The same decoder with each mixer: what is trained, what is measured, and what is refused."""

import math

import pytest

from fratrie.training.comparison import ComparisonOptions, read_corpus, read_documents, train_with

TINY = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"


@pytest.fixture
def options(tmp_path):
    files = []
    for index in range(3):
        files.append(str(tmp_path / f"{index}.txt"))
        (tmp_path / f"{index}.txt").write_text(f"la sœur de mon père {index} " * 30, encoding="utf-8")
    return ComparisonOptions(
        output_dir=str(tmp_path / "out"),
        files=files,
        config_overrides=TINY,
        vocab_size=300,
        block_size=32,
        max_steps=4,
    )


def test_mixers_are_trained_alike_and_measured(options):
    corpus = read_corpus(options)
    softmax, linear = (train_with(name, options, corpus) for name in ("softmax", "linear"))
    assert softmax.parameters == linear.parameters
    assert softmax.loss != linear.loss and all(0 < x.loss < math.log(300) for x in (softmax, linear))
    assert softmax.cache_bytes == 4 * 32 * 2 * 16 and linear.cache_bytes == 4 * 2 * 8 * 9
    assert softmax.tokens_per_second > 0 and softmax.losses[-1][0] == 4
    assert train_with("softmax", options, corpus).loss == softmax.loss, "the same twice"


def test_a_document_is_held_out(options):
    documents = read_documents(options.files)
    assert len(documents["train"]) == 2 and len(documents["test"]) == 1
    assert len(read_documents([])["train"]) > 20, "modules of the standard library"
    with pytest.raises(ValueError, match="give two --files or more"):
        read_documents(options.files[:1])


def test_what_no_decoder_can_have_is_refused():
    with pytest.raises(ValueError, match="--mixers mamba: a decoder can have softmax, linear"):
        ComparisonOptions(output_dir="out", mixers=["softmax", "mamba"])
