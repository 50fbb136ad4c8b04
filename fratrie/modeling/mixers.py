"""The registry of mixers: what a layer type of the configuration stands for."""

from transformers import PreTrainedConfig

from .attention import Mixer, SoftmaxAttention
from .latent_attention import LatentAttention
from .linear_attention import LinearAttention

MIXERS: dict[str, type[Mixer]] = {
    "full_attention": SoftmaxAttention,
    "sliding_attention": SoftmaxAttention,
    "linear_attention": LinearAttention,
}


def mixer_class(config: PreTrainedConfig, layer_type: str) -> type[Mixer]:
    """The mixer of a layer: that of its type, whose full attention may keep its keys and values as latents."""
    latent = config.kv_lora_rank is not None and layer_type == "full_attention"
    return LatentAttention if latent else MIXERS[layer_type]
