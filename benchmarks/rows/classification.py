"""Classifying short sentences through the pipelines: Hugging Face's BERT beside ours with the same weights."""

from collections.abc import Callable
from functools import partial

import torch
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel, pipeline, pipelines

from benchmarks.timing import Row, device, times
from fratrie.conversion import from_hf
from fratrie.data.corpus import load_family_relations
from fratrie.inference import pack
from fratrie.tokenization import train_byte_level_bpe

SENTENCES, BATCH = 400, 32
SIZES = ((6, 256), (4, 128))
# How our model is prepared, and the goal; packing is for processors.
WAYS: dict[str, tuple[Callable[[PreTrainedModel], PreTrainedModel], float | None]] = {
    "float32": (lambda model: model, 6.0),
    "weights in bfloat16": (lambda model: model.to(torch.bfloat16), 9.0),
    "packed float32": (pack, 6.0),
    "packed in bfloat16": (lambda model: pack(model.to(torch.bfloat16), "bfloat16"), 9.0),
    "packed int8": (partial(pack, precision="int8"), 12.0),
    "packed int8, the rest in bfloat16": (lambda model: pack(model.to(torch.bfloat16), "int8"), 12.0),
    "packed int8 weights": (partial(pack, precision="int8_weights"), None),
}


def measure(rounds: int, sizes: tuple[tuple[int, int], ...] = SIZES) -> list[Row]:
    """A row for each size and way; `batch_size` is left at 1, which ours does not feel."""
    return [row for layers, width in sizes for row in _compare(layers, width, rounds)]


def _compare(layers: int, width: int, rounds: int) -> list[Row]:
    texts = load_family_relations()["train"]["text"][:]
    tokenizer = train_byte_level_bpe(texts, vocab_size=3000, model_max_length=128, show_progress=False)
    texts = texts[:SENTENCES]
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        num_labels=11,
        initializer_range=0.1,  # random weights that give texts different labels
        pad_token_id=tokenizer.pad_token_id,
    )
    model = BertForSequenceClassification(config).eval()
    parts = {"tokenizer": tokenizer, "device": device()}
    theirs = pipelines.TextClassificationPipeline(model=model, **parts)
    ours = {
        name: pipeline("text-classification", model=prepare(from_hf(model).eval()), **parts)
        for name, (prepare, _) in WAYS.items()
        if device().type == "cpu" or not name.startswith("packed")
    }
    expected = [result["label"] for result in theirs(texts)]
    labels = {name: [result["label"] for result in pipe(texts)] for name, pipe in ours.items()}
    same = {name: sum(map(str.__eq__, found, expected)) for name, found in labels.items()}
    assert same["float32"] == SENTENCES and len(set(expected)) > 1
    ordered = sorted(texts, key=lambda text: len(tokenizer(text)["input_ids"]))
    seconds = times(
        {
            "one": lambda: theirs(texts),
            "batched": lambda: theirs(texts, batch_size=BATCH),
            "sorted": lambda: theirs(ordered, batch_size=BATCH),
        }
        | {name: partial(pipe, texts) for name, pipe in ours.items()},
        rounds,
    )
    best = f"its best: {BATCH} on sorted input; at {BATCH} {seconds['one'] / seconds['batched']:.2f}"
    return [
        Row(
            work=f"classifying {SENTENCES} sentences, {layers} × {width}, {name}",
            against_default=seconds["one"] / seconds[name],
            hf_best=seconds["one"] / seconds["sorted"],
            goal=WAYS[name][1],
            ours=f"{SENTENCES / seconds[name]:.0f} sentences/s",
            note=f"Hugging Face at batch_size 1, {best}; {same[name]} labels are the same",
        )
        for name in ours
    ]
