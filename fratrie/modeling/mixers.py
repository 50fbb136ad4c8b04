"""The registry of mixers: what the names in `mixer_types` of the configuration stand for."""

from .attention import SoftmaxAttention
from .latent_attention import LatentAttention
from .linear_attention import LinearAttention
from .mixer import Mixer
from .reformer import ReformerAttention

# New ones at the end: the first that suits a layer type is its default, unless a field enables another.
MIXERS: dict[str, type[Mixer]] = {
    "softmax": SoftmaxAttention,
    "linear": LinearAttention,
    "latent": LatentAttention,
    "reformer": ReformerAttention,
}
