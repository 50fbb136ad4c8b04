"""Classifying short sentences through the pipelines: Hugging Face's BERT beside ours with the same weights."""

import torch
from transformers import BertConfig, BertForSequenceClassification, pipeline, pipelines

from benchmarks.timing import Row, device, times
from fratrie.conversion import from_hf
from fratrie.data.corpus import load_family_relations
from fratrie.tokenization import train_byte_level_bpe

SENTENCES, BATCH = 400, 32
GOALS = {torch.float32: 6.0, torch.bfloat16: 9.0}
SIZES = ((6, 256), (4, 128))


def measure(rounds: int, sizes: tuple[tuple[int, int], ...] = SIZES) -> list[Row]:
    """A row for each size, precision and batch size that the user gives."""
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
    ours = {dtype: pipeline("text-classification", model=from_hf(model).to(dtype).eval(), **parts) for dtype in GOALS}
    expected = [result["label"] for result in theirs(texts)]
    same = {dtype: [r["label"] for r in pipe(texts)] for dtype, pipe in ours.items()}
    assert same[torch.float32] == expected and len(set(expected)) > 1
    ordered = sorted(texts, key=lambda text: len(tokenizer(text)["input_ids"]))
    ways = {
        "one": lambda: theirs(texts),
        "batched": lambda: theirs(texts, batch_size=BATCH),
        "sorted": lambda: theirs(ordered, batch_size=BATCH),
    }
    ways |= {
        f"{dtype} {size}": lambda pipe=pipe, size=size: pipe(texts, batch_size=size)
        for dtype, pipe in ours.items()
        for size in (1, BATCH)
    }
    found = times(ways, rounds)
    best = f"its best: {BATCH} on sorted input; at {BATCH} {found['one'] / found['batched']:.2f}"
    return [
        Row(
            work=f"classifying {SENTENCES} sentences, {layers} x {width}, batch_size {size}, {_name(dtype)}",
            against_default=found["one"] / found[f"{dtype} {size}"],
            hf_best=found["one"] / found["sorted"],
            goal=GOALS[dtype],
            ours=f"{SENTENCES / found[f'{dtype} {size}']:.0f} sentences/s",
            note=f"Hugging Face at batch_size 1, {best}; {sum(map(str.__eq__, same[dtype], expected))} labels equal",
        )
        for dtype in GOALS
        for size in (1, BATCH)
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
