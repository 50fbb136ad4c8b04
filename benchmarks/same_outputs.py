"""Whether two revisions of the package give equal outputs, to the bit, for every combination of the tests.

    git worktree add /tmp/before REVISION
    PYTHONPATH=/tmp/before:tests/models python benchmarks/same_outputs.py --write before.safetensors
    PYTHONPATH=.:tests/models python benchmarks/same_outputs.py --compare before.safetensors

Each model is seeded, built in float32 and in bfloat16, and passed a batch padded on either side, rows without
padding, packed rows, a past in the cache, and a training step; it also generates. Weights, config.json, logits,
recorded states, losses and gradients are compared. Gradients may be summed in another order: their largest difference
is told apart.
"""

import argparse
import copy
import json
from collections.abc import Iterator
from typing import Any

import torch
from combinations import (
    CASES,
    DECODER,
    ENCODER,
    HEADS,
    IMAGE,
    SEQ2SEQ,
    Case,
    documents,
    first_head,
    padded_inputs,
    training_inputs,
)
from safetensors.torch import load_file, save_file

torch.set_num_threads(1)


def results(case: Case) -> Iterator[tuple[str, torch.Tensor]]:
    """What a revision computes of a case, by name."""
    for head in HEADS[case.sibling]:
        model: Any = case.build(head)
        text = model.config.to_json_string(use_diff=False)
        yield f"{head}/config", torch.tensor(list(text.encode()), dtype=torch.uint8)
        for name, weight in model.state_dict().items():
            yield f"{head}/weights/{name}", weight.contiguous()
        yield from passes(case, head, model)
        yield from passes(case, f"{head}/bfloat16", copy.deepcopy(model).bfloat16())
    model = case.build(first_head(case.sibling))
    yield from training(case, model)
    if case.sibling in (DECODER, SEQ2SEQ):
        inputs = {name: x for name, x in padded_inputs(case.sibling, "left").items() if "decoder" not in name}
        yield "generated", model.generate(**inputs, max_new_tokens=8, do_sample=False)


@torch.no_grad()
def passes(case: Case, head: str, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes without gradients."""
    sides = ("right",) if case.sibling == IMAGE else ("left", "right")
    batches: dict[str, dict[str, Any]] = {side: padded_inputs(case.sibling, side) for side in sides}
    if case.sibling != IMAGE:
        batches["whole"] = {name: ids[:1] for name, ids in batches["right"].items() if name.endswith("ids")}
    if case.sibling in (ENCODER, DECODER):
        rows = documents()
        positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
        batches["packed"] = {"input_ids": torch.cat(rows)[None], "position_ids": positions}
    for name, batch in batches.items():
        recorded = {"output_hidden_states": True} if name != "packed" else {}
        outputs = model(**batch, **recorded)
        yield from ((f"{head}/{name}/{key}", x) for key, x in tensors_of(outputs))
    if case.sibling == DECODER and head.startswith(("base", "language_model")):
        ids = batches["whole"]["input_ids"]
        cache = model(ids[:, :4], use_cache=True).cache
        yield f"{head}/continued", model(ids[:, 4:], attention_mask=torch.ones_like(ids), cache=cache)[0]


def training(case: Case, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Loss and gradients of a padded batch, with dropout."""
    torch.manual_seed(1)
    loss = model.train()(**training_inputs(case.sibling)).loss
    loss.backward()
    model.eval()
    yield "training/loss", loss.detach()
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            yield f"gradients/{name}", weight.grad.contiguous()


def tensors_of(outputs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an output, by name."""
    for key, value in outputs.items():
        for index, x in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(x, torch.Tensor):
                yield f"{key}{index}", x.detach().contiguous()


def main() -> None:
    """Write the results of the revision that is imported, or compare it with those of another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", metavar="FILE")
    group.add_argument("--compare", metavar="FILE")
    options = parser.parse_args()
    found = {f"{case}/{name}": x.clone() for case in CASES for name, x in results(case)}
    if options.write:
        save_file(found, options.write)
        print(f"{len(found)} tensors of {len(CASES)} cases in {options.write}")
        return
    before = load_file(options.compare)
    differing = [name for name in before.keys() & found.keys() if not torch.equal(before[name], found[name])]
    gradients = [name for name in differing if "/gradients/" in name]
    largest = max(((before[n] - found[n]).abs().max() / before[n].abs().max() for n in gradients), default=0)
    others = sorted(set(differing) - set(gradients))
    report = {
        "tensors": len(before),
        "missing": sorted(before.keys() ^ found.keys()),
        "differing": others,
        "differing gradients": len(gradients),
        "largest relative difference of gradients": float(largest),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
