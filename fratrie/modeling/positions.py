"""How a stack knows the order of its tokens.

Learned, axial and sinusoidal positions are added to the embeddings, rotary ones turn queries and keys, relative and
ALiBi ones are added to the attention scores.

Shapes: B batch, T queries, S keys, D hidden, H heads, C head size, R rotated part of a head.
"""

import copy
import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from .configuration import FratrieConfig


def require_places(position_ids_BT: torch.Tensor, most: int, bound: int | None = None) -> None:
    """Refuse positions beyond the `most` that a model has.

    Args:
        position_ids_BT: the positions.
        most: how many there are.
        bound: what they all are below, if the host knows it; it spares it to wait for the device.

    Raises:
        ValueError: with the length of the text.
    """
    if torch.compiler.is_compiling() or (bound is not None and bound <= most) or not position_ids_BT.numel():
        return
    longest = int(position_ids_BT.max()) + 1
    if longest > most:
        raise ValueError(
            f"A text of {longest} tokens is longer than the model's max_position_embeddings={most}: truncate it "
            "(truncation=True), ask for fewer max_new_tokens, or train with more positions."
        )


class LearnedPositions(nn.Embedding):
    """A trained vector per position, after `offset` rows that belong to none."""

    def __init__(self, num_positions: int, hidden_size: int, offset: int = 0) -> None:
        super().__init__(num_positions + offset, hidden_size)
        self.offset = offset

    def forward(self, position_ids_BT: torch.Tensor, bound: int | None = None) -> torch.Tensor:
        """Return the vectors `(B, T, D)` of the positions.

        Args:
            position_ids_BT: the positions.
            bound: what they all are below, if the host knows it; it spares it to wait for the device.

        Raises:
            ValueError: when a position lies beyond the table.
        """
        require_places(position_ids_BT, self.num_embeddings - self.offset, bound)
        return super().forward(position_ids_BT + self.offset)


