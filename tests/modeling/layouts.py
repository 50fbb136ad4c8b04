"""Layouts for tests that call a mixer or a block by itself."""

import torch

from fratrie.modeling.layout import Rows
from fratrie.modeling.masks import GivenMask
from fratrie.modeling.mixer import Mixer
from fratrie.modeling.stack import FratrieStack


def rows_of_stack(stack: FratrieStack, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> Rows:
    """The layout in which a stack hands `(B, T, D)` to its layers: masks, position biases, rotary turns."""
    layout = Rows(shape=hidden.shape[:2], given=GivenMask.read(mask))
    layout.place(hidden.device, None)
    stack.complete(layout, hidden, None)
    return layout


def rows_of_mixer(mixer: Mixer, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> Rows:
    """A layout for one mixer without positions."""
    layout, kind = Rows(shape=hidden.shape[:2], given=GivenMask.read(mask)), (mixer.mask_form, mixer.layer_type)
    layout.masks[kind] = layout.build_mask(mixer.config, kind, hidden)
    return layout
