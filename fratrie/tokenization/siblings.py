"""Special tokens and the template that each sibling puts around a text.

The vocabulary is shared: one trained tokenizer serves the encoder, the decoder and the seq2seq, and
`with_sibling` only changes what surrounds the text and on which side padding goes.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tokenizers import AddedToken, Tokenizer, processors
from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

Sibling = Literal["encoder", "decoder", "seq2seq"]
SIBLINGS: tuple[str, ...] = get_args(Sibling)

BOS, PAD, EOS, MASK, UNK = "<s>", "<pad>", "</s>", "<mask>", "<unk>"
DEFAULT_SENTINELS = 32
MOST_TOKENS = 2_000_000
MOST_POSITIONS = 10**9


@dataclass(frozen=True)
class _Names:
    """What the special tokens are called, and what closes the first text of an encoder's pair."""

    begin: str
    pad: str
    end: str
    mask: str
    unknown: str
    between: str


_ROBERTA = _Names(BOS, PAD, EOS, MASK, UNK, between=f"{EOS} {EOS}:1")
_BERT = _Names("[CLS]", "[PAD]", "[SEP]", "[MASK]", "[UNK]", between="[SEP]")


@dataclass(frozen=True)
class _Template:
    single: str
    pair: str
    padding_side: Literal["left", "right"]


# The decoder never appends the end: a prompt that ends with it generates nothing.
_TEMPLATES = {
    "encoder": _Template("{begin} $A {end}", "{begin} $A {between} $B:1 {end}:1", "right"),
    "decoder": _Template("{begin} $A", "{begin} $A {begin}:1 $B:1", "left"),
    "seq2seq": _Template("$A {end}", "$A {end} $B:1 {end}:1", "right"),
}


def special_tokens(
    sibling: Sibling,
    num_sentinels: int | None = None,
    mask_takes_space: bool = True,
    names: Sequence[str] = (BOS, PAD, EOS, MASK),
) -> list[AddedToken]:
    """Special tokens in the order of their ids: `names`, then `<extra_id_0>` and so on.

    Args:
        sibling: decides how many sentinels there are when `num_sentinels` is None: 32 for "seq2seq", else 0.
        num_sentinels: span-corruption sentinels (Raffel et al., 2020).
        mask_takes_space: `<mask>` swallows the spaces before it, for vocabularies whose words carry theirs.
        names: of the other tokens, RoBERTa's (`<s>`) or BERT's (`[CLS]`).

    Raises:
        ValueError: `sibling` is none of `SIBLINGS`, or `num_sentinels` is out of range.
    """
    _template(sibling)
    if num_sentinels is None:
        num_sentinels = DEFAULT_SENTINELS if sibling == "seq2seq" else 0
    check_size("num_sentinels", num_sentinels, 0, 10_000)
    return [
        AddedToken(name, lstrip=mask_takes_space and name == MASK, normalized=False, special=True)
        for name in (*names, *(f"<extra_id_{index}>" for index in range(num_sentinels)))
    ]


def check_size(name: str, size: int, least: int, most: int) -> None:
    """Check a size before memory is spent on it.

    Raises:
        ValueError: the size lies outside `least` to `most`.
    """
    if not least <= size <= most:
        raise ValueError(f"{name}={size} must lie in {least}…{most}")


def tell_size(backend: Tokenizer, asked: int, reason: str) -> None:
    """Warn of a vocabulary that came out smaller than asked for."""
    if (size := backend.get_vocab_size()) < asked:
        logger.warning("The corpus gave %d tokens of the %d asked for: %s.", size, asked, reason)


