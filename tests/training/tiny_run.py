"""A tiny training run as a script, for tests that start processes: `tiny_run.py <json of options>`."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, gather_object
from datasets import Dataset, IterableDataset
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from fratrie import FratrieEncoderConfig, FratrieEncoderForMaskedLM, FratrieEncoderForSequenceClassification
from fratrie.cli.running import run
from fratrie.training import launch
from fratrie.training.evaluation import evaluate_loss, predict
from fratrie.training.loop import TrainingOptions, create_accelerator, train

VOCAB, ROWS = 40, 21


def token_rows():
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, VOCAB, (3 + n % 6,), generator=generator).tolist() for n in range(ROWS)]
    return [{"number": number, "input_ids": row} for number, row in enumerate(ids)]


def masked(rows):
    """Random masks, drawn from the global generator."""
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in rows])
    chosen = (torch.rand(ids.shape) < 0.3) & ids.ne(0)
    return {
        "input_ids": ids.masked_fill(chosen, 4),
        "attention_mask": ids.ne(0).long(),
        "labels": ids.masked_fill(~chosen, -100),
    }


def labelled(rows):
    batch = masked(rows)
    return {**batch, "labels": torch.tensor([sum(row["input_ids"]) % 2 for row in rows])}


def tiny(fratrie_model, bert_model, bert):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    sizes |= {"vocab_size": VOCAB, "max_position_embeddings": 16, "pad_token_id": 0}
    return (
        bert_model(BertConfig(**sizes)) if bert else fratrie_model(FratrieEncoderConfig(hidden_dropout=0.1, **sizes))
    )


def pretend_gpus():
    """Let Accelerate shard by FSDP2, which it does for GPUs only, over CPU processes."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    launch.Accelerator = lambda cpu, **options: Accelerator(fsdp_plugin=plugin, **options)


def stream():
    return IterableDataset.from_generator(lambda: iter(token_rows()))


def main():
    given = json.loads(sys.argv[1])
    use_stream, poison = given.pop("stream", False), given.pop("poison_process", None)
    bert, stop = given.pop("bert", False), given.pop("stop_process", None)
    if given.pop("sharded", False):
        pretend_gpus()
    options = TrainingOptions(
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        report_to="none",
        disable_progress=True,
        **given,
    )
    accelerator = create_accelerator(options)
    rows = Dataset.from_list(token_rows())

    def evaluate(model, accelerator):
        return evaluate_loss(model, accelerator, rows, masked, batch_size=5)

    def collator(batch):
        if poison == accelerator.process_index:
            next(model.parameters()).data.fill_(float("nan"))
        if stop == accelerator.process_index and len(seen) == 6:  # the third step
            os.kill(os.getpid(), signal.SIGTERM)
        return masked(batch)

    seen = []

    def counted(batch):
        seen.extend(row["number"] for row in batch)
        return collator(batch)

    model = tiny(FratrieEncoderForMaskedLM, BertForMaskedLM, bert)
    data = stream() if use_stream else rows
    result = train(model, options, accelerator, data, counted, evaluate=evaluate)
    classifier = tiny(FratrieEncoderForSequenceClassification, BertForSequenceClassification, bert)
    batches = [range(len(rows))[first : first + 5] for first in range(0, len(rows), 5)]
    logits, labels = predict(classifier.to(accelerator.device), accelerator, rows, labelled, batches)
    report = {"history": result.history, "logits": logits.tolist(), "labels": labels.tolist(), "seen": seen}
    reports = gather_object([report])
    accelerator.end_training()
    if accelerator.is_main_process:
        assert all(other["logits"] == report["logits"] for other in reports)
        report["seen"] = [number for other in reports for number in other["seen"]]
        Path(options.output_dir, "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    run(main)
