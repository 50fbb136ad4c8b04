"""The registry of mixers: what a layer type of the configuration stands for."""

from .attention import Mixer, SoftmaxAttention
from .linear_attention import LinearAttention

MIXERS: dict[str, type[Mixer]] = {
    "full_attention": SoftmaxAttention,
    "sliding_attention": SoftmaxAttention,
    "linear_attention": LinearAttention,
}
