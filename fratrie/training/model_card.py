"""Model cards: what a checkpoint is for, how it was trained, how well it does, where its limits lie."""

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from fratrie.files import write_text

from .metrics import Scores, absent_labels, markdown_code, markdown_table, note_on_intervals, one_line

TEMPLATE = """---
{{ card_data }}
---

# {{ title }}

{{ facts.summary }}

## Data

{{ facts.data }}
{% for title, table in facts.tables.items() %}
## {{ title }}

{{ table }}
{% endfor %}
## Use

```python
import fratrie  # registers the model
from transformers import pipeline

use = pipeline("{{ facts.task }}", model="path/to/this/folder"{{ ", top_k=None" if classifies }})
```

## Training

{{ command }}

{{ facts.hardware }}; {{ duration }}.

Arguments:

{{ arguments }}

## Limits
{% for limit in facts.limits %}
- {{ limit }}
{%- endfor %}
"""

INTERVALS = (
    "F1, 95 %: how far F1 would move with other respondents (rows, where the data name nobody), by a bootstrap of "
    "2000 draws; not computed for the micro mean. Draws without a label are left out of its interval, and the macro "
    "mean of a draw is that of the labels it holds."
)


@dataclass
class CardFacts:
    """What a card says; every field is stated as measured or given, nothing is added.

    `summary`, `data`, `tables` and `limits` are Markdown: names that a user chose go through `markdown_code`.
    """

    name: str
    task: str  # a Hugging Face pipeline tag, such as "text-classification"
    summary: str
    data: str
    tables: dict[str, str] = field(default_factory=dict)  # section title -> Markdown
    command: str = field(default_factory=lambda: launch_command())
    arguments: Mapping[str, Any] = field(default_factory=dict)
    hardware: str = field(default_factory=lambda: describe_hardware())
    seconds: float | None = None
    limits: Sequence[str] = ()
    language: str | None = None
    dataset: str | None = None
    scores: Scores | None = None  # of the test part, for the card's metadata


def launch_command() -> str:
    """The command line of this process, quoted for a shell, its paths as `portable_path` tells them."""
    program, *arguments = sys.argv
    words = program.split() if program.startswith("fratrie ") else ["python", portable_path(program)]
    return shlex.join([*words, *map(portable_path, arguments)])


def portable_path(value: str) -> str:
    """An absolute path as seen from the working directory, or its last part where it lies elsewhere.

    Also behind a `--name=`; anything but an absolute path is returned as it is.
    """
    option, equals, behind = value.partition("=")
    if equals and not Path(option).is_absolute():
        return f"{option}={portable_path(behind)}"
    path = Path(os.path.normpath(value))
    if not path.is_absolute():
        return value
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name or value


def _portable(value: Any) -> Any:
    """The same with every absolute path in texts, lists and mappings made portable."""
    if isinstance(value, str):
        return portable_path(value)
    if isinstance(value, Mapping):
        return {name: _portable(part) for name, part in value.items()}
    return [_portable(part) for part in value] if isinstance(value, list | tuple) else value


def describe_hardware(processes: int = 1, device: str = "cpu") -> str:
    """Processor or accelerator, its number, and the number of processes, in words."""
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        machine = torch.cuda.get_device_name()
    else:
        machine = f"{platform.machine()} CPU, {os.cpu_count()} cores"
    return f"{machine}; {processes} process{'es' if processes > 1 else ''}; torch {torch.__version__}"


def model_card(facts: CardFacts) -> ModelCard:
    """Build the card from its facts."""
    name = one_line(facts.name)
    data = ModelCardData(
        language=facts.language,
        library_name="transformers",
        pipeline_tag=facts.task,
        tags=["fratrie"],
        datasets=[facts.dataset] if facts.dataset else None,
        model_name=name if facts.scores else None,
        eval_results=_eval_results(facts) if facts.scores else None,
    )
    duration = "duration not measured" if facts.seconds is None else f"{facts.seconds:.0f} seconds in all"
    arguments = json.dumps(_portable(facts.arguments), indent=2, ensure_ascii=False, default=str)
    return ModelCard.from_template(
        data,
        template_str=TEMPLATE,
        facts=facts,
        title=re.sub(r"([\\`*_\[\]<>&~#])", r"\\\1", name),
        duration=duration,
        command=_code_block(facts.command),
        arguments=_code_block(arguments, "json"),
        classifies=facts.task == "text-classification",  # whose pipeline gives one label alone by default
    )


def write_model_card(facts: CardFacts, folder: str | os.PathLike[str]) -> Path:
    """Write the card as README.md into the folder of a checkpoint; return its path."""
    path = Path(folder) / "README.md"
    write_text(path, str(model_card(facts)))
    return path


def _code_block(text: str, language: str = "") -> str:
    """A text as a block of Markdown's code, whose fence is longer than any in the text."""
    fence = "`" * (1 + max([2, *map(len, re.findall("`+", text))]))
    lines = "\n".join(map(_printable, text.splitlines()))
    return f"{fence}{language}\n{lines}\n{fence}"


def _printable(line: str) -> str:
    return re.match(r"\s*", line)[0] + one_line(line)  # type: ignore[index] # it matches every text


def classification_tables(scores: Mapping[str, Scores]) -> dict[str, str]:
    """Per-label tables for a card, from the scores of each part («test», «validation»)."""
    return {
        f"Scores on the {part} part ({part_scores['samples']} samples)": "\n\n".join(
            [markdown_table(part_scores), *_notes(part_scores)]
        )
        for part, part_scores in scores.items()
    }


def _notes(scores: Scores) -> list[str]:
    missing = absent_labels(scores) if "support" in scores else []
    names = ", ".join(map(markdown_code, missing))
    absent = f"No example of {names}: such a label counts 0 in the macro mean, and not in that of the labels present."
    drawn = [f"Here {note}."] if (note := note_on_intervals(scores)) else []
    return [absent] * bool(missing) + [INTERVALS] * ("f1_interval" in scores) + drawn


def _eval_results(facts: CardFacts) -> list[EvalResult]:
    assert facts.scores is not None
    dataset = facts.dataset or "local files"
    return [
        EvalResult(
            task_type=facts.task,
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_split="test",
            metric_type=name,
            metric_value=value,
        )
        for name, value in facts.scores.items()
        if isinstance(value, float)
    ]
