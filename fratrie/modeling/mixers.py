"""The registry of mixers: what the names in `mixer_types` of the configuration stand for."""

from .adaptive_span import AdaptiveSpanAttention
from .attention import SoftmaxAttention
from .bigbird import BigBirdAttention
from .configuration import FratrieConfig
from .gated_delta import GatedDelta
from .kimi_delta import KimiDelta
from .latent_attention import LatentAttention
from .linear_attention import LinearAttention
from .linformer import Linformer
from .longformer import LongformerAttention
from .mixer import Mixer
from .performer import Performer
from .recurrent import GRU, LSTM, RNN
from .reformer import ReformerAttention
from .retention import Retention
from .short_convolution import ShortConvolution
from .ssd import StateSpace

# New ones at the end: the first that suits a layer type is its default, unless a field enables another.
MIXERS: dict[str, type[Mixer]] = {
    "softmax": SoftmaxAttention,
    "linear": LinearAttention,
    "latent": LatentAttention,
    "performer": Performer,
    "rnn": RNN,
    "lstm": LSTM,
    "gru": GRU,
    "short_conv": ShortConvolution,
    "retention": Retention,
    "gated_delta": GatedDelta,
    "kimi_delta": KimiDelta,
    "ssd": StateSpace,
    "adaptive_span": AdaptiveSpanAttention,
    "linformer": Linformer,
    "reformer": ReformerAttention,
    "longformer": LongformerAttention,
    "bigbird": BigBirdAttention,
}


def mixers_of(config: FratrieConfig) -> list[type[Mixer]]:
    """The class of each layer's mixer, for what builds models.

    Of a checkpoint that carries its code, the configuration is another copy of these files, and so are the classes
    that `config.mixers` names: an instance of theirs would not know the models' masks and caches.
    """
    return [MIXERS[name] for name in config.mixer_types or []]
