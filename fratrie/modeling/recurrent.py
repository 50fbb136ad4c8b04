"""Recurrent networks as mixers: Elman's network, LSTM and GRU, by torch's kernels and under the names of its weights.

A state passes over the tokens one after another, and what it is at a token is the output: the layer is `nn.RNN`,
`nn.LSTM` or `nn.GRU` of one layer, as wide as the model, with no projection behind it. In bidirectional stacks it is
two directions of half the width, the backward one from the last real token of each document.

Shapes: B batch, T tokens, D hidden, E width of a direction, N numbers of states: 2 in an LSTM, else 1.
"""

import re
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.utils.generic import maybe_autocast

from .configuration import FratrieConfig
from .layout import Layout
from .mixer import Mixer
from .states import keep_state

_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")

_KERNELS = {"rnn": torch.rnn_tanh, "gru": torch.gru}

# Added to a gate it leaves nothing of it but zero or one.
_SHUT = 1e6


def recur(
    kind: str, x_BTD: torch.Tensor, past_NBE: torch.Tensor, weights: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run torch's kernel of a kind: outputs `(B, T, E)` and the last states `(N, B, E)`."""
    has_bias, layers, dropout, bidirectional, batch_first = len(weights) == len(_WEIGHTS), 1, 0.0, False, True
    # The kernel has a backward pass where it runs in training mode, whatever mode the model is in.
    options = (weights, has_bias, layers, dropout, torch.is_grad_enabled(), bidirectional, batch_first)
    if kind == "lstm":
        output_BTE, shown_1BE, cell_1BE = torch.lstm(x_BTD, past_NBE.split(1), *options)
        return output_BTE, torch.cat((shown_1BE, cell_1BE))
    return _KERNELS[kind](x_BTD, past_NBE, *options)


# A compiled graph would unroll the kernel for every length anew, unless it is one operation. A checkpoint that carries
# this code defines it once more, under the name of its own module.
_NAMESPACE = re.sub(r"\W", "_", __name__)


@torch.library.custom_op(f"{_NAMESPACE}::recur", mutates_args=())
def recur_as_one(
    kind: str, x_BTD: torch.Tensor, past_NBE: torch.Tensor, weights: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`recur` for compiled graphs; its backward pass runs it once more."""
    output_BTE, last_NBE = recur(kind, x_BTD, past_NBE, weights)
    return output_BTE.clone(memory_format=torch.contiguous_format), last_NBE.clone()


@torch.library.custom_op(f"{_NAMESPACE}::recur_backward", mutates_args=())
def recur_backward(kind: str, inputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of the inputs of `recur`, a list of all tensors, from those of what it returns."""

    def run(x_BTD: torch.Tensor, past_NBE: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return recur(kind, x_BTD, past_NBE, list(weights))

    with torch.enable_grad():
        pull_back = torch.func.vjp(run, *inputs)[1]
        return [gradient.clone(memory_format=torch.contiguous_format) for gradient in pull_back(tuple(gradients))]


def _fake_recur(
    kind: str, x_BTD: torch.Tensor, past_NBE: torch.Tensor, weights: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    return x_BTD.new_empty(*x_BTD.shape[:2], past_NBE.shape[-1]), torch.empty_like(past_NBE)


def _fake_recur_backward(kind: str, inputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs]


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.kind, x_BTD, past_NBE, weights = inputs
    ctx.save_for_backward(x_BTD, past_NBE, *weights)


def _backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
    of_x, of_past, *of_weights = recur_backward(ctx.kind, list(ctx.saved_tensors), list(gradients))
    return None, of_x, of_past, of_weights


recur_as_one.register_fake(_fake_recur)
recur_backward.register_fake(_fake_recur_backward)
recur_as_one.register_autograd(_backward, setup_context=_keep_inputs)


def real_first(mask_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of real tokens in their order, behind them those of padding, `(B, T)`; and their number `(B, 1)`."""
    real_BT = mask_BT.bool()
    return (~real_BT).long().argsort(dim=1, stable=True), real_BT.sum(dim=1, keepdim=True)


def backwards(order_BT: torch.Tensor, number_B1: torch.Tensor) -> torch.Tensor:
    """The same places with those of real tokens in reverse."""
    place_T = torch.arange(order_BT.shape[1], device=order_BT.device)
    return order_BT.gather(1, torch.where(place_T < number_B1, number_B1 - 1 - place_T, place_T))


class Recurrent(Mixer):
    """A recurrent network; its cache is its state, in float32 or better.

    Class attributes:
        kind: which one.
        gates: rows of a weight per number of the state.
        states: numbers N of states.
        activations: numbers per number of the state and token that its kernel keeps in training.
    """

    layer_types = ("linear_attention",)
    mask_form = "lengths"
    fits_onnx = False
    kind: ClassVar[str]
    gates: ClassVar[int]
    states: ClassVar[int] = 1
    activations: ClassVar[int]

    def __init__(self, config: FratrieConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.directions = ("",) if self.is_causal else ("", "_reverse")
        self.size = config.hidden_size // len(self.directions)
        shapes: tuple[tuple[int, ...], ...] = ((config.hidden_size,), (self.size,), (), ())
        for direction in self.directions:
            for name, shape in zip(_WEIGHTS, shapes, strict=True):
                is_there = bool(shape) or config.attention_bias
                weight = nn.Parameter(torch.empty(self.gates * self.size, *shape)) if is_there else None
                self.register_parameter(f"{name}_l0{direction}", weight)

    def initialise(self, std: float) -> None:
        """Draw weights as torch does, whatever the standard deviation of the others; biases are zero."""
        for name, weight in self.named_parameters():
            if name.startswith("weight"):
                init.uniform_(weight, -(self.size**-0.5), self.size**-0.5)
            else:
                init.copy_(weight, self.first_bias(name))

    def first_bias(self, name: str) -> torch.Tensor:
        """What the bias of this name begins with."""
        return torch.zeros(self.gates * self.size)

    @classmethod
    def check(cls, config: FratrieConfig, layer_type: str) -> None:
        """Refuse an odd width where there are two directions (see `Mixer.check`)."""
        if not config.is_causal_stack and config.hidden_size % 2:
            raise ValueError(
                f"hidden_size={config.hidden_size} is odd, but recurrent layers of a bidirectional stack give half of "
                "it to each direction: use an even one."
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        position_bias: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Pass over the tokens (see `Mixer.forward`); there are no scores and no weights."""
        kernel = partial(self.run, cache=cache)
        return layout.run(kernel, [hidden_states], (self.mask_form, self.layer_type))

    def run(
        self, x_BTD: torch.Tensor, mask_BT: torch.Tensor | None, position_bias: None, cache: Cache | None
    ) -> tuple[torch.Tensor, None]:
        """The kernel: outputs `(B, T, D)`, zeros at padding, from rows that may be padded anywhere."""
        given, dtype = x_BTD.dtype, torch.promote_types(torch.float32, x_BTD.dtype)
        x_BTD = x_BTD.to(dtype)
        with maybe_autocast(x_BTD.device.type, enabled=False):
            output_BTD = self._causal(x_BTD, mask_BT, cache) if self.is_causal else self._bidirectional(x_BTD, mask_BT)
        if mask_BT is not None:
            output_BTD = output_BTD.masked_fill(~mask_BT.bool().unsqueeze(-1), 0.0)
        return output_BTD.to(given), None

    def _causal(self, x_BTD: torch.Tensor, mask_BT: torch.Tensor | None, cache: Cache | None) -> torch.Tensor:
        past_BNE = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        if past_BNE is None:
            past_BNE = x_BTD.new_zeros(x_BTD.shape[0], self.states, self.size)
        past_NBE = past_BNE.to(x_BTD.dtype).transpose(0, 1).contiguous()
        weights = self.weights("", x_BTD.dtype)
        if mask_BT is None:
            output_BTE, last_NBE = self._recur(x_BTD, past_NBE, weights)
        else:
            order_BT, number_B1 = real_first(mask_BT)
            x_BTD = take(x_BTD, order_BT)
            if cache is not None:
                x_BTD, weights = self.hold_states(x_BTD, weights, number_B1)
            output_BTE, last_NBE = self._recur(x_BTD, past_NBE, weights)
            # What a row gives is its state. Behind the real tokens the kernel went on, up to states that were held.
            shown_BE = take(output_BTE, (number_B1 - 1).clamp_min(0)).squeeze(1)
            shown_BE = torch.where(number_B1 > 0, shown_BE, past_NBE[0])
            last_NBE = torch.cat((shown_BE.unsqueeze(0), last_NBE[1:]))
            output_BTE = put(output_BTE, order_BT)
        keep_state(cache, self.layer_idx, last_NBE.transpose(0, 1))
        return output_BTE

    def _bidirectional(self, x_BTD: torch.Tensor, mask_BT: torch.Tensor | None) -> torch.Tensor:
        if mask_BT is None:
            mask_BT = torch.ones_like(x_BTD[..., 0], dtype=torch.bool)
        order_BT, number_B1 = real_first(mask_BT)
        outputs = []
        for direction, places_BT in zip(self.directions, (order_BT, backwards(order_BT, number_B1)), strict=True):
            start_NBE = x_BTD.new_zeros(self.states, x_BTD.shape[0], self.size)
            output_BTE, _ = self._recur(take(x_BTD, places_BT), start_NBE, self.weights(direction, x_BTD.dtype))
            outputs.append(put(output_BTE, places_BT))
        return torch.cat(outputs, dim=-1)

    def _recur(
        self, x_BTD: torch.Tensor, past_NBE: torch.Tensor, weights: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kernel = recur_as_one if torch.compiler.is_compiling() else recur
        return kernel(self.kind, x_BTD, past_NBE, weights)

    def weights(self, direction: str, dtype: torch.dtype) -> list[torch.Tensor]:
        """The weights of a direction, in torch's order."""
        found = (getattr(self, f"{name}_l0{direction}") for name in _WEIGHTS)
        return [weight.to(dtype) for weight in found if weight is not None]

    def hold_states(
        self, x_BTD: torch.Tensor, weights: list[torch.Tensor], number_B1: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Inputs and weights with which states that no output shows stay as they are behind the real tokens."""
        return x_BTD, weights

    def flops(self, length: int) -> int:
        """One product with every weight per token; torch's fused kernels do the same, but its counter skips them."""
        return 2 * length * sum(weight.numel() for weight in self.parameters() if weight.ndim == 2)

    @classmethod
    def cache_bytes(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> int:
        """States in float32 or better, at any length (see `Mixer.cache_bytes`)."""
        return cls.states * config.hidden_size * torch.promote_types(torch.float32, dtype).itemsize

    @classmethod
    def activation_numbers(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> float:
        """In float32: gates and states, and the inputs in the order of each direction."""
        ordered = 0 if config.is_causal_stack else 2
        return (cls.activations + ordered) * config.hidden_size * max(1.0, 4 / dtype.itemsize)


def take(x_BTD: torch.Tensor, places_BT: torch.Tensor) -> torch.Tensor:
    """The tokens at these places of each row."""
    return x_BTD.gather(1, places_BT.unsqueeze(-1).expand(-1, -1, x_BTD.shape[-1]))


def put(x_BTD: torch.Tensor, places_BT: torch.Tensor) -> torch.Tensor:
    """The tokens back at the places that they were taken from."""
    return torch.zeros_like(x_BTD).scatter(1, places_BT.unsqueeze(-1).expand_as(x_BTD), x_BTD)


class RNN(Recurrent):
    """h = tanh(W x + U h + b) (Elman 1990)."""

    kind = "rnn"
    gates = 1
    activations = 2


class LSTM(Recurrent):
    """Long short-term memory (Hochreiter & Schmidhuber 1997; with forget gates, Gers et al. 2000)."""

    kind = "lstm"
    gates = 4
    states = 2
    activations = 18

    def first_bias(self, name: str) -> torch.Tensor:
        """One for the forget gate, so that a state lasts from the first step on (Jozefowicz et al. 2015)."""
        bias = super().first_bias(name)
        if name.startswith("bias_ih"):
            bias[self.size : 2 * self.size] = 1.0
        return bias

    def hold_states(
        self, x_BTD: torch.Tensor, weights: list[torch.Tensor], number_B1: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Behind the real tokens a further input shuts the input gate and opens the forget gate, for good."""
        place_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        is_behind_BT1 = (place_T >= number_B1).unsqueeze(-1).to(x_BTD.dtype)
        shut = [-_SHUT, _SHUT, 0.0, 0.0]
        column = torch.tensor(shut, dtype=x_BTD.dtype, device=x_BTD.device).repeat_interleave(self.size).unsqueeze(1)
        return torch.cat((x_BTD, is_behind_BT1), dim=-1), [torch.cat((weights[0], column), dim=1), *weights[1:]]


class GRU(Recurrent):
    """Gated recurrent unit (Cho et al. 2014), whose reset gate acts behind the recurrent product, as torch's does."""

    kind = "gru"
    gates = 3
    activations = 8
