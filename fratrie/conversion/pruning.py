"""A smaller vocabulary: the pieces that some texts use, and what any other text can be spelled with.

A multilingual model is mostly embedding (multilingual-e5-small: 96 of 117.5 million parameters), of which texts in
one language reach a small part. Cutting the rest away changes no output (Abdaoui et al. 2020, "Load What You Need").
"""

import copy
import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordPiece
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from fratrie.modeling.pretrained import FratriePreTrainedModel
from fratrie.tokenization.byte_level import checked_texts
from fratrie.tokenization.fragments import SHARE, fragments

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=FratriePreTrainedModel)


def prune_vocabulary(
    model: Model, tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]
) -> tuple[Model, PreTrainedTokenizerFast]:
    """Copy a model and its Unigram (Kudo 2018) or WordPiece tokenizer with only the pieces that are needed.

    These are the pieces of `texts`, the special tokens and every piece of one character or one byte. A text whose
    pieces were all kept has the same pieces and hidden states, to the bit; any other is cut into shorter pieces, and
    into unknown ones only where it was before. Since an unknown character costs 10 more than the least likely piece of
    a Unigram model, that one is kept as well. An unknown word of a WordPiece stays so where the vocabulary holds every
    character of its pieces, as a trained one does.

    Args:
        model: any of our models; it is not changed. Every matrix with one row per token loses rows.
        tokenizer: its tokenizer; it is not changed.
        texts: as the model will get them, prefixes such as `query: ` included.

    Returns:
        The new model, on the same device and in the same mode and dtype, and the new tokenizer. How many pieces were
        kept is logged, and is `len` of the tokenizer. It carries the share of words that are cut into letters, by
        which `fratrie.tokenization.fragments` knows texts that it was not pruned for.

    Raises:
        ValueError: the tokenizer is not a Unigram model or has more tokens than the model, or there is no text.
    """
    texts = list(checked_texts(texts))
    backend = _bare_backend(model, tokenizer)
    kept = sorted(_needed_ids(model, backend, texts))
    new_ids = {old: new for new, old in enumerate(kept)}
    pruned_model = _prune_model(model, kept, new_ids)
    pruned_tokenizer = _prune_tokenizer(tokenizer, json.loads(backend.to_str()), new_ids)
    pruned_tokenizer.init_kwargs[SHARE] = fragments(pruned_tokenizer, texts).share
    logger.info("Kept %d of %d pieces.", len(kept), len(tokenizer))
    return pruned_model, pruned_tokenizer


