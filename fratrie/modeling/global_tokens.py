"""Masks of a window and global tokens, which see all tokens of their document and are seen by all (Longformer).

Shapes: B batch, T queries, S keys, G global tokens of the row that has the most, at least one place.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from .windows import Window

OTHER_CHOICE = (
    "The cache was made with another choice of global tokens: give global_attention_mask, of all tokens from the "
    "first on, in every call or in none (zeros where no token is global)."
)


class DenseGlobals(NamedTuple):
    """Masks of all scores, for short rows and whatever blocks do not serve.

    Attributes:
        local: mask of the queries of other tokens, which see their window and global keys.
        whole: mask of the queries of global tokens.
        is_global_BT: which queries are global.
        places_BG: as in `GlobalsInBlocks`, for a cache that keeps global tokens alone.
    """

    local: Any
    whole: Any
    is_global_BT: torch.Tensor
    places_BG: torch.Tensor | None = None


class GlobalsInBlocks(NamedTuple):
    """Masks for rows that are computed in blocks.

    Attributes:
        window: of the queries of other tokens, in which global keys are hidden: they stand beside it.
        places_BG: where the global tokens of a row are; T for those that it has fewer of.
        seen_BTG: which global keys a query sees, `(B, 1, G)` for all queries alike.
        sees_B1GT: which keys the query of a global token sees.
    """

    window: Window
    places_BG: torch.Tensor
    seen_BTG: torch.Tensor
    sees_B1GT: torch.Tensor


def dense_mask(
    window: Window,
    whole: Any,
    tokens: torch.Tensor | None,
    places: tuple[torch.Tensor, torch.Tensor],
    make_ready: Callable[[torch.Tensor], torch.Tensor],
) -> Any:
    """The masks of all scores.

    Args:
        window: of other tokens.
        whole: mask of what a query could see without a window, `(B, 1, T, S)` or `None`, where that is all, or all up
            to itself in a causal stack.
        tokens: `(B, up to S)`, nonzero at global tokens, or `None` where there are none.
        places: of the queries `(T,)` and the keys `(S,)` in their rows.
        make_ready: brings a mask of booleans into the form that the attention implementation takes.

    Returns:
        `DenseGlobals`, or without global tokens the mask of the window alone.
    """
    queries_T, keys_S = places
    seen = window.sees(queries_T, keys_S)[None, None]
    is_global_BS = None
    if tokens is not None:
        is_global_BS = nn.functional.pad(tokens.bool(), (0, len(keys_S) - tokens.shape[1]))
        of_globals = is_global_BS[:, None, None, :]
        # A causal window ends with the query.
        seen = seen | (of_globals & (keys_S <= queries_T[:, None]) if window.after == 0 else of_globals)
    if whole is None:
        local = make_ready(seen)
    elif whole.dtype == torch.bool:
        local = whole & seen
    else:
        local = torch.where(seen, whole, torch.finfo(whole.dtype).min)
    return local if is_global_BS is None else DenseGlobals(local, whole, is_global_BS[:, queries_T])


def find_places(is_global_BT: torch.Tensor) -> torch.Tensor:
    """Where the global tokens of a row are, `(B, G)`; T for those that it has fewer of. Waits once for the device."""
    length = is_global_BT.shape[1]
    most = max(1, int(is_global_BT.sum(1).max()))
    places_T = torch.arange(length, device=is_global_BT.device)
    return torch.where(is_global_BT, places_T, length).sort(dim=1).values[:, :most]


def mask_after_past(
    window: Window,
    places: tuple[torch.Tensor, torch.Tensor],
    global_places_BG: torch.Tensor | None,
    seen_BS: torch.Tensor | None,
) -> torch.Tensor:
    """Which keys local queries see that a cache keeps `(B or 1, 1, T, G + S)`: global ones, then those of the window.

    Args:
        window: of the queries.
        places: of the queries `(T,)` and the keys `(S,)` of the window in their rows.
        global_places_BG: of the global tokens.
        seen_BS: true where a key of the window may be seen at all, or `None` where all may.
    """
    queries_T, keys_S = places
    near_BTS = window.sees(queries_T, keys_S).unsqueeze(0)
    if seen_BS is not None:
        near_BTS = near_BTS & seen_BS.unsqueeze(1)
    if global_places_BG is not None:
        twice_BS = (keys_S[:, None] == global_places_BG.unsqueeze(1)).any(-1)
        of_globals_BTG = global_places_BG.unsqueeze(1) <= queries_T[:, None]
        batch = max(near_BTS.shape[0], of_globals_BTG.shape[0])
        near_BTS = (near_BTS & ~twice_BS.unsqueeze(1)).expand(batch, -1, -1)
        near_BTS = torch.cat((of_globals_BTG, near_BTS), dim=2)
    return near_BTS.unsqueeze(1)


def mask_in_blocks(window: Window, tokens: torch.Tensor, is_causal: bool) -> GlobalsInBlocks:
    """The masks of rows that are computed in blocks.

    Args:
        window: of other tokens.
        tokens: `(B, T)`, nonzero at global tokens.
        is_causal: whether queries see earlier keys alone.
    """
    is_global_BT = tokens.bool() if window.seen_BT is None else tokens.bool() & window.seen_BT
    places_BG = find_places(is_global_BT)
    length, most = is_global_BT.shape[1], places_BG.shape[1]
    places_T = torch.arange(length, device=tokens.device)
    seen_BTG = (places_BG < length).unsqueeze(1)
    seen_BT = torch.ones_like(is_global_BT) if window.seen_BT is None else window.seen_BT
    sees_B1GT = seen_BT[:, None, None, :].expand(-1, -1, most, -1)
    if is_causal:
        seen_BTG = places_BG.unsqueeze(1) <= places_T[:, None]
        sees_B1GT = sees_B1GT & (places_T <= places_BG[:, None, :, None])
    return GlobalsInBlocks(window._replace(seen_BT=seen_BT & ~is_global_BT), places_BG, seen_BTG, sees_B1GT)
