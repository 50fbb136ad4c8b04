"""One of several processes that train models on parts of rows; `test_context_parallel.py` starts it.

Writes how far loss and gradients are from those of whole rows, by case.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fratrie import FratrieDecoderForCausalLM, FratrieEncoderForMaskedLM, norm_slots
from fratrie.modeling.losses import shift_labels
from fratrie.training.collators import PackedCausalCollator
from fratrie.training.context_parallel import open_context

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
SIZES |= {"intermediate_size": 24, "max_position_embeddings": 32}
ROTARY = {"position_type": "rotary", **norm_slots("pre", "rms_norm"), "num_key_value_heads": 2}
BOTH = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
DECODERS = {
    "learned positions": {},
    "rotary, window": {**ROTARY, **BOTH},
    "latent": {"position_type": "rotary", "mixer_types": ["latent"] * 2, "kv_lora_rank": 8},
    "experts": {**ROTARY, "num_experts": 4, "router_aux_loss_coef": 0.0},
}
ENCODERS = {"learned positions": {}, "rotary, window": {**ROTARY, **BOTH}}


def ids_of(*lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 40, (length,), generator=generator) for length in lengths]


def packed():
    """Rows of several documents, as they are made for pretraining."""
    rows = [ids_of(7, 4, 6), ids_of(11, 2)]
    cut = [
        {"input_ids": torch.cat(row), "position_ids": torch.cat([torch.arange(len(document)) for document in row])}
        for row in rows
    ]
    return PackedCausalCollator(pad_token_id=0, block_size=19)(cut)


def padded(side):
    rows = ids_of(18, 7)
    ids = torch.nn.utils.rnn.pad_sequence(rows, True, 0, padding_side=side)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def masked():
    batch = padded("right")
    return batch | {"labels": batch["labels"].masked_fill(torch.arange(18) % 3 > 0, -100)}


def whole_rows():
    return {"input_ids": torch.stack(ids_of(16)), "labels": torch.stack(ids_of(16))}


MODELS = {
    **{f"{name}, packed": (FratrieDecoderForCausalLM, fields, packed) for name, fields in DECODERS.items()},
    "decoder, padded": (FratrieDecoderForCausalLM, DECODERS["rotary, window"], lambda: padded("left")),
    "decoder, whole rows": (FratrieDecoderForCausalLM, DECODERS["rotary, window"], whole_rows),
    **{f"encoder, {name}": (FratrieEncoderForMaskedLM, fields, masked) for name, fields in ENCODERS.items()},
}


def differences(model, batch):
    """Of loss and gradients: all parts together, and the whole."""
    model.config.chunked_loss = False
    targets = batch["labels"]
    if model.config.is_causal_stack:
        targets = shift_labels(targets, batch.get("position_ids"), batch.get("attention_mask"))
    total = count(targets)
    loss = model(**batch, num_items_in_batch=total).loss
    expected = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    context = open_context(model, dist.get_world_size())
    inputs = context.split(batch)
    total = count(inputs["labels"]).clone()
    dist.all_reduce(total)
    loss = model(**inputs, num_items_in_batch=total).loss
    parts = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    for part in parts:
        dist.all_reduce(part)
    return [float((part - whole).abs().max()) for part, whole in zip(parts, expected, strict=True)]


def count(labels):
    return (labels != -100).sum()


def build(model_class, config):
    torch.manual_seed(0)
    model = model_class(config).double().train()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def main(folder):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    report = {}
    for name, (model_class, fields, batch) in MODELS.items():
        without = dict.fromkeys(("hidden_dropout", "embedding_dropout", "attention_dropout"), 0.0)
        model = build(model_class, model_class.config_class(**SIZES, **without, **fields))
        report[name] = differences(model, batch())
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
