"""The classification head: pooling of a sentence's tokens, optional dense layers, output layer.

Shapes: B batch, T positions, D hidden, M labels.
"""

from itertools import pairwise

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .normalization import build_norm


class ClassificationHead(nn.Module):
    """Dense layers with activation and perhaps norm, then one output a label; dropout before each layer."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        sizes = [config.hidden_size, *(config.classifier_hidden_sizes or [])]
        self.dense = nn.ModuleList(
            nn.Linear(before, after, bias=config.classifier_bias) for before, after in pairwise(sizes)
        )
        self.norms = nn.ModuleList(
            build_norm(config.classifier_norm, size, config.norm_eps, config.norm_bias) for size in sizes[1:]
        )
        self.act_fn = ACT2FN[config.classifier_activation]
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out_proj = nn.Linear(sizes[-1], config.num_labels or 0, bias=config.classifier_output_bias)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map `(…, D)` to logits `(…, M)`."""
        for layer, norm in zip(self.dense, self.norms, strict=True):
            features = norm(self.act_fn(layer(self.dropout(features))))
        return self.out_proj(self.dropout(features))


class Pooler(nn.Module):
    """A dense layer and an activation over the vector of the first token (Devlin et al. 2019)."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.act_fn = ACT2FN[config.pooler_activation]

    def forward(self, first_BD: torch.Tensor) -> torch.Tensor:
        """Map `(B, D)` to `(B, D)`."""
        return self.act_fn(self.dense(first_BD))


def pool(hidden_states: torch.Tensor, real_tokens: torch.Tensor, pooling: str) -> torch.Tensor:
    """One vector a sentence.

    Args:
        hidden_states: `(B, T, D)`.
        real_tokens: `(B, T)`, true where a token is no padding; padding may stand on either side.
        pooling: `"first"`, `"mean"` or `"last"` real token.

    Returns:
        `(B, D)`; zeros for the mean of a sentence without real tokens.
    """
    mask_BT = real_tokens.to(hidden_states.dtype)
    if pooling == "mean":
        return (hidden_states * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdim=True).clamp_min(1)
    place = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    # The largest of the real places, counted from the end that is looked for.
    order = place if pooling == "last" else place.flip(0)
    index = torch.where(real_tokens, order, -1).argmax(-1)
    return hidden_states[torch.arange(hidden_states.shape[0], device=hidden_states.device), index]


def find_real_tokens(
    hidden_states: torch.Tensor,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    pad_token_id: int | None,
) -> torch.Tensor:
    """Real tokens `(B, T)`: by the mask (of past tokens too), without one by the padding id, without that all.

    Raises:
        ValueError: when the mask has another form than `(B, T)`.
    """
    if attention_mask is not None:
        if attention_mask.ndim != 2:
            raise ValueError(
                f"To find the real tokens of a sentence the attention_mask must be (batch, length), not "
                f"{tuple(attention_mask.shape)}."
            )
        return attention_mask[:, -hidden_states.shape[1] :].bool()
    if input_ids is not None and pad_token_id is not None:
        return input_ids != pad_token_id
    return torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
