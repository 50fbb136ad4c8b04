import sys

import pytest
from huggingface_hub import ModelCard

from fratrie.training.metrics import multilabel_scores
from fratrie.training.model_card import (
    CardFacts,
    classification_tables,
    describe_hardware,
    launch_command,
    write_model_card,
)


@pytest.fixture
def scores():
    return multilabel_scores([[1, 0], [0, 1]], [[1, 1], [0, 1]], ["+", "-"])


def test_card_tells_every_fact_and_reads_back(tmp_path, scores):
    facts = CardFacts(
        name="family",
        task="text-classification",
        summary="Labels sentences «famille».",
        data="Two sentences of {{ braces }}.",
        tables=classification_tables({"test": scores}),
        command="python finetune.py --output_dir 'a b'",
        arguments={"learning_rate": 0.5, "text": "é"},
        hardware="one abacus",
        seconds=61.4,
        limits=["Short texts only.", "French only."],
        language="fr",
        dataset="family_relations",
        scores=scores,
    )
    path = write_model_card(facts, tmp_path)
    assert path == tmp_path / "README.md"
    card = ModelCard.load(path)
    assert card.data.pipeline_tag == "text-classification"
    assert (card.data.language, card.data.datasets, card.data.library_name) == (
        "fr",
        ["family_relations"],
        "transformers",
    )
    values = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert values["macro_f1"] == scores["macro_f1"] and values["micro_recall"] == scores["micro_recall"]
    for text in (
        "Labels sentences «famille».",
        "Two sentences of {{ braces }}.",
        "## Scores on the test part (2 samples)",
        "| `-` | 1.000 | 0.500 | 0.667 | 2 |",
        "python finetune.py --output_dir 'a b'",
        '"learning_rate": 0.5',
        '"text": "é"',
        "one abacus; 61 seconds in all.",
        "- Short texts only.\n- French only.",
    ):
        assert text in card.text


def test_card_without_scores_says_no_figure(tmp_path):
    card = ModelCard.load(write_model_card(CardFacts("m", "fill-mask", "Fills masks.", "Text."), tmp_path))
    assert card.data.eval_results is None
    assert "Scores" not in card.text and "duration not measured" in card.text


def test_command_and_hardware_are_those_of_this_process(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/x.py", "--name", "a b"])
    assert launch_command() == "python scripts/x.py --name 'a b'"
    assert "2 processes" in describe_hardware(processes=2)
    assert "1 process;" in describe_hardware()
