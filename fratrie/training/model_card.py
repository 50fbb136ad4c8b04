"""Model cards: what a checkpoint is for, how it was trained, how well it does, where its limits lie."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..files import write_text
from .metrics import Scores, markdown_table

TEMPLATE = """---
{{ card_data }}
---

# {{ facts.name }}

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

```
{{ facts.command }}
```

{{ facts.hardware }}; {{ duration }}.

Arguments:

```json
{{ arguments }}
```

## Limits
{% for limit in facts.limits %}
- {{ limit }}
{%- endfor %}
"""

INTERVALS = (
    "F1, 95 %: how far F1 would move with other respondents (rows, where the data name nobody), by a bootstrap of "
    "2000 draws; not computed for the micro mean."
)


@dataclass
class CardFacts:
    """What a card tells; every field is stated as measured or given, nothing is added."""

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
    """The command line of this process, quoted for a shell."""
    return shlex.join(["python", *sys.argv])


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
    data = ModelCardData(
        language=facts.language,
        library_name="transformers",
        pipeline_tag=facts.task,
        tags=["fratrie"],
        datasets=[facts.dataset] if facts.dataset else None,
        model_name=facts.name if facts.scores else None,
        eval_results=_eval_results(facts) if facts.scores else None,
    )
    duration = "duration not measured" if facts.seconds is None else f"{facts.seconds:.0f} seconds in all"
    arguments = json.dumps(dict(facts.arguments), indent=2, ensure_ascii=False, default=str)
    return ModelCard.from_template(
        data,
        template_str=TEMPLATE,
        facts=facts,
        duration=duration,
        arguments=arguments,
        classifies=facts.task == "text-classification",  # whose pipeline gives one label alone by default
    )


def write_model_card(facts: CardFacts, folder: str | os.PathLike[str]) -> Path:
    """Write the card as README.md into the folder of a checkpoint; give back its path."""
    path = Path(folder) / "README.md"
    write_text(path, str(model_card(facts)))
    return path


def classification_tables(scores: Mapping[str, Scores]) -> dict[str, str]:
    """Per-label tables for a card, from the scores of each part («test», «validation»)."""
    titles = {part: f"Scores on the {part} part ({s['samples']} samples)" for part, s in scores.items()}
    return {
        titles[part]: markdown_table(s) + (f"\n\n{INTERVALS}" if "f1_interval" in s else "")
        for part, s in scores.items()
    }


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
