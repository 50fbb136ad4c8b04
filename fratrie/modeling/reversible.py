"""Reversible layers: the backward pass computes their inputs anew from their outputs, so that training keeps none.

The residual stream is two streams, which take turns: a branch f maps (a, b) to (b, a + f(b)), from which a and b come
back as d - f(c) and c (Gomez et al. 2017; Kitaev et al. 2020, section 3). What training keeps of the layers is
three states a token, those that enter and both streams at the end, whatever the number of layers. For that each
backward pass passes them forward once more.

Both streams begin as the embeddings and end in their mean. So the states are as wide as those of other stacks, every
head takes them, and a stack whose branches give nothing gives back its embeddings.

Shapes: B batch, T positions, D hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers.cache_utils import Cache
from transformers.utils import logging

from .block import Block
from .layout import RECORDS, Layout

logger = logging.get_logger(__name__)

Streams = tuple[torch.Tensor, torch.Tensor]


class ReversibleBlock(Block):
    """A block over two streams, in turn: each branch reads the one and is added to the other."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        *,
        layout: Layout,
        cache: Cache | None = None,
        before_branch: Callable[[], None] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pass both streams on.

        Args:
            hidden_states: `(B, T, D)`, the mean of the streams, which hooks expect here; its dtype is the branches'.
            first, second: the streams, in float32 or better.
            encoder_hidden_states, position_bias, layout, cache, **kwargs: as for `Block.forward`.
            before_branch: is called before each branch.

        Returns:
            Their mean, and the streams.
        """
        for branch, output_norm in self.branches(encoder_hidden_states, position_bias, layout, cache, **kwargs):
            if before_branch is not None:
                before_branch()
            added = branch(second.to(hidden_states.dtype))
            first, second = second, self.join(first, added, output_norm)
        return ((first + second) / 2).to(hidden_states.dtype), first, second


class ReversibleLayers(NamedTuple):
    """Layers to pass, and what all of them are given.

    Attributes:
        layers: the blocks.
        bias_names: by which each layer, and more, finds its position bias among the shared tensors.
        options: the layout, and what else blocks take by name.
        dtype: of the branches.
    """

    layers: list[ReversibleBlock]
    bias_names: tuple[str, ...]
    options: dict[str, Any]
    dtype: torch.dtype

    def run(self, hidden_states: torch.Tensor, shared: dict[str, torch.Tensor]) -> torch.Tensor:
        """Pass `(B, T, D)` through the layers, and have a backward pass compute their inputs anew where that can be.

        Args:
            hidden_states: embedded tokens.
            shared: position biases by name, and the states of an encoder under `"encoder"`.
        """
        first = second = hidden_states.to(torch.promote_types(torch.float32, hidden_states.dtype))
        if self.layers and self._recomputes():
            weights = {id(weight): weight for layer in self.layers for weight in layer.parameters()}.values()
            first, second = _Recompute.apply(self, tuple(shared), first, second, *shared.values(), *weights)
            return ((first + second) / 2).to(self.dtype)
        for layer, bias_name in zip(self.layers, self.bias_names, strict=False):
            given = (shared.get("encoder"), shared.get(bias_name))
            hidden_states, first, second = layer(hidden_states, first, second, *given, **self.options)
        return hidden_states

    def _recomputes(self) -> bool:
        """Whether inputs are computed anew: not where a graph of its own or a past would be, or states are recorded.

        What is recorded with gradients is part of the graph, so that it gets its gradient.
        """
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or self.options.get("cache") is not None:
            return False
        if any(isinstance(layer, FSDPModule) or not isinstance(layer, ReversibleBlock) for layer in self.layers):
            logger.warning_once("reversible=True saves no memory under FSDP, which gathers weights layer by layer.")
            return False
        config = self.layers[0].mixer.config
        return all(self.options.get(name, getattr(config, name)) in (None, False) for name in RECORDS)


class _Recompute(torch.autograd.Function):
    """Reversible layers whose backward pass goes back branch by branch from the streams that came out."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        passed: ReversibleLayers,
        names: tuple[str, ...],
        first: torch.Tensor,
        second: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> Streams:
        shared = dict(zip(names, tensors, strict=False))
        ctx.passed, ctx.names, ctx.weights = passed, names, tensors[len(names) :]
        ctx.autocast, ctx.randoms = _same_autocast(first), []
        entered, hidden_states = second, first.to(passed.dtype)
        with ctx.autocast():
            for layer, bias_name in zip(passed.layers, passed.bias_names, strict=False):
                given = (shared.get("encoder"), shared.get(bias_name))
                randoms = _RandomStates(first, layer.training)
                streams = (hidden_states, first, second)
                _, first, second = layer(*streams, *given, before_branch=randoms.keep, **passed.options)
                ctx.randoms.append(randoms.kept)
        ctx.save_for_backward(entered, first, second, *shared.values())
        return first, second

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        entered, first, second, *tensors = (tensor.detach() for tensor in ctx.saved_tensors)
        needed = ctx.needs_input_grad[4:]
        tensors = [x.requires_grad_(needs) for x, needs in zip(tensors, needed, strict=False)]
        streams, sums = (first, second), _Sums()
        with torch.enable_grad():  # as no leaves, since hooks that count gradients refuse those here
            shared = {name: x.view_as(x) for name, x in zip(ctx.names, tensors, strict=True)}
        ways = zip(ctx.passed.layers, ctx.passed.bias_names, ctx.randoms, strict=False)
        for layer, bias_name, randoms in reversed(list(ways)):
            branches = layer.branches(shared.get("encoder"), shared.get(bias_name), **ctx.passed.options)
            others = [x for x in (*layer.parameters(), *tensors) if x.requires_grad]
            for (branch, output_norm), random in reversed(list(zip(branches, randoms, strict=True))):
                # Embeddings may be zero, and their norm would enlarge what rounding leaves of them.
                is_first = layer is ctx.passed.layers[0] and branch is branches[0][0]
                inputs = (entered if is_first else streams[0]).requires_grad_()
                with _as_before(random), torch.enable_grad(), ctx.autocast():
                    added = branch(inputs.view_as(inputs).to(ctx.passed.dtype))
                    added = layer.join(added.new_zeros(()), added, output_norm)
                found = torch.autograd.grad(added, [inputs, *others], gradients[1].to(added.dtype), allow_unused=True)
                gradients = (gradients[1], gradients[0] if found[0] is None else gradients[0] + found[0])
                streams = (streams[1] - added.detach(), inputs.detach())
                sums.add(others, found[1:])
        return None, None, *gradients, *(sums.of(tensor) for tensor in (*tensors, *ctx.weights))


