"""Queries, keys and values of an attention mixer written out, for the plain forms of several mixers."""

import torch

from fratrie.modeling.mixer import AttentionMixer


def heads_of(mixer: AttentionMixer, hidden: torch.Tensor, angles: torch.Tensor | None) -> list[torch.Tensor]:
    """Queries, keys and values `(H, T, C)` of `(T, D)`; `angles` `(T, C / 2)` turn the pairs (i, i + C/2)."""

    def split(layer):
        parts = (hidden @ layer.weight.T + layer.bias).unflatten(-1, (-1, mixer.head_dim)).transpose(0, 1)
        return parts.repeat_interleave(mixer.config.num_attention_heads // len(parts), dim=0)

    query, key, value = (split(layer) for layer in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    if angles is not None:
        query, key = turned(query, angles), turned(key, angles)
    return [query, key, value]


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """`(H, T, C)` turned as complex numbers."""
    numbers = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((numbers.real, numbers.imag), dim=-1)


def joined(mixer: AttentionMixer, mixed: torch.Tensor) -> torch.Tensor:
    """The output `(T, D)` of mixed values `(H, T, C)`."""
    return mixer.o_proj(mixed.transpose(0, 1).flatten(-2))
