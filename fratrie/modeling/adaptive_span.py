"""Softmax attention whose heads learn how far they look (Sukhbaatar et al. 2019).

A head of span z gives a token at distance x the weight m(x) exp(score), where m(x) = clamp((R + z - x) / R, 0, 1)
falls from 1 to 0 over a ramp of R tokens. That is the softmax of the scores plus log m, so that any kernel which takes
a bias runs it.

Shapes: B batch, T queries, S keys, D hidden, H heads.
"""

import math
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache

from .attention import SoftmaxAttention
from .configuration import FratrieConfig
from .layout import Layout
from .mixer import MixerLoss
from .plans import Plan


class Spans(nn.Module):
    """The span of each head, and what it adds to the scores.

    Attributes:
        bias: `(H,)`, spans as shares of the longest one. So named, since optimizers do not decay what is called so.
    """

    def __init__(self, config: FratrieConfig) -> None:
        super().__init__()
        assert config.adaptive_span_limit is not None and config.adaptive_span_ramp is not None
        self.limit, self.ramp = config.adaptive_span_limit, config.adaptive_span_ramp
        self.bias = nn.Parameter(torch.empty(config.num_attention_heads))

    def initialise(self, std: float) -> None:
        """Start from the ramp alone, as the paper does."""
        init.zeros_(self.bias)

    def shares(self) -> torch.Tensor:
        """The spans `(H,)` as shares of the longest one, in float32 or better.

        A step that has carried one over an end is taken back to it before the next pass of a training. (Hidden from
        autograd, since an earlier pass may have a backward one to come.)
        """
        if self.training:
            self.bias.data.clamp_(0.0, 1.0)
        return self.bias.to(torch.promote_types(self.bias.dtype, torch.float32)).clamp(0.0, 1.0)

    def forward(self, distance_TS: torch.Tensor) -> torch.Tensor:
        """Return log m `(1, H, T, S)` of distances in tokens, -inf beyond the ramp."""
        span_H11 = self.limit * self.shares()[:, None, None]
        mask_HTS = ((self.ramp + span_H11 - distance_TS) / self.ramp).clamp(0.0, 1.0)
        # Not the logarithm of zero, whose gradient would be none.
        smallest = torch.finfo(mask_HTS.dtype).tiny
        return torch.where(mask_HTS > 0, mask_HTS.clamp_min(smallest).log(), -torch.inf).unsqueeze(0)


class AdaptiveSpanAttention(SoftmaxAttention):
    """Softmax attention with a learned span per head.

    Its bias costs memory with the square of the length. Under full attention the cache keeps every token; see
    `needed_window` for how a trained model keeps no more than it looks at.
    """

    own_fields: ClassVar[tuple[str, ...]] = ("adaptive_span_limit", "adaptive_span_ramp", "adaptive_span_loss_coef")
    fits_paged_cache = False
    adds_to_scores = True
    has_loss = True

    def __init__(self, config: FratrieConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        assert config.adaptive_span_loss_coef is not None
        self.spans = Spans(config)
        self.loss = MixerLoss()
        self.loss_coef = config.adaptive_span_loss_coef

    @classmethod
    def fill_defaults(cls, config: FratrieConfig) -> None:
        """Let spans grow to the longest text, and take ramp and loss from the paper."""
        if config.adaptive_span_limit is None:
            config.adaptive_span_limit = config.max_position_embeddings
        if config.adaptive_span_ramp is None:
            config.adaptive_span_ramp = 32
        if config.adaptive_span_loss_coef is None:
            config.adaptive_span_loss_coef = 2e-6

    @classmethod
    def check(cls, config: FratrieConfig, layer_type: str) -> None:
        """Refuse spans that cannot be (see `Mixer.check`)."""
        super().check(config, layer_type)
        for name in ("adaptive_span_limit", "adaptive_span_ramp"):
            if (value := getattr(config, name)) <= 0:
                raise ValueError(f"{name}={value} must be above 0.")
        if (coef := config.adaptive_span_loss_coef or 0) < 0:
            raise ValueError(f"adaptive_span_loss_coef={coef} must not be negative: it would reward long spans.")

    @classmethod
    def tensor_parallel_plan(cls, config: FratrieConfig) -> Plan:
        """Each device holds some heads, and the spans of all."""
        return {**super().tensor_parallel_plan(config), "spans": "own_heads"}

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        position_bias: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend (see `Mixer.forward`). The loss is that of the paper: λ · mean over the heads of the spans."""
        self.loss(self.loss_coef * self.spans.limit * self.spans.shares().mean())
        offset, (keys, key_offset) = 0, (layout.longest, 0)
        if cache is not None:
            offset = cache.get_query_offset(self.layer_idx)
            keys, key_offset = cache.get_mask_sizes(layout.longest, self.layer_idx)
        query_T = torch.arange(layout.longest, device=hidden_states.device) + offset
        key_S = torch.arange(keys, device=hidden_states.device) + key_offset
        bias_1HTS = self.spans((key_S[None, :] - query_T[:, None]).abs())
        if position_bias is not None:
            bias_1HTS = bias_1HTS + position_bias
        return super().forward(hidden_states, layout, bias_1HTS, cache, **kwargs)

    @staticmethod
    def numbers_added_to_scores(config: FratrieConfig, layer_type: str, length: int) -> int:
        """Per query and head its bias, and what it is made from."""
        return 4 * config.num_attention_heads * length


def needed_window(model: nn.Module) -> int:
    """The smallest `sliding_window` that changes nothing of what a trained model gives.

    With it, and `layer_types` of `"sliding_attention"`, the model can be loaded anew: its cache then keeps so many
    tokens at most.

    Raises:
        ValueError: for a model without adaptive spans.
    """
    mixers = [module for module in model.modules() if isinstance(module, AdaptiveSpanAttention)]
    if not mixers:
        raise ValueError(f"{type(model).__name__} has no mixer 'adaptive_span', so no spans tell a window.")
    # What lies a whole ramp behind the span has no weight.
    longest = max(mixer.spans.limit * mixer.spans.shares().max().item() for mixer in mixers)
    reach = math.ceil(longest + mixers[0].spans.ramp)
    return max(2, reach) if mixers[0].is_causal else max(1, reach - 1)
