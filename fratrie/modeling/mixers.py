"""The registry of mixers: what the names in `mixer_types` of the configuration stand for."""

from .attention import SoftmaxAttention
from .gated_delta import GatedDelta
from .kimi_delta import KimiDelta
from .latent_attention import LatentAttention
from .linear_attention import LinearAttention
from .mixer import Mixer
from .retention import Retention
from .short_convolution import ShortConvolution
from .ssd import StateSpace

# New ones at the end: the first that suits a layer type is its default, unless a field enables another.
MIXERS: dict[str, type[Mixer]] = {
    "softmax": SoftmaxAttention,
    "linear": LinearAttention,
    "latent": LatentAttention,
    "short_conv": ShortConvolution,
    "retention": Retention,
    "gated_delta": GatedDelta,
    "kimi_delta": KimiDelta,
    "ssd": StateSpace,
}
