"""Greedy generation of a few tokens from two prompts, for the tests of generation."""

from typing import Any

import torch
from combinations import documents, pad

NEW = 8


def generate(model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Any:
    """Greedy generation of a fixed number of tokens, unless told otherwise."""
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False} | kwargs
    return model.generate(**inputs, **settings)


def prompts(lengths: tuple[int, ...] = (6, 6)) -> dict[str, torch.Tensor]:
    ids, mask = pad(documents(lengths, seed=3), "left")
    return {"input_ids": ids, "attention_mask": mask}