class _Sums:
    """Gradients of tensors, summed over the branches that use them."""

    def __init__(self) -> None:
        self.sums: dict[int, torch.Tensor] = {}

    def add(self, tensors: list[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            if gradient is not None:
                kept = self.sums.get(id(tensor))
                self.sums[id(tensor)] = gradient if kept is None else kept + gradient

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self.sums.get(id(tensor))


class _RandomState(NamedTuple):
    """The states of the random generators: of the host, and of the devices in use, which are of one type."""

    host: torch.Tensor
    devices: list[int]
    states: list[torch.Tensor]
    device_type: str


class _RandomStates:
    """The states before each branch of a layer; `None` for each in evaluation, which draws nothing."""

    def __init__(self, states: torch.Tensor, training: bool) -> None:
        self.states = states
        self.training = training
        self.kept: list[_RandomState | None] = []

    def keep(self) -> None:
        """Keep the state of now."""
        if not self.training:
            self.kept.append(None)
            return
        devices, states = get_device_states(self.states)
        self.kept.append(_RandomState(torch.get_rng_state(), devices, states, self.states.device.type))


@contextmanager
def _as_before(random: _RandomState | None) -> Iterator[None]:
    """Draw what was drawn before, and leave the generators as they are."""
    if random is None:
        yield
        return
    with torch.random.fork_rng(random.devices, enabled=True, device_type=_device_type(random)):
        torch.set_rng_state(random.host)
        if random.devices:
            set_device_states(random.devices, random.states, device_type=random.device_type)
        yield


def _device_type(random: _RandomState) -> str:
    """The type of device that `fork_rng` takes beside the host: without one its default, of no devices."""
    return random.device_type if random.devices else "cuda"


def _same_autocast(tensor: torch.Tensor) -> Callable[[], AbstractContextManager]:
    """The autocast of now, to enter later on."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    return partial(torch.autocast, device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
