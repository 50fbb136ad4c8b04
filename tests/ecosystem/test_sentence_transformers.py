"""sentence-transformers: our encoder as a sentence embedder, trained, saved, and loaded again."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from transformers import BertConfig, BertModel

from fratrie import FratrieEncoderConfig, FratrieEncoderForMaskedLM, FratrieEncoderModel

pytestmark = pytest.mark.ecosystem

PAIRS = [
    ("Ma mère travaille.", "Ma mère a un travail."),
    ("J'ai deux frères.", "Mes deux frères et moi, nous sommes trois."),
    ("Notre chat dort.", "Le chat est endormi depuis ce matin sur le canapé de ma sœur."),
    ("Mon père est absent.", "Mon père n'est jamais là."),
]
SENTENCES = [sentence for pair in PAIRS for sentence in pair]


@pytest.fixture(params=[FratrieEncoderModel, FratrieEncoderForMaskedLM])
def folder(request, encoder_tokenizer, config_fields, tmp_path):
    config = FratrieEncoderConfig(**config_fields(encoder_tokenizer))
    request.param(config).save_pretrained(tmp_path / "encoder")
    encoder_tokenizer.save_pretrained(tmp_path / "encoder")
    return str(tmp_path / "encoder")


@pytest.fixture
def embedder(folder):
    transformer = Transformer(folder)
    return SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension(), "mean")])


def close(actual, expected):
    torch.testing.assert_close(torch.as_tensor(actual), torch.as_tensor(expected), atol=1e-5, rtol=1e-5)


def test_a_saved_encoder_is_an_embedder_that_takes_the_mean_of_its_tokens(folder, encoder_tokenizer):
    embedder = SentenceTransformer(folder)
    assert isinstance(embedder[0].model, FratrieEncoderModel)
    encoder = FratrieEncoderModel.from_pretrained(folder).eval()
    expected = []
    with torch.no_grad():
        for sentence in SENTENCES:
            states = encoder(**encoder_tokenizer(sentence, return_tensors="pt")).last_hidden_state
            expected.append(states[0].mean(0))
    close(embedder.encode(SENTENCES), torch.stack(expected))


def test_batches_of_unequal_length_give_the_embeddings_of_each_sentence_alone(embedder):
    together = embedder.encode(SENTENCES, batch_size=8)
    alone = [embedder.encode(sentence) for sentence in SENTENCES]
    close(together, torch.stack([torch.as_tensor(row) for row in alone]))


def test_long_texts_are_cut_to_what_the_encoder_takes(folder):
    embedder = SentenceTransformer(folder)
    assert embedder.max_seq_length == embedder[0].model.config.max_position_embeddings == 64
    long = " ".join(SENTENCES * 4)
    assert len(embedder.tokenizer(long)["input_ids"]) > 64
    close(embedder.encode([long, SENTENCES[0]])[1], embedder.encode(SENTENCES[0]))


def test_an_epoch_of_training_brings_pairs_together_and_comes_back_from_disk(embedder, tmp_path):
    def own_pair_wins():
        first, second = (embedder.encode(list(side)) for side in zip(*PAIRS, strict=True))
        similarity = embedder.similarity(first, second)
        return (similarity.diag() - similarity.mean(1)).mean().item()

    before = own_pair_wins()
    first, second = zip(*PAIRS, strict=True)
    SentenceTransformerTrainer(
        embedder,
        SentenceTransformerTrainingArguments(
            str(tmp_path / "run"), num_train_epochs=1, per_device_train_batch_size=4, learning_rate=2e-3, use_cpu=True,
            save_strategy="no", report_to="none", disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"anchor": [*first] * 4, "positive": [*second] * 4}),
        loss=MultipleNegativesRankingLoss(embedder),
    ).train()  # fmt: skip
    embedder.eval()
    assert own_pair_wins() > before + 0.01
    embedder.save(str(tmp_path / "embedder"))
    again = SentenceTransformer(str(tmp_path / "embedder"))
    assert isinstance(again[0].model, FratrieEncoderModel)
    close(again.encode(SENTENCES), embedder.encode(SENTENCES))


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_converted_folder_keeps_its_modules(encoder_tokenizer, tmp_path, monkeypatch, way):
    """Pooling by the first token, a dense layer, unit length, at most seven tokens and a prompt: equal vectors."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=len(encoder_tokenizer), initializer_range=0.3, **sizes))
    model.save_pretrained(tmp_path / "bert")
    encoder_tokenizer.save_pretrained(tmp_path / "bert")
    modules = [Transformer(str(tmp_path / "bert"), max_seq_length=7), Pooling(32, "cls"), Dense(32, 8), Normalize()]
    theirs = SentenceTransformer(modules=modules, prompts={"query": "Ma "}, default_prompt_name="query")
    theirs.save(str(tmp_path / "theirs"))
    steps = [["theirs", "ours"], ["ours", "back", "--to_hf"]]
    for source, out, *flags in steps[: 1 + (way == "back")]:
        arguments = ["--from", str(tmp_path / source), "--out", str(tmp_path / out), *flags]
        monkeypatch.setattr(sys, "argv", ["convert.py", *arguments])
        runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "convert.py"), run_name="__main__")
    converted = SentenceTransformer(str(tmp_path / out))
    assert [type(module) for module in converted] == [type(module) for module in theirs]
    assert isinstance(converted[0].model, FratrieEncoderModel) == (way == "there")
    assert converted.max_seq_length == 7 and converted.prompts["query"] == "Ma "
    vectors = torch.as_tensor(converted.encode(SENTENCES))
    close(vectors, theirs.encode(SENTENCES))
    close(vectors.norm(dim=1), torch.ones(len(SENTENCES)))
