"""Score a fine-tuned sentence classifier on labelled texts: precision, recall, F1, support and their means.

Where the texts name their respondents, F1 has intervals (95 %, bootstrap over respondents). Without a file it scores
on a part of the shipped family-relations corpus. Example:
fratrie evaluate --model runs/family --file new.csv --output_file scores.json
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from accelerate import Accelerator

import fratrie  # noqa: F401 (registers its models)
from fratrie.checkpoints import read_json
from fratrie.data.corpus import load_family_relations
from fratrie.files import write_json
from fratrie.inference import place
from fratrie.tokenization.fragments import tell_fragments
from fratrie.training.classifiers import load_classifier
from fratrie.training.encoding import encode
from fratrie.training.labelled_data import read_labelled, refuse_options_of_files
from fratrie.training.launch import open_inference
from fratrie.training.metrics import scores_table
from fratrie.training.options import TABLES, InferenceOptions, LabelOptions
from fratrie.training.output_files import prepare_output
from fratrie.training.scoring import score_rows
from fratrie.training.tasks import aligned_targets

from .options import read_options
from .running import run


@dataclass(kw_only=True)
class EvaluationOptions(InferenceOptions, LabelOptions):
    """Which texts to score on, and where to write."""

    file: str | None = field(default=None, metadata={"help": f"Labelled texts: .txt (annotated), {TABLES}."})
    part: Literal["train", "test"] = field(
        default="test", metadata={"help": "Without a file: the part of the shipped corpus to score on."}
    )
    output_file: str | None = field(default=None, metadata={"help": "JSON file for the scores."})
    overwrite: bool = field(default=False, metadata={"help": "Replace an output file that does not hold scores."})


def main() -> None:
    """Load, score, print the table, write the JSON file."""
    (options,) = read_options(__doc__, EvaluationOptions)
    if not options.file:
        refuse_options_of_files(options)
    with open_inference() as accelerator:
        _evaluate(options, accelerator)


def _evaluate(options: EvaluationOptions, accelerator: Accelerator) -> None:
    output = None
    if options.output_file:
        output = prepare_output(options.output_file, options.file, options.model, _holds_scores, options.overwrite)
    model, tokenizer, task = load_classifier(options.model, options.label_thresholds)
    if options.file:
        dataset = read_labelled(options.file, task.labels, task.problem_type, **options.reading())
    else:
        dataset = load_family_relations()[options.part]
    targets = aligned_targets(dataset, task)
    tell_fragments(tokenizer, dataset["text"][:], options.file or f"the {options.part} part")
    rows = encode(dataset["text"][:], model, tokenizer, options.max_length, targets)
    model = place(model, accelerator.device, options.precision)
    respondents = dataset["respondent"][:] if "respondent" in dataset.column_names else None
    scores = score_rows(model, accelerator, rows, tokenizer, options.batch_size, respondents)
    if accelerator.is_main_process:
        print(scores_table({Path(options.model).resolve().name: scores}))
        if output:
            write_json(output, scores)


def _holds_scores(path: Path) -> bool:
    """Whether a file is what this script writes."""
    try:
        scores = read_json(path)
    except ValueError:
        return False
    return "samples" in scores and ("macro_f1" in scores or "mse" in scores)


if __name__ == "__main__":
    run(main)
