"""The registry of mixers: what the names in `mixer_types` of the configuration stand for."""

from .attention import SoftmaxAttention
from .latent_attention import LatentAttention
from .linear_attention import LinearAttention
from .mixer import Mixer

# The first one that suits a layer type, and whose enabling field is set, is its default.
MIXERS: dict[str, type[Mixer]] = {
    "latent": LatentAttention,
    "softmax": SoftmaxAttention,
    "linear": LinearAttention,
}
