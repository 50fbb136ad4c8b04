"""Performer: linear attention whose random features make it an estimate of softmax attention, without bias.

FAVOR+ (Choromanski et al. 2021): for ω ~ N(0, I), exp(q·k) is the mean of exp(ω·q - |q|²/2) exp(ω·k - |k|²/2). Vectors
ω that are orthogonal to one another in blocks of C give an estimate that varies less.

Shapes: B batch, T queries, S keys, H heads, K key-value heads, G query heads of a key-value head, C head size,
F features of a head, N blocks of C features.
"""

import math

import torch
from torch import nn
from transformers import initialization as init

from .configuration import FratrieConfig
from .linear_attention import LinearAttention, exponentials
from .plans import Plan
from .seeds import layer_generator, require_seed

# Exponents of keys end here: e^40 times a million large values still is a float32. By chance none comes so far: for a
# key of any length the odds are below 1e-18.
_LARGEST_EXPONENT = 40.0


def draw_features(heads: int, features: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Draw vectors `(heads, size, features)`, each of them N(0, I), orthogonal in blocks of `size`; in float64.

    The signs of the diagonal of R make Q uniform among the orthogonal matrices, as it comes out of QR it is not.
    """
    shape = heads, -(-features // size), size, size
    normal_KNCC, other_KNCC = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    columns_KNCC, triangle_KNCC = torch.linalg.qr(normal_KNCC)
    columns_KNCC = columns_KNCC * triangle_KNCC.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    columns_KNCC = columns_KNCC * other_KNCC.norm(dim=-2, keepdim=True)
    return columns_KNCC.transpose(1, 2).flatten(2)[..., :features]


class RandomFeatures(nn.Module):
    """The vectors ω of every key-value head of a layer, which are saved with the weights and trained by nothing."""

    vectors_KCF: torch.Tensor

    def __init__(self, shape: tuple[int, int, int], seed: int, layer_idx: int) -> None:
        super().__init__()
        self.seed, self.layer_idx = seed, layer_idx
        self.register_buffer("vectors_KCF", torch.empty(shape))

    def initialise(self, std: float) -> None:
        """Draw the features of the seed (see `FratriePreTrainedModel`)."""
        init.copy_(self.vectors_KCF, self.draw(layer_generator(self.seed, self.layer_idx)))

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Other features in the shape of these."""
        heads, size, features = self.vectors_KCF.shape
        return draw_features(heads, features, size, generator)

    def forward(self) -> torch.Tensor:
        """Return the vectors as `(1, K, C, F)`."""
        return self.vectors_KCF.unsqueeze(0)


class Performer(LinearAttention):
    """Softmax attention by random features, in time that grows with the length; cache and chunks of linear attention.

    The features stay what they are, in training too, unless `redraw` is called.
    """

    own_fields = ("performer_num_features", "performer_seed")
    smallest_normaliser = 1e-28  # gradients of the quotient grow as its inverse

    def __init__(self, config: FratrieConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        assert config.num_key_value_heads is not None
        shape = config.num_key_value_heads, self.head_dim, self.features_of_head(config)
        self.random_features = RandomFeatures(shape, config.performer_seed or 0, layer_idx)

    @classmethod
    def check(cls, config: FratrieConfig, layer_type: str) -> None:
        """Refuse less than a feature, and seeds out of range."""
        number = config.performer_num_features
        if number is not None and number < 1:
            raise ValueError(f"performer_num_features={number} must be at least 1.")
        require_seed("performer_seed", config.performer_seed)

    @classmethod
    def features_of_head(cls, config: FratrieConfig) -> int:
        """Number F of features of a head: by default C ln C of the paper, in whole blocks."""
        assert config.head_dim is not None
        blocks = max(1, math.ceil(math.log(max(config.head_dim, 1))))
        return config.performer_num_features or config.head_dim * blocks

    @classmethod
    def tensor_parallel_plan(cls, config: FratrieConfig) -> Plan:
        """Each device keeps the features of its own heads."""
        return {**super().tensor_parallel_plan(config), "random_features": "own_heads"}

    @torch.no_grad()
    def redraw(self, generator: torch.Generator) -> None:
        """Replace the features in place by others, for those who train with changing ones.

        Args:
            generator: of the CPU; its state decides what is drawn.
        """
        features = self.random_features
        features.vectors_KCF.copy_(features.draw(generator))

    def map_queries(self, query_BHTC: torch.Tensor) -> torch.Tensor:
        """exp(ω·q) over the largest of the row; what depends on the query alone cancels."""
        vectors_1KCF = self.random_features().to(query_BHTC.dtype)
        query_BKGTC = (query_BHTC * self.scaling**0.5).unflatten(1, (vectors_1KCF.shape[1], -1))
        exponent_BHTF = (query_BKGTC @ vectors_1KCF.unsqueeze(2)).flatten(1, 2)
        return exponentials(exponent_BHTF)

    def map_keys(self, key_BKSC: torch.Tensor) -> torch.Tensor:
        """exp(ω·k - |k|²/2), which no maximum may scale: it would have to know other keys."""
        key_BKSC = key_BKSC * self.scaling**0.5
        exponent_BKSF = key_BKSC @ self.random_features().to(key_BKSC.dtype)
        exponent_BKSF = exponent_BKSF - key_BKSC.square().sum(-1, keepdim=True) / 2
        return exponent_BKSF.clamp_max(_LARGEST_EXPONENT).exp_()

    def flops(self, length: int) -> int:
        """Those of linear attention, and the products with the features."""
        heads = self.config.num_attention_heads + (self.config.num_key_value_heads or 0)
        return super().flops(length) + 2 * length * heads * self.head_dim * self.features_of_head(self.config)
