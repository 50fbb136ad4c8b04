"""Greedy text: a small Llama beside ours with the same weights, with packed linear layers, and with drafts."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.limits import products_alone
from benchmarks.timing import Row, device, times
from fratrie.conversion import from_hf
from fratrie.inference import pack

BATCHES = (1, 8)
DRAFTED, DRAFT_LAYERS = 5, 2
# How our model is prepared, and the goal; packing is for processors.
WAYS: dict[str, tuple[Callable[[PreTrainedModel], PreTrainedModel], float | None]] = {
    "as it is": (lambda model: model, 1.3),
    "packed float32": (pack, None),
    "packed in bfloat16": (lambda model: pack(model.to(torch.bfloat16), "bfloat16"), 1.8),
    "packed int8": (partial(pack, precision="int8"), 2.5),
    "packed int8 weights": (partial(pack, precision="int8_weights"), 2.5),
}
SIZES = {
    **{"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6},
    **{"num_key_value_heads": 6, "max_position_embeddings": 512},
}


def measure(rounds: int, vocabulary: int = 8000, tokens: int = 64) -> list[Row]:
    """A row for each precision and number of prompts, and for drafts; packing is for processors."""
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    theirs = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=vocabulary, **ids)).to(device()).eval()
    ours = {
        name: prepare(from_hf(theirs).to(device()).eval())
        for name, (prepare, _) in WAYS.items()
        if device().type == "cpu" or not name.startswith("packed")
    }
    prompts = [torch.randint(3, vocabulary, (batch, 16), device=device()) for batch in BATCHES]
    rows = [row for each in prompts for row in _compare(theirs, ours, each, tokens, rounds)]
    return rows + _compare_drafts(theirs, prompts[0].repeat(1, 4), tokens, rounds)


def _compare(
    theirs: PreTrainedModel, ours: Mapping[str, PreTrainedModel], prompts: Tensor, tokens: int, rounds: int
) -> list[Row]:
    write = partial(_write, prompts=prompts, tokens=tokens)
    expected = write(theirs)
    texts = {name: write(model) for name, model in ours.items()}
    for name in ("as it is", "packed float32"):
        assert name not in texts or torch.equal(texts[name], expected), name
    works = {name: partial(write, model) for name, model in ours.items()}
    products = {("products", name): products_alone(work) for name, work in works.items()}
    seconds = times({"theirs": partial(write, theirs), **works, **products}, rounds)
    return [
        Row(
            work=f"{tokens} tokens after {len(prompts)} prompts, {name}",
            against_default=seconds["theirs"] / seconds[name],
            hf_best=1.0,
            goal=WAYS[name][1],
            ours=f"{tokens * len(prompts) / seconds[name]:.0f} tokens/s",
            note=f"{(texts[name] == expected)[:, prompts.shape[1] :].float().mean():.0%} of the tokens are the same",
            limit=seconds["theirs"] / seconds["products", name],
        )
        for name in ours
    ]


def _compare_drafts(theirs: PreTrainedModel, prompt: Tensor, tokens: int, rounds: int) -> list[Row]:
    """A row for prompt lookup, since random weights repeat themselves, and one for a smaller sibling.

    Random weights agree on nothing, so for the sibling, made of the lowest layers, the upper ones are given little to
    say: it then mostly drafts what the whole model writes.
    """
    agreeing = copy.deepcopy(theirs)
    for layer in agreeing.model.layers[DRAFT_LAYERS:]:
        for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
            output.weight.data.mul_(0.01)
    lookup = _row_of_drafts(
        theirs, lambda _: {"prompt_lookup_num_tokens": DRAFTED}, "found in the prompt", prompt, tokens, rounds
    )
    name = f"of a sibling of {DRAFT_LAYERS} layers"
    sibling = _row_of_drafts(
        agreeing, lambda model: {"assistant_model": _sibling(model)}, name, prompt, tokens, rounds
    )
    return [lookup, sibling]


def _row_of_drafts(
    theirs: PreTrainedModel,
    drafts: Callable[[PreTrainedModel], dict[str, Any]],
    name: str,
    prompt: Tensor,
    tokens: int,
    rounds: int,
) -> Row:
    ours = from_hf(theirs).to(device()).eval()
    works = {
        "theirs": partial(_write, theirs, prompt, tokens),
        "theirs, drafted": partial(_write, theirs, prompt, tokens, **drafts(theirs)),
        "ours": partial(_write, ours, prompt, tokens, **drafts(ours)),
    }
    assert torch.equal(works["ours"](), works["theirs"]())
    passes = _passes(ours, works["ours"])
    seconds = times(works, rounds)
    return Row(
        work=f"{tokens} tokens after 1 prompt, drafts {name}, {DRAFTED} tokens at once",
        against_default=seconds["theirs"] / seconds["ours"],
        hf_best=seconds["theirs"] / seconds["theirs, drafted"],
        goal=None,
        ours=f"{tokens / seconds['ours']:.0f} tokens/s",
        note=f"all tokens are the same; {passes} passes of the model; Hugging Face's best: the same drafts",
    )


def _sibling(model: PreTrainedModel) -> PreTrainedModel:
    small = copy.deepcopy(model)
    small.model.layers = small.model.layers[:DRAFT_LAYERS]
    small.config.num_hidden_layers = DRAFT_LAYERS
    # Else a sibling that is unsure, as random weights are, stops after its first token.
    drafts = {"num_assistant_tokens": DRAFTED, "assistant_confidence_threshold": 0.0}
    small.generation_config.update(**drafts, num_assistant_tokens_schedule="constant")
    return small


def _passes(model: PreTrainedModel, work: Callable[[], object]) -> int:
    """How often a model runs in a piece of work."""
    runs: list[int] = []
    hook = model.register_forward_hook(lambda *_: runs.append(1))
    work()
    hook.remove()
    return len(runs)


def _write(model: PreTrainedModel, prompts: Tensor, tokens: int, **how: Any) -> Tensor:
    return model.generate(prompts, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **how)