class AxialPositions(nn.Module):
    """Positions as places of a grid: a trained vector of its row beside one of its column (Kitaev et al. 2020).

    A grid of n rows and m columns has n·m places for n + m vectors. Texts of any length up to
    `max_position_embeddings` fill it line by line.
    """

    def __init__(self, config: FratrieConfig) -> None:
        super().__init__()
        (rows, columns), sizes = axial_grid(config)
        self.most = config.max_position_embeddings
        self.rows = nn.Embedding(rows, sizes[0])
        self.columns = nn.Embedding(columns, sizes[1])

    def forward(self, position_ids_BT: torch.Tensor, bound: int | None = None) -> torch.Tensor:
        """Return the vectors `(B, T, D)` of the positions (see `LearnedPositions.forward`).

        Raises:
            ValueError: when a position lies beyond the model's.
        """
        require_places(position_ids_BT, self.most, bound)
        columns = self.columns.num_embeddings
        return torch.cat((self.rows(position_ids_BT // columns), self.columns(position_ids_BT % columns)), dim=-1)


class SinusoidalPositions(nn.Module):
    """PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos of the same (Vaswani et al. 2017, section 3.5).

    In the layout `"halves"` all sines stand before all cosines.
    """

    def __init__(self, hidden_size: int, layout: str = "interleaved") -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.layout = layout

    def forward(self, position_ids_BT: torch.Tensor, bound: int | None = None) -> torch.Tensor:
        """Return the encodings `(B, T, D)` of the positions, in float32; there are some for any position."""
        device = position_ids_BT.device
        # The rounding of an angle grows with the position, so angles are taken in float64 where the device has it.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        exponents = torch.arange(0, self.hidden_size, 2, device=device, dtype=dtype) / self.hidden_size
        angles_BTX = position_ids_BT[..., None].to(dtype) / 10_000.0**exponents
        waves = torch.stack((angles_BTX.sin(), angles_BTX.cos()), dim=-1 if self.layout == "interleaved" else -2)
        return waves.flatten(-2).float()


class FratrieRotaryEmbedding(nn.Module):
    """Cosines and sines that turn queries and keys by their position (Su et al. 2021).

    The frequencies come from Hugging Face's `rope_parameters`, with all its scaling types. Where these differ by
    layer type, an embedding serves one of the types.
    """

    inv_freq: torch.Tensor
    original_inv_freq: torch.Tensor

    def __init__(self, config: FratrieConfig, layer_type: str | None = None) -> None:
        super().__init__()
        parameters: dict[str, Any] = dict(config.rope_parameters or {})
        if layer_type is not None:
            config, parameters = copy.copy(config), parameters[layer_type]
            config.rope_parameters = parameters
        self.config = config
        # These four names are Hugging Face's contract for scaled rotary embeddings.
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = parameters["rope_type"]
        self.rope_init_fn = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        inv_freq, self.attention_scaling = self.rope_init_fn(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(
        config: FratrieConfig, device: torch.device | None = None, **_: object
    ) -> tuple[torch.Tensor, float]:
        """Return the unscaled inverse frequencies `(R/2,)` and the factor 1."""
        assert config.head_dim is not None
        parameters: dict[str, Any] = dict(config.rope_parameters or {})
        rotated = int(config.head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device=device) / rotated
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0

    @dynamic_rope_update
    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and signed sines `(B, 1, T, R)`, as `rotate` takes them, for `position_ids` `(B, T)`.

        They are in the dtype of `x`. The sines of the first half are negative, so that no layer has to negate states.
        """
        inv_freq = self.inv_freq.to(device=x.device, dtype=torch.float32)
        angles_B1TX = position_ids[:, None, :, None].float() * inv_freq
        cos_B1TX, sin_B1TX = angles_B1TX.cos() * self.attention_scaling, angles_B1TX.sin() * self.attention_scaling
        cos_B1TR, sin_B1TR = torch.cat((cos_B1TX, cos_B1TX), dim=-1), torch.cat((-sin_B1TX, sin_B1TX), dim=-1)
        return cos_B1TR.to(x.dtype), sin_B1TR.to(x.dtype)


def rotate(x_BHTC: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], interleaved: bool = False) -> torch.Tensor:
    """Turn the first R numbers of each head by the cosines and signed sines of its position; the rest stays as it is.

    Number i forms a pair with number i + R/2, as in Hugging Face's Llama. Interleaved pairs are neighbours instead;
    they come out in the order of the other form, which scores do not feel, since queries and keys share it.
    """
    cos_B1TR, sin_B1TR = turns
    rotated = cos_B1TR.shape[-1]
    if rotated < x_BHTC.shape[-1]:
        turned = rotate(x_BHTC[..., :rotated], turns, interleaved)
        return torch.cat((turned, x_BHTC[..., rotated:]), dim=-1)
    if interleaved:
        x_BHTC = torch.cat((x_BHTC[..., ::2], x_BHTC[..., 1::2]), dim=-1)
    return x_BHTC * cos_B1TR + x_BHTC.roll(rotated // 2, dims=-1) * sin_B1TR


class RelativePositionBias(nn.Module):
    """A trained number per head and bucket of distances, added to the scores (T5: Raffel et al. 2020, section 2.1)."""

    def __init__(self, config: FratrieConfig) -> None:
        super().__init__()
        self.bidirectional = not config.is_causal_stack
        self.num_buckets = config.relative_num_buckets
        self.max_distance = config.relative_max_distance
        self.table = nn.Embedding(self.num_buckets, config.num_attention_heads)

    def bucket(self, distance_TS: torch.Tensor) -> torch.Tensor:
        """Bucket of each distance `key position - query position`.

        Half of the buckets of a direction hold one distance each, the others grow with its logarithm up to
        `max_distance`. Bidirectional stacks split the buckets between the two directions.
        """
        buckets = self.num_buckets
        offset = torch.zeros_like(distance_TS)
        if self.bidirectional:
            buckets //= 2
            offset = (distance_TS > 0).long() * buckets
            distance_TS = distance_TS.abs()
        else:
            distance_TS = (-distance_TS).clamp_min(0)
        exact = buckets // 2
        growth = torch.log(distance_TS.float().clamp_min(1) / exact) / math.log(self.max_distance / exact)
        far = (exact + (growth * (buckets - exact)).long()).clamp_max(buckets - 1)
        return offset + torch.where(distance_TS < exact, distance_TS, far)

    def forward(self, query_positions_T: torch.Tensor, key_positions_S: torch.Tensor) -> torch.Tensor:
        """Return the bias `(1, H, T, S)`."""
        buckets_TS = self.bucket(key_positions_S[None, :] - query_positions_T[:, None])
        return self.table(buckets_TS).permute(2, 0, 1).unsqueeze(0)


class AlibiPositionBias(nn.Module):
    """A fixed penalty that grows with the distance, at another slope per head (Press et al. 2022)."""

    slopes_H: torch.Tensor

    def __init__(self, config: FratrieConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.register_buffer("slopes_H", self.compute_slopes(), persistent=False)

    def initialise(self, std: float) -> None:
        """Fill in the slopes (see `FratriePreTrainedModel`)."""
        init.copy_(self.slopes_H, self.compute_slopes())

    def compute_slopes(self) -> torch.Tensor:
        """The paper's slopes: a geometric sequence, for other numbers of heads than powers of two filled up from
        the next longer one."""
        power = 2 ** math.floor(math.log2(self.num_heads))
        slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
        longer = [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * power, 2)]
        return torch.tensor((slopes + longer)[: self.num_heads], dtype=torch.float32)

    def forward(self, query_positions_T: torch.Tensor, key_positions_S: torch.Tensor) -> torch.Tensor:
        """Return the bias `(1, H, T, S)` in float32."""
        distance_TS = (key_positions_S[None, :] - query_positions_T[:, None]).abs()
        return -(self.slopes_H[:, None, None] * distance_TS).unsqueeze(0)


def axial_grid(config: FratrieConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of the grid of axial positions, and the sizes of their vectors: as given, else halves."""
    side = math.isqrt(config.max_position_embeddings - 1) + 1  # the smallest square that has a place for each
    rows, columns = config.axial_shape or (side, side)
    half = config.hidden_size // 2
    first, second = config.axial_dims or (half, config.hidden_size - half)
    return (rows, columns), (first, second)


def build_position_embeddings(config: FratrieConfig) -> nn.Module | None:
    """What is added to the embeddings for their positions."""
    match config.position_type:
        case "learned":
            return LearnedPositions(config.max_position_embeddings, config.hidden_size, config.position_offset)
        case "axial":
            return AxialPositions(config)
        case "sinusoidal":
            return SinusoidalPositions(config.hidden_size, config.sinusoid_layout)
    return None


def build_rotary_embeddings(config: FratrieConfig) -> nn.ModuleDict | FratrieRotaryEmbedding | None:
    """What turns queries and keys: one for all layers, or one per layer type."""
    if config.position_type != "rotary":
        return None
    rope: dict[Any, Any] = dict(config.rope_parameters or {})
    if "rope_type" in rope:
        return FratrieRotaryEmbedding(config)
    return nn.ModuleDict({kind: FratrieRotaryEmbedding(config, kind) for kind in rope})


def build_position_bias(config: FratrieConfig) -> RelativePositionBias | AlibiPositionBias | None:
    """What is added to the attention scores."""
    match config.position_type:
        case "relative":
            return RelativePositionBias(config)
        case "alibi":
            return AlibiPositionBias(config)
    return None
