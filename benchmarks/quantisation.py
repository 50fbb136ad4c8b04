"""A fine-tuned classifier with weights of fewer bits (torchao): F1 on the test part of the corpus, size and seconds.

`python benchmarks/quantisation.py --model runs/demo/model`. Each line is the same model, its linear layers quantised.
The seconds are the median over alternating rounds, so that a drift of the machine's speed touches all lines alike.
"""

import copy
import io
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)
from transformers import HfArgumentParser, PreTrainedModel

from fratrie.data.corpus import load_family_relations
from fratrie.training.classifiers import load_classifier
from fratrie.training.encoding import encode
from fratrie.training.launch import open_inference
from fratrie.training.metrics import classification_scores
from fratrie.training.scoring import predict_logits
from fratrie.training.tasks import aligned_targets

GROUP = 64


@dataclass
class Options:
    """What to quantise and how to measure."""

    model: str = field(metadata={"help": "Folder of a classifier fine-tuned on the shipped corpus."})
    rounds: int = field(default=3, metadata={"help": "Measured rounds over the test part, after one to warm up."})
    batch_size: int = field(default=32, metadata={"help": "Texts of a batch."})


METHODS: dict[str, Callable[[PreTrainedModel], object]] = {
    "float32": lambda model: None,
    "int8 dynamic": lambda model: quantize_(model, Int8DynamicActivationInt8WeightConfig()),
    "int8 weight-only": lambda model: quantize_(model, Int8WeightOnlyConfig()),
    # Numbers of four bits, each in a byte: torchao's Int4WeightOnlyConfig has no kernel for a CPU.
    "int4 weight-only": lambda model: quantize_(
        model, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))
    ),
}


def main() -> None:
    """Quantise, score and time by turns, and print a table."""
    (options,) = HfArgumentParser(Options, description=__doc__).parse_args_into_dataclasses()
    model, tokenizer, task = load_classifier(options.model)
    dataset = load_family_relations()["test"]
    targets = aligned_targets(dataset, task)
    rows = encode(dataset["text"], model, tokenizer, None, targets)
    models = {name: copy.deepcopy(model).eval() for name in METHODS}
    logits: dict[str, np.ndarray] = {}
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    for name, quantise in METHODS.items():
        quantise(models[name])
    with open_inference() as accelerator:
        for _, (name, quantised) in itertools.product(range(options.rounds + 1), models.items()):
            start = time.perf_counter()
            logits[name] = predict_logits(quantised, accelerator, rows, tokenizer, options.batch_size)
            seconds[name].append(time.perf_counter() - start)
    print(f"{len(rows)} texts, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'':18}{'macro-F1':>9}{'micro-F1':>9}{'logit change':>13}{'MB':>7}{'of layers':>10}{'seconds':>9}")
    thresholds = getattr(model.config, "label_thresholds", None)
    for name, quantised in models.items():
        scores = classification_scores(logits[name], targets, task.problem_type, task.labels, thresholds)
        f1 = f"{scores['macro_f1']:9.3f}{scores['micro_f1']:9.3f}"
        change = float(abs(logits[name] - logits["float32"]).mean())
        size = f"{megabytes(quantised):7.2f}{megabytes(quantised.model.layers):10.2f}"
        print(f"{name:18}{f1}{change:13.3f}{size}{statistics.median(seconds[name][1:]):9.2f}")


def megabytes(module: nn.Module) -> float:
    """Size of the saved weights."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return file.tell() / 1e6


if __name__ == "__main__":
    main()