def _bare_backend(model: FratriePreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """A copy of the tokenizer's backend that neither pads nor truncates."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.model, (Unigram, WordPiece)):
        kind = type(tokenizer if backend is None else backend.model).__name__
        raise ValueError(
            f"the vocabulary of a {kind} tokenizer cannot be pruned, only that of a Unigram or WordPiece one: keep it"
        )
    for config in _with_stacks(model.config):
        if len(tokenizer) > config.vocab_size:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} tokens, the model vocab_size={config.vocab_size}: they do not "
                "belong together, or the model still needs resize_token_embeddings"
            )
    backend = Tokenizer.from_str(backend.to_str())
    backend.no_padding()
    backend.no_truncation()
    return backend


def _with_stacks(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    return [config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))]


def _needed_ids(model: FratriePreTrainedModel, backend: Tokenizer, texts: Iterable[str]) -> set[int]:
    needed = _always_needed(json.loads(backend.to_str())["model"])
    needed |= set(backend.get_added_tokens_decoder())
    needed |= set(backend.encode("", "").ids)  # what surrounds a text and a pair
    for config in _with_stacks(model.config):
        needed |= {token for _, tokens in _special_ids(config) for token in tokens}
    for text in texts:
        needed.update(backend.encode(text, add_special_tokens=False).ids)
    if (largest := max(needed)) >= backend.get_vocab_size():
        raise ValueError(f"the model's configuration names the token {largest}, which the tokenizer lacks: correct it")
    return needed


def _always_needed(model: dict[str, Any]) -> set[int]:
    """What any text can be spelled with, and the unknown piece."""
    if model["type"] == "WordPiece":
        prefix, vocabulary = model["continuing_subword_prefix"], model["vocab"]
        needed = {index for piece, index in vocabulary.items() if len(piece.removeprefix(prefix)) == 1}
        return needed | {vocabulary[model["unk_token"]]}
    scores = [score for _, score in model["vocab"]]
    spelled = {f"<0x{byte:02X}>" for byte in range(256)} if model.get("byte_fallback") else set()
    needed = {index for index, (piece, _) in enumerate(model["vocab"]) if len(piece) == 1 or piece in spelled}
    return needed | {scores.index(min(scores)), *([] if model["unk_id"] is None else [model["unk_id"]])}


def _special_ids(config: PreTrainedConfig | GenerationConfig) -> list[tuple[str, list[int]]]:
    fields = [(name, value) for name, value in vars(config).items() if name.endswith("_token_id")]
    return [(name, value if isinstance(value, list) else [value]) for name, value in fields if value is not None]


def _renumber(configs: Sequence[PreTrainedConfig | GenerationConfig], new_ids: dict[int, int]) -> None:
    found = []
    for config in configs:
        for name, ids in _special_ids(config):
            renumbered = [new_ids[token] for token in ids]
            found.append((config, name, renumbered if isinstance(getattr(config, name), list) else renumbered[0]))
    # Set once all is read: an encoder-decoder's configuration hands on to its stacks what is set in it.
    for config, name, value in found:
        setattr(config, name, value)


def _prune_model(model: Model, kept: list[int], new_ids: dict[int, int]) -> Model:
    config = copy.deepcopy(model.config)
    parts = list(_with_stacks(config))
    _renumber(parts, new_ids)
    for part in parts:
        part.vocab_size = len(kept)
    pruned = type(model)(config)
    pruned.to(device=model.device, dtype=model.dtype)  # type: ignore[call-arg] # transformers wraps it
    rows = torch.tensor(kept, device=model.device)
    sizes = {name: weight.shape for name, weight in pruned.state_dict().items()}
    pruned.load_state_dict(
        {
            name: weight if weight.shape == sizes[name] else weight.index_select(0, rows)
            for name, weight in model.state_dict().items()
        }
    )
    if model.can_generate():
        pruned.generation_config = copy.deepcopy(model.generation_config)
        _renumber([pruned.generation_config], new_ids)
    return pruned.train(model.training)


def _prune_tokenizer(
    tokenizer: PreTrainedTokenizerFast, state: dict[str, Any], new_ids: dict[int, int]
) -> PreTrainedTokenizerFast:
    model = state["model"]
    if model["type"] == "WordPiece":
        model["vocab"] = {piece: new_ids[old] for piece, old in model["vocab"].items() if old in new_ids}
    else:
        model["vocab"] = [entry for index, entry in enumerate(model["vocab"]) if index in new_ids]
        if model["unk_id"] is not None:
            model["unk_id"] = new_ids[model["unk_id"]]
    for token in state["added_tokens"]:
        token["id"] = new_ids[token["id"]]
    _renumber_processor(state["post_processor"] or {}, new_ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        **tokenizer.special_tokens_map,
        extra_special_tokens=tokenizer.extra_special_tokens,
        padding_side=tokenizer.padding_side,
        truncation_side=tokenizer.truncation_side,
        model_max_length=tokenizer.model_max_length,
        model_input_names=tokenizer.model_input_names,
        clean_up_tokenization_spaces=tokenizer.clean_up_tokenization_spaces,
        chat_template=tokenizer.chat_template,
    )


def _renumber_processor(processor: dict[str, Any], new_ids: dict[int, int]) -> None:
    """New ids for the special tokens that a post-processor of `tokenizers` writes around a text."""
    for part in processor.get("processors", []):
        _renumber_processor(part, new_ids)
    for token in processor.get("special_tokens", {}).values():
        token["ids"] = [new_ids[old] for old in token["ids"]]
    for name in ("cls", "sep"):
        if name in processor:
            processor[name][1] = new_ids[processor[name][1]]
