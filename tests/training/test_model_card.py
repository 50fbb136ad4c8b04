import json
import sys

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from fratrie.training.metrics import markdown_code, multilabel_scores, one_line
from fratrie.training.model_card import (
    CardFacts,
    classification_tables,
    describe_hardware,
    launch_command,
    portable_path,
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
    monkeypatch.setattr(sys, "argv", ["fratrie finetune", "--name", "a b"])
    assert launch_command() == "fratrie finetune --name 'a b'"
    assert "2 processes" in describe_hardware(processes=2)
    assert "1 process;" in describe_hardware()


LABELS = [
    "|",
    "`",
    "``a`",
    "<b>",
    "*gras*",
    "---",
    "a\nb",
    '"',
    "'",
    "👨\u200d👩\u200d👧",
    "{{ x }}",
    "[a](b)",
    "\\|",
    "&amp;",
]


@pytest.mark.parametrize("name", ["---", "a: 'b", "*x* <b>[y](z)`", "été\nneuf\udcff", "#"])
def test_labels_and_names_of_any_characters_come_back_from_the_card(tmp_path, name):
    scores = multilabel_scores([[1] * len(LABELS)], [[1] * (len(LABELS) - 1) + [0]], LABELS)
    facts = CardFacts(
        name, "text-classification", ", ".join(map(markdown_code, LABELS)), "Text.",
        tables=classification_tables({"test": scores}), command="x 'a\n```\nb'", arguments={"a": "```"}, scores=scores,
    )  # fmt: skip
    card = ModelCard.load(write_model_card(facts, tmp_path))
    assert card.data.eval_results and card.data.to_dict()["model-index"][0]["name"] == one_line(name)
    tokens = MarkdownIt("commonmark").enable("table").parse(card.text)
    code = [
        [part.content for part in token.children if part.type == "code_inline"] for token in tokens if token.children
    ]
    spoken = [one_line(label) for label in LABELS]
    assert spoken in code, "the summary"
    assert [line[0] for line in code if len(line) == 1][: len(LABELS)] == spoken, "the table"
    assert code.count(spoken[-1:]) == 2, "the label without an example is named below the table"
    heading = tokens[next(i for i, token in enumerate(tokens) if token.type == "heading_open") + 1]
    assert "".join(part.content for part in heading.children) == one_line(name)
    fences = [token for token in tokens if token.type == "fence"]
    assert len(fences) == 3 and fences[1].content == "x 'a\n```\nb'\n"
    assert json.loads(fences[2].content) == {"a": "```"}


def test_no_absolute_path_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["/opt/x/finetune.py", f"--output_dir={tmp_path}/runs/a", "--model", "/home/me/bert/"]
    )
    assert launch_command() == "python finetune.py --output_dir=runs/a --model bert"
    assert [portable_path(name) for name in ("org/name", "a=b=/c/d", "", "-1", "/", str(tmp_path))] == [
        "org/name", "a=b=d", "", "-1", "/", ".",
    ]  # fmt: skip
    arguments = {"files": ["/home/me/a.txt", "b.txt"], "model": "/home/me/bert", "seed": 1}
    text = write_model_card(CardFacts("m", "fill-mask", "S", "D", arguments=arguments), tmp_path).read_text()
    assert "/home" not in text and str(tmp_path) not in text
    assert '"a.txt"' in text and '"model": "bert"' in text and '"seed": 1' in text
