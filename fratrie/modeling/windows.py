"""Attention within a window, in blocks of queries against their neighbouring keys: the cost follows the window.

A mask of the scores of T tokens has T² entries, of which a window leaves few. Here the queries of a long row are cut
into blocks, and each block sees its own keys and those of the blocks around it (Beltagy et al. 2020, section 3.1).

Shapes: B batch, T tokens, H heads, K key-value heads, C head size, J blocks, M tokens of a block, W keys that a
block looks at, R rows of all blocks (B · J), G global tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from .configuration import FratrieConfig

# Smaller blocks would make many small products.
_SMALLEST_BLOCK = 64
# So many times the keys of a block a row must be long for its blocks to be faster than a mask.
_LONG = 2

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class Window(NamedTuple):
    """Which keys the queries of long rows see, in the place of a mask of their scores.

    Attributes:
        before, after: tokens that a query sees on either side, besides itself.
        seen_BT: true where a token may be seen at all, or `None` where all may.
    """

    before: int
    after: int
    seen_BT: torch.Tensor | None = None

    def sees(self, queries_T: torch.Tensor, keys_W: torch.Tensor) -> torch.Tensor:
        """Which keys lie near enough to a query, `(T, W)`, by the places of both in a row."""
        distance_TW = keys_W - queries_T[:, None]
        return (distance_TW >= -self.before) & (distance_TW <= self.after)


class FurtherKeys(NamedTuple):
    """Keys that queries see besides those of their window.

    Attributes:
        key_BHGC, value_BHGC: keys and values.
        seen_BTG: true where a query sees a key; `(B, 1, G)` for all queries alike.
    """

    key_BHGC: torch.Tensor
    value_BHGC: torch.Tensor
    seen_BTG: torch.Tensor


def reach(sliding_window: int, is_causal: bool) -> tuple[int, int]:
    """Tokens before and after itself that a token sees: the last `sliding_window`, or that many to each side."""
    return (sliding_window - 1, 0) if is_causal else (sliding_window, sliding_window)


def block_shape(before: int, after: int) -> tuple[int, int, int]:
    """Tokens of a block, and the number of blocks before and after it that its queries look at."""
    size = max(_SMALLEST_BLOCK, (max(before, after) + 1) // 2)
    return size, -(-before // size), -(-after // size)


def pays(length: int, before: int, after: int) -> bool:
    """Whether blocks are faster than a mask, for rows of this length.

    Not in an exported graph, which shall hold for every length.
    """
    size, blocks_before, blocks_after = block_shape(before, after)
    return length > _LONG * size * (blocks_before + 1 + blocks_after) and not torch.compiler.is_exporting()


def window_in_blocks(config: FratrieConfig, length: int) -> Window | None:
    """The window of a stack's layers, where rows of this length and without a past are computed in blocks.

    They are by SDPA, which gives no weights, and where nothing is added to the scores.
    """
    if config._attn_implementation != "sdpa" or config.position_type in ("relative", "alibi"):
        return None
    if any(mixer.adds_to_scores for mixer in config.mixers):  # one mask serves all sliding layers
        return None
    assert config.sliding_window is not None
    before, after = reach(config.sliding_window, config.is_causal_stack)
    return Window(before, after) if pays(length, before, after) else None


def scores_in_blocks(length: int, before: int, after: int) -> int:
    """Scores that the blocks of a row of this length have, hidden ones included."""
    size, blocks_before, blocks_after = block_shape(before, after)
    return (length // size + 1) * size * size * (blocks_before + 1 + blocks_after)


def attend_in_blocks(
    attend: Attend,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    window: Window,
    further: FurtherKeys | None = None,
) -> torch.Tensor:
    """Attention within a window.

    Args:
        attend: attention of queries `(R, H, M, C)` to keys and values `(R, K, W, C)` by a mask of booleans
            `(R, 1, M, W)`; returns `(R, M, H, C)` and weights, which are dropped.
        states: queries `(B, H, T, C)`, keys and values `(B, K, T, C)`.
        window: which keys the queries see.
        further: keys that they see besides.

    Returns:
        Mixed values `(B, T, H, C)`.
    """
    query_BHTC, key_BHTC, value_BHTC = states
    batch, _, length, _ = query_BHTC.shape
    size, *around = block_shape(window.before, window.after)
    # There is always some room in the last block, so that one compiled graph serves every length.
    number = length // size + 1
    room = number * size - length
    query_BHJMC = nn.functional.pad(query_BHTC, (0, 0, 0, room)).unflatten(2, (number, size))
    key_BHJWC, value_BHJWC = (_neighbours(x, 2, size, around) for x in (key_BHTC, value_BHTC))
    mask_BJMW = _mask(window, length, query_BHTC.device, size, around)
    if further is not None:
        key_BHJWC, value_BHJWC = (
            torch.cat((x.unsqueeze(2).expand(-1, -1, number, -1, -1), of_blocks), dim=3)
            for x, of_blocks in ((further.key_BHGC, key_BHJWC), (further.value_BHGC, value_BHJWC))
        )
        seen_BTG = further.seen_BTG.expand(batch, length, -1)
        seen_BJMG = nn.functional.pad(seen_BTG, (0, 0, 0, room)).unflatten(1, (number, size))
        mask_BJMW = torch.cat((seen_BJMG, mask_BJMW.expand(batch, -1, -1, -1)), dim=3)
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (query_BHJMC, key_BHJWC, value_BHJWC))
    mask_R1MW = mask_BJMW.expand(batch, -1, -1, -1).flatten(0, 1).unsqueeze(1)
    mixed_RMHC, _ = attend(*rows, mask_R1MW)
    return mixed_RMHC.unflatten(0, (batch, number)).flatten(1, 2)[:, :length]


def _neighbours(x: torch.Tensor, dim: int, size: int, around: list[int]) -> torch.Tensor:
    """Cut dimension `dim` into blocks, each with those around it: `(…, T, …)` to `(…, J, W, …)`, zeros outside.

    The blocks overlap in memory: nothing is copied for them.
    """
    before, after = around
    length = x.shape[dim]
    number = length // size + 1
    room = (before * size, (number + after) * size - length)
    padded = nn.functional.pad(x, (0, 0) * (x.ndim - 1 - dim) + room)
    return padded.unfold(dim, (before + 1 + after) * size, size).movedim(-1, dim + 1)


def _mask(window: Window, length: int, device: torch.device, size: int, around: list[int]) -> torch.Tensor:
    """True where a query of a block sees a key, `(B or 1, J, M, W)`."""
    places_W = torch.arange(size * (sum(around) + 1), device=device) - around[0] * size
    near_MW = window.sees(torch.arange(size, device=device), places_W)
    seen_BT = torch.ones(1, length, dtype=torch.bool, device=device) if window.seen_BT is None else window.seen_BT
    seen_BJW = _neighbours(seen_BT.bool(), 1, size, around)
    return near_MW & seen_BJW.unsqueeze(2)
