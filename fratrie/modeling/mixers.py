"""The registry of mixers: what the names in `mixer_types` of the configuration stand for."""

from .adaptive_span import AdaptiveSpanAttention
from .attention import SoftmaxAttention
from .bigbird import BigBirdAttention
from .latent_attention import LatentAttention
from .linear_attention import LinearAttention
from .linformer import Linformer
from .mixer import Mixer

# New ones at the end: the first that suits a layer type is its default, unless a field enables another.
MIXERS: dict[str, type[Mixer]] = {
    "softmax": SoftmaxAttention,
    "linear": LinearAttention,
    "latent": LatentAttention,
    "adaptive_span": AdaptiveSpanAttention,
    "linformer": Linformer,
    "bigbird": BigBirdAttention,
}
