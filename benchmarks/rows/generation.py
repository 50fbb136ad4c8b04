"""Greedy text token by token: a small Llama beside ours with the same weights, and with packed linear layers."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.timing import Row, device, times
from fratrie.conversion import from_hf
from fratrie.inference import pack

BATCHES = (1, 8)
# How our model is prepared, and the goal; packing is for processors.
WAYS: dict[str, tuple[Callable[[PreTrainedModel], PreTrainedModel], float | None]] = {
    "as it is": (lambda model: model, 1.3),
    "packed float32": (pack, None),
    "packed in bfloat16": (lambda model: pack(model.to(torch.bfloat16), "bfloat16"), 1.8),
    "packed int8": (partial(pack, precision="int8"), 2.5),
}
SIZES = {
    **{"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6},
    **{"num_key_value_heads": 6, "max_position_embeddings": 512},
}


def measure(rounds: int, vocabulary: int = 8000, tokens: int = 64) -> list[Row]:
    """A row for each precision and number of prompts; packing is for processors."""
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    theirs = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=vocabulary, **ids)).to(device()).eval()
    ours = {
        name: prepare(from_hf(theirs).to(device()).eval())
        for name, (prepare, _) in WAYS.items()
        if device().type == "cpu" or not name.startswith("packed")
    }
    prompts = [torch.randint(3, vocabulary, (batch, 16), device=device()) for batch in BATCHES]
    return [row for each in prompts for row in _compare(theirs, ours, each, tokens, rounds)]


def _compare(
    theirs: PreTrainedModel, ours: Mapping[str, PreTrainedModel], prompts: Tensor, tokens: int, rounds: int
) -> list[Row]:
    write = partial(_write, prompts=prompts, tokens=tokens)
    expected = write(theirs)
    texts = {name: write(model) for name, model in ours.items()}
    for name in ("as it is", "packed float32"):
        assert name not in texts or torch.equal(texts[name], expected), name
    seconds = times({"theirs": partial(write, theirs)} | {name: partial(write, ours[name]) for name in ours}, rounds)
    return [
        Row(
            work=f"{tokens} tokens after {len(prompts)} prompts, {name}",
            against_default=seconds["theirs"] / seconds[name],
            hf_best=1.0,
            goal=WAYS[name][1],
            ours=f"{tokens * len(prompts) / seconds[name]:.0f} tokens/s",
            note=f"{(texts[name] == expected)[:, prompts.shape[1] :].float().mean():.0%} of the tokens are the same",
        )
        for name in ours
    ]


def _write(model: PreTrainedModel, prompts: Tensor, tokens: int) -> Tensor:
    return model.generate(prompts, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
