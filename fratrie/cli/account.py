"""Print what a model costs: parameters, FLOPs, cache and activations, from its configuration alone.

Example: fratrie account gpt3-175b --length 2048
"""

import argparse
import itertools
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from fratrie.accounting import activation_bytes, cache_bytes, forward_flops, training_flops
from fratrie.accounting.parameters import ROLES, SMALL_ROLES, Parameters, count_parameters
from fratrie.presets import PRESETS, preset

from .running import run

_DTYPES = ("bfloat16", "float16", "float32", "float64")


def main() -> None:
    """Read the command line, print the tables.

    Raises:
        ValueError: for an unknown name, and for a text longer than the model's positions.
        OSError: for a config.json that cannot be read.
    """
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("name", help=f"Folder of a model, its config.json, or a preset: {', '.join(PRESETS)}.")
    parser.add_argument("--length", type=_positive, help="Tokens per row; by default the model's, 2048 at most.")
    parser.add_argument("--batch_size", type=_positive, default=1, help="Rows (default: 1).")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="Of weights, cache and activations.")
    options = parser.parse_args()
    config = _read_config(options.name)
    parameters = count_parameters(config)
    length = _checked_length(config, options.length)
    costs = cost_table(config, parameters, options.batch_size, length, getattr(torch, options.dtype))
    tables = (role_table(parameters), layer_table(parameters), costs)
    print("\n\n".join("\n".join(table) for table in tables))


def role_table(parameters: Parameters) -> list[str]:
    """Lines of the table by role: matrices and their sum, then what published tables leave out, and the total."""
    counts = parameters.by_role
    rows = [(role, counts[role]) for role in ROLES if role in counts and role not in SMALL_ROLES]
    rows.append(("sum of the matrices", sum(count for _, count in rows)))
    rows += [(role, counts[role]) for role in ROLES if role in counts and role in SMALL_ROLES]
    rows.append(("all parameters", parameters.total))
    if parameters.active < parameters.total:
        rows.append(("active for a token", parameters.active))
    shares = [(role, f"{count:,}", f"{count / parameters.total:.2%}") for role, count in rows]
    return _lines(("parameters by role", "number", "share"), *shares)


def layer_table(parameters: Parameters) -> list[str]:
    """Lines of the table by layer: equal layers in a row share a line, which says how many parameters each has."""
    layers = [(*_layer_of(place), count) for place, count in parameters.by_layer.items() if place]
    rows = []
    for (stack, count), group in itertools.groupby(layers, lambda layer: (layer[0], layer[2])):
        first, *others = (number for _, number, _ in group)
        numbers = f"layers {first}-{others[-1]}" if others else f"layer {first}"
        rows.append((stack + numbers, count, count * (1 + len(others))))
    outside = parameters.by_layer.get("", 0)
    rows.append(("outside of the layers", outside, outside))
    shares = [(name, f"{one:,}", f"{all_ / parameters.total:.2%}") for name, one, all_ in rows]
    return _lines(("parameters by layer", "each", "share in all"), *shares)


def cost_table(
    config: PreTrainedConfig, parameters: Parameters, batch_size: int, length: int, dtype: torch.dtype
) -> list[str]:
    """Lines of operations and memory for a batch of rows of `length` tokens, in all and divided by the tokens."""
    is_pair = config.model_type == "fratrie_seq2seq"
    tokens = f"{batch_size:,} x {length:,} {'tokens of source and target' if is_pair else 'tokens'}"
    sizes = (config, batch_size, length)
    flops = {"FLOPs of a forward pass": forward_flops(*sizes), "FLOPs of a training step": training_flops(*sizes)}
    memory = {
        "cache of keys, values, states": cache_bytes(*sizes, dtype),
        "activations in training, estimated": activation_bytes(*sizes, dtype),
    }
    number = batch_size * length
    rows = [(name, f"{count:.4g}", f"{count / number:.4g}") for name, count in flops.items()]
    rows.append(("weights", _size(parameters.total * dtype.itemsize), ""))
    rows += [(name, _size(count), _size(count / number)) for name, count in memory.items()]
    kind = str(dtype).removeprefix("torch.")
    return [f"{tokens}, {kind}", *_lines(("", "in all", "per pair of tokens" if is_pair else "per token"), *rows)]


def _lines(*rows: tuple[str, str, str]) -> list[str]:
    return [f"{name:<36}{number:>20}{share:>18}".rstrip() for name, number, share in rows]


def _layer_of(place: str) -> tuple[str, int]:
    """`"encoder.layers.3"` to `("encoder ", 3)`, `"layers.3"` to `("", 3)`."""
    stack, _, number = place.rpartition("layers.")
    return stack.replace(".", " "), int(number)


def _read_config(name: str) -> PreTrainedConfig:
    """The configuration in a folder with a config.json or in a .json file, else of a preset.

    Raises:
        ValueError: it is neither.
        OSError: the file cannot be read.
    """
    path = Path(name)
    if (path.suffix == ".json" and path.is_file()) or (path / "config.json").is_file():
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    try:
        return preset(name)
    except ValueError as error:
        raise ValueError(f"{name!r} is no folder with a config.json. {error}") from error


def _checked_length(config: PreTrainedConfig, length: int | None) -> int:
    """The length asked for, or the default.

    Raises:
        ValueError: when the model has no such positions.
    """
    stacks = config.stacks if config.model_type == "fratrie_seq2seq" else (config,)
    longest = min(stack.max_position_embeddings for stack in stacks)
    if getattr(config, "patch_size", None):
        image = config.num_patches + 1
        if length not in (None, image):
            raise ValueError(f"--length {length}: an image of this model is {image} tokens.")
        return image
    if length and length > longest and any(stack.position_type in ("learned", "axial") for stack in stacks):
        raise ValueError(f"--length {length} is more than the model's max_position_embeddings={longest}.")
    return length or min(2048, longest)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, at least 1")
    return int(text)


def _size(count: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.4g} {unit}"
    return f"{count:,.4g} B"


if __name__ == "__main__":
    run(main)
