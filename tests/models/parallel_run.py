"""One of several processes that load, run, train and save models together; `test_parallel.py` starts it.

Reads cases from a json file, and writes what it found beside it: differences to the model in one piece, or the error.
"""

import importlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

NEW = 6


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """A batch whose second row is padded on the left, and labels."""
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        return inputs | {"decoder_input_ids": torch.randint(3, 60, (2, 7)), "labels": torch.randint(3, 60, (2, 7))}
    return inputs | {"labels": ids.masked_fill(mask == 0, -100)}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((whole(one) - whole(other)).abs().max())


@torch.no_grad()
def generation(models: list[Any], inputs: dict[str, torch.Tensor]) -> Any:
    """Whether the texts are the same, and how far the scores differ."""
    prompt = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    settings = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    settings |= {"eos_token_id": None, "pad_token_id": 0, "decoder_start_token_id": 0}
    one, other = (model.generate(**prompt, **settings) for model in models)
    scores = difference(torch.stack(one.logits), torch.stack(other.logits))
    return [torch.equal(one.sequences, other.sequences), scores]


@torch.no_grad()
def forward(models: list[Any], inputs: dict[str, torch.Tensor]) -> float:
    inputs = {name: x for name, x in inputs.items() if name != "labels"}
    one, other = (model(**inputs).logits for model in models)
    if not models[0].config.is_encoder_decoder:
        real = inputs["attention_mask"].bool()
        one, other = one[real], other[real]
    return difference(one, other)


def training(models: list[Any], inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Differences of losses and gradients, over two batches whose gradients add up."""
    losses = []
    for model in models:
        model.train()
        for row in (slice(0, 1), slice(1, 2)):
            loss = model(**{name: x[row] for name, x in inputs.items()}).loss
            loss.backward()
            losses.append(float(loss))
        model.eval()
    grads = [{name: whole(p.grad) for name, p in m.named_parameters() if p.grad is not None} for m in models]
    assert grads[0].keys() == grads[1].keys(), grads[0].keys() ^ grads[1].keys()
    worst = max((difference(grad, grads[1][name]), name) for name, grad in grads[0].items())
    return {"loss": abs(losses[0] - losses[2]) + abs(losses[1] - losses[3]), "gradient": worst}


def saving(model: Any, path: str, rank: int) -> dict[str, Any]:
    """Names of weights that the checkpoint lacks, has changed, and has beyond those of the model in one piece."""
    folder = f"{path}-saved"
    model.save_pretrained(folder)
    dist.barrier()
    before, after = (load_file(Path(f, "model.safetensors")) for f in (path, folder))
    changed = [name for name in before if name in after and not torch.equal(before[name], after[name])]
    beyond = sorted(after.keys() - before.keys())
    tied = [name for name in beyond if torch.equal(after[name], before[model.all_tied_weights_keys[name]])]
    return {"lacks": sorted(before.keys() - after.keys()), "changed": changed, "beyond": sorted({*beyond} - {*tied})}


def run(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """All that is asked of one model, split in one way."""
    package, name = case["model"].split(".")
    model_class = getattr(importlib.import_module(package), name)
    dtype, distributed = getattr(torch, case["dtype"]), DistributedConfig(**case["sizes"])
    split = model_class.from_pretrained(case["path"], dtype=dtype, distributed_config=distributed).eval()
    models = [model_class.from_pretrained(case["path"], dtype=dtype).eval(), split]
    inputs = inputs_of(split)
    found: dict[str, Any] = {"held": sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel()
                                         for p in split.parameters()) / models[0].num_parameters()}  # fmt: skip
    if split.can_generate():  # first: the encoder of an encoder-decoder is then the first to run
        found["generation"] = generation(models, inputs)
    found["forward"] = forward(models, inputs)
    if "pp_size" not in case["sizes"]:  # Hugging Face's pipeline gives no loss
        found |= training(models, inputs)
        if case.get("save"):
            found["saving"] = saving(split, case["path"], rank)
    return found


def main(cases_file: Path) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results = {}
    for name, case in json.loads(cases_file.read_text()).items():
        try:
            results[name] = run(case, rank)
        except Exception as error:  # reported by the test of this case
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        cases_file.with_name(f"results{rank}.json").write_text(json.dumps(results))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
