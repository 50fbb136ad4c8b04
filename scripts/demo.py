"""The whole story in a few minutes: a Transformer learns to label French sentences about family relations.

Trains a tokenizer, pretrains a small encoder on the training sentences, fine-tunes it, scores it on the test part
beside two classical baselines, and uses it through Hugging Face's pipelines; then a tiny decoder writes a few words
and a tiny encoder-decoder turns sentences round. Each step prints the command that does the same by hand.
"""

import json
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, HfArgumentParser, pipeline

import fratrie
from fratrie.data.corpus import load_family_relations
from fratrie.tokenization import train_byte_level_bpe
from fratrie.training.baselines import score_baselines
from fratrie.training.cli import run
from fratrie.training.loop import TrainingOptions, create_accelerator, train
from fratrie.training.metrics import scores_table

TRAIN_TEXTS = "fratrie/data/family_relations/train.txt"
WORDS = "je tu il elle nous ma mon mère père sœur frère tante aime vois parle et avec très bien souvent"
NEW_SENTENCES = [
    "Je m'entends très bien avec ma mère, on rigole tout le temps.",
    "Mon père ne m'appelle jamais et ça me met en colère.",
    "J'ai deux petites sœurs et un grand frère qui habite à Lyon.",
    "Avec mon beau-père c'est ni bien ni mal, on se parle à peine.",
    "Mes grands-parents vivent à la campagne.",
]


@dataclass
class DemoOptions:
    """Where the demonstration writes."""

    output_dir: str = field(default="runs/demo", metadata={"help": "Folder for everything the demonstration makes."})


def main() -> None:
    """Run the steps one after the other, each timed."""
    (options,) = HfArgumentParser(DemoOptions, description=__doc__).parse_args_into_dataclasses()
    if not Path(TRAIN_TEXTS).is_file():
        raise ValueError(
            f"{TRAIN_TEXTS} is not here: start from the root of the repository, `make demo` or as it does"
        )
    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    step = partial(timed, seconds)
    step("tokenizer", lambda: train_tokenizer(folder))
    step("pretrain", lambda: pretrain(folder))
    step("finetune", lambda: finetune(folder))
    baselines = step("baselines", score_classical)
    model = json.loads((folder / "model" / "metrics.json").read_text(encoding="utf-8"))["test"]
    report(folder, model, baselines, seconds)
    step("pipeline", lambda: label_new_sentences(folder))
    step("decoder", lambda: write_words(folder))
    step("seq2seq", lambda: turn_sentences_round(folder))
    report(folder, model, baselines, seconds)
    print(f"\n{sum(seconds.values()):.0f} seconds in all; the model is in {folder / 'model'}.")


def timed(seconds: dict[str, float], name: str, action: Callable[[], Any]) -> Any:
    """Announce a step, run it, and note its seconds."""
    print(f"\n== {name} ==", flush=True)
    start = time.perf_counter()
    result = action()
    seconds[name] = round(time.perf_counter() - start, 1)
    return result


def script(name: str, **options: Any) -> None:
    """Run another script as a user would, after printing its command.

    Raises:
        ValueError: when the script fails; it has said why.
    """
    words = [f"scripts/{name}.py"]
    for key, value in options.items():
        words += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    print("$ python", shlex.join(words), flush=True)
    done = subprocess.run([sys.executable, *words], check=False)
    if done.returncode:
        raise ValueError(f"scripts/{name}.py ended with exit code {done.returncode}")


def train_tokenizer(folder: Path) -> None:
    """A byte-level BPE on the training sentences."""
    script("train_tokenizer", files=TRAIN_TEXTS, annotated=True, vocab_size=2000, output_dir=folder / "tokenizer")


def pretrain(folder: Path) -> None:
    """A small encoder fills in masked words of the training sentences."""
    script(
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


def finetune(folder: Path) -> None:
    """The encoder learns the labels; a tenth of the respondents is watched to choose the best epoch."""
    script(
        "finetune",
        model=folder / "pretrained",
        learning_rate=1e-3,
        num_train_epochs=20,
        early_stopping_patience=8,
        per_device_train_batch_size=32,
        overwrite_output_dir=True,
        output_dir=folder / "model",
    )


def score_classical() -> dict[str, Any]:
    """TF-IDF with two linear classifiers, tuned by cross-validation on train, scored on test."""
    corpus = load_family_relations()
    return score_baselines(corpus["train"], corpus["test"])


def report(folder: Path, model: Mapping[str, Any], baselines: dict[str, Any], seconds: dict[str, float]) -> None:
    """Print the table of the study, write it as JSON and draw the F1 of each label."""
    methods = {"Fratrie encoder": model, **baselines}
    print(scores_table(methods))
    results = {"model": dict(model), "baselines": baselines, "seconds": seconds}
    (folder / "metrics.json").write_text(json.dumps(results, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    draw(methods, folder / "f1.png")


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
    label = pipeline("family-relations", model=str(folder / "model"))
    for sentence, result in zip(NEW_SENTENCES, label(NEW_SENTENCES), strict=True):
        print(f"{sentence}\n    {result}")


def write_words(folder: Path) -> None:
    """A tiny decoder continues sentences."""
    script("train_tokenizer", files=TRAIN_TEXTS, annotated=True, vocab_size=1000, sibling="decoder",
           output_dir=folder / "decoder_tokenizer")  # fmt: skip
    script(
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
    config = fratrie.FratrieSeq2SeqConfig(
        vocab_size=len(encoder_side),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
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
    turn = pipeline("text2text-generation", model=str(folder / "seq2seq"))
    unseen = [" ".join(draw_sentence.sample(words, k=4)) for _ in range(100)]
    answers = [answer["generated_text"] for answer in turn(unseen, max_new_tokens=24)]
    right = sum(answer == reverse(text) for text, answer in zip(unseen, answers, strict=True))
    print(f"{unseen[0]} -> {answers[0]}\n{right} of {len(unseen)} unseen sentences turned round without a fault")


def reverse(text: str) -> str:
    """The words of a text in reverse order."""
    return " ".join(reversed(text.split()))


if __name__ == "__main__":
    run(main)
