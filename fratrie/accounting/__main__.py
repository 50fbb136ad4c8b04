"""Print what a model costs: `python -m fratrie.accounting gpt3-175b --length 2048`."""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from ..presets import PRESETS, preset
from ..training.cli import run
from .compute import forward_flops, training_flops
from .memory import activation_bytes, cache_bytes
from .parameters import ROLES, SMALL_ROLES, Parameters, count_parameters

_DTYPES = ("bfloat16", "float16", "float32", "float64")


def main() -> None:
    """Read the command line, print the tables.

    Raises:
        ValueError: for an unknown name, and for a text longer than the model's positions.
        OSError: for a folder without a configuration.
    """
    parser = argparse.ArgumentParser(prog="python -m fratrie.accounting", description=__doc__, allow_abbrev=False)
    parser.add_argument("name", help=f"Preset or folder of a model with config.json. Presets: {', '.join(PRESETS)}.")
    parser.add_argument("--length", type=_positive, help="Tokens a row; up to 2048, as the model allows, by default.")
    parser.add_argument("--batch_size", type=_positive, default=1, help="Rows.")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="Type of weights, cache and activations.")
    options = parser.parse_args()
    config = AutoConfig.from_pretrained(options.name) if Path(options.name).is_dir() else preset(options.name)
    parameters = count_parameters(config)
    length = _checked_length(config, options.length)
    print("\n".join(parameter_table(parameters)), end="\n\n")
    print("\n".join(cost_table(config, parameters, options.batch_size, length, getattr(torch, options.dtype))))


def parameter_table(parameters: Parameters) -> list[str]:
    """Lines of the table by role: matrices and their sum, then what published tables leave out, and the total."""
    counts = parameters.by_role
    rows = [(role, counts[role]) for role in ROLES if role in counts and role not in SMALL_ROLES]
    rows.append(("sum of the matrices", sum(count for _, count in rows)))
    rows += [(role, counts[role]) for role in ROLES if role in counts and role in SMALL_ROLES]
    rows.append(("all parameters", parameters.total))
    if parameters.active < parameters.total:
        rows.append(("active for a token", parameters.active))
    head = f"{'role':<34}{'parameters':>20}{'share':>10}"
    return [head, *(f"{role:<34}{count:>20,}{count / parameters.total:>10.2%}" for role, count in rows)]


def cost_table(
    config: PreTrainedConfig, parameters: Parameters, batch_size: int, length: int, dtype: torch.dtype
) -> list[str]:
    """Lines of operations and memory for a batch of rows of `length` tokens."""
    forward = forward_flops(config, batch_size, length)
    rows = {
        "forward FLOPs": f"{forward:.4g}",
        "forward FLOPs for a token": f"{forward / batch_size / length:.4g}",
        "training FLOPs (3 x forward)": f"{training_flops(config, batch_size, length):.4g}",
        "weights": _size(parameters.total * dtype.itemsize),
        "cache of keys, values, states": _size(cache_bytes(config, batch_size, length, dtype)),
        "activations in training (estimate)": _size(activation_bytes(config, batch_size, length, dtype)),
    }
    head = f"batch of {batch_size:,} x {length:,} tokens, {str(dtype).removeprefix('torch.')}"
    return [head, *(f"{name:<36}{value:>18}" for name, value in rows.items())]


def _checked_length(config: PreTrainedConfig, length: int | None) -> int:
    """The length asked for, or the default.

    Raises:
        ValueError: when the model has no such positions.
    """
    stack = config.decoder if config.model_type == "fratrie_seq2seq" else config
    longest = stack.max_position_embeddings
    if getattr(stack, "patch_size", None):
        image = stack.num_patches + 1
        if length not in (None, image):
            raise ValueError(f"--length {length}: an image of this model is {image} tokens.")
        return image
    if length and length > longest and stack.position_type == "learned":
        raise ValueError(f"--length {length} is more than the model's max_position_embeddings={longest}.")
    return length or min(2048, longest)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def _size(count: int) -> str:
    return f"{count:,} B" if count < 2**20 else f"{count / 2**30:,.3f} GiB"


if __name__ == "__main__":
    run(main)