def sentinel_token_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids of `<extra_id_0>`, `<extra_id_1>`, … in this order; empty if the tokenizer has no sentinel."""
    vocabulary = tokenizer.get_vocab()
    ids: list[int] = []
    while (token := f"<extra_id_{len(ids)}>") in vocabulary:
        ids.append(vocabulary[token])
    return ids


def with_sibling(tokenizer: PreTrainedTokenizerFast, sibling: Sibling) -> PreTrainedTokenizerFast:
    """A copy of `tokenizer` with the same vocabulary and the template and padding side of `sibling`.

    Raises:
        ValueError: `sibling` is none of `SIBLINGS`, or the vocabulary lacks one of the four special tokens.
    """
    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.no_padding()
    copy.no_truncation()
    return as_pretrained(copy, sibling, tokenizer.model_max_length, tokenizer.chat_template)


def as_pretrained(
    backend: Tokenizer, sibling: Sibling, model_max_length: int, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """Wraps a `tokenizers.Tokenizer` that knows the special tokens into a Hugging Face tokenizer.

    Raises:
        ValueError: as `with_sibling`.
    """
    template, names = _template(sibling), _names(backend)
    if missing := _missing(backend, names):
        raise ValueError(f"the vocabulary lacks {', '.join(missing)}, which the {sibling} template needs")
    backend = _with_first_space(backend, sibling == "decoder")
    backend.post_processor = _post_processor(backend, template, names)
    roles = {"bos_token": names.begin, "eos_token": names.end, "pad_token": names.pad, "mask_token": names.mask}
    if sibling == "encoder":
        roles |= {"cls_token": names.begin, "sep_token": names.end}
    if backend.token_to_id(names.unknown) is not None:
        roles["unk_token"] = names.unknown
    added = sorted(backend.get_added_tokens_decoder().items())
    extra = [token.content for _, token in added if token.special and token.content not in roles.values()]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **roles,
        extra_special_tokens=extra,
        padding_side=template.padding_side,
        model_max_length=model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )


def knows_templates(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether the vocabulary holds the four special tokens that `with_sibling` needs."""
    return not _missing(tokenizer.backend_tokenizer, _names(tokenizer.backend_tokenizer))


def is_byte_level(backend: Tokenizer) -> bool:
    """Whether its tokens spell bytes: the decoder is byte-level, perhaps behind the replacements of added words."""
    return '"type": "ByteLevel"' in json.dumps(json.loads(backend.to_str())["decoder"])


def _template(sibling: str) -> _Template:
    if sibling not in _TEMPLATES:
        raise ValueError(f"sibling={sibling!r} is unknown: choose one of {', '.join(SIBLINGS)}")
    return _TEMPLATES[sibling]


def _names(backend: Tokenizer) -> _Names:
    return _ROBERTA if _missing(backend, _BERT) else _BERT


def _missing(backend: Tokenizer, names: _Names) -> list[str]:
    return [each for each in (names.begin, names.pad, names.end, names.mask) if backend.token_to_id(each) is None]


def _with_first_space(backend: Tokenizer, kept: bool) -> Tokenizer:
    """Keep or strip the space that WordPiece and Unigram put before the first word.

    A text begins without it. But what a decoder has written is decoded without its prompt (in the pipelines of
    transformers as in a stream), and then it is the space between the two.
    """
    state = json.loads(backend.to_str())
    steps = (state["decoder"] or {}).get("decoders", [])
    if state["model"]["type"] not in ("WordPiece", "Unigram") or not steps:
        return backend
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    state["decoder"]["decoders"] = [step for step in steps if step != strip] + [strip] * (not kept)
    return Tokenizer.from_str(json.dumps(state))


def _post_processor(backend: Tokenizer, template: _Template, names: _Names) -> processors.PostProcessor:
    surround = processors.TemplateProcessing(
        single=template.single.format(**vars(names)),
        pair=template.pair.format(**vars(names)),
        special_tokens=[(token, backend.token_to_id(token)) for token in (names.begin, names.end)],
    )
    if not is_byte_level(backend):
        return surround
    # Offsets then point at the word, not at the space that its token carries.
    trim = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    return processors.Sequence([trim, surround])
