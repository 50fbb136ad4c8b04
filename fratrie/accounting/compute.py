"""Floating-point operations (FLOPs) of a pass, from the shapes of the model's modules.

A multiply-add counts as two; norms, activations, softmax and look-ups count nothing, as in
`torch.utils.flop_counter`. Attention counts the full matrix of scores, as kernels without block skipping compute it,
whether or not a mask hides half of it.

Shapes: B rows, T tokens per row, S tokens per row of the source.
"""

from torch import nn
from transformers import PreTrainedConfig

from ..modeling.attention import CrossAttention
from ..modeling.experts import MixtureOfExperts
from ..modeling.heads import SequenceClassifier
from ..modeling.mixer import Mixer
from ..modeling.stack import FratrieStack
from .parameters import build_on_meta, require_positive


def forward_flops(config: PreTrainedConfig, batch_size: int, length: int, source_length: int | None = None) -> int:
    """FLOPs of one forward pass over full rows, without cache, that scores every position.

    Args:
        config: of the model (see `build_on_meta`).
        batch_size: rows B.
        length: tokens T per row; of the decoder in a seq2seq model; patches and their image token for images.
        source_length: tokens S per row of the encoder in a seq2seq model; `length` by default.

    Raises:
        ValueError: for a mixer that does not say, and for less than one row or token.
    """
    source = length if source_length is None else source_length
    require_positive(batch_size=batch_size, length=length, source_length=source)
    return batch_size * _flops_of_modules(build_on_meta(config), length, source, set())


def _flops_of_modules(model: nn.Module, length: int, source: int, stacks: set[str]) -> int:
    """FLOPs of one row: of the whole model, or only of the layers of the named stacks."""
    pooled = isinstance(model, SequenceClassifier)
    total = 0
    for name, module in model.named_modules():
        if stacks and not any(name.startswith(f"{stack}.layers.".lstrip(".")) for stack in stacks):
            continue
        of_source = "encoder." in name or name.endswith(("cross_attention.k_proj", "cross_attention.v_proj"))
        tokens = source if of_source else length
        if name.startswith("pooler") or (pooled and name.startswith("classifier")):
            tokens = 1
        total += _module_flops(module, tokens, source)
    return total


def training_flops(config: PreTrainedConfig, batch_size: int, length: int, source_length: int | None = None) -> int:
    """FLOPs of the forward and backward pass of a training step, arguments and errors as for `forward_flops`.

    Each product has two gradients of equal cost, so a step is three forward passes, less the gradients that nobody
    asks for (those of pixels). Reversible layers are computed once more. The optimizer is not counted, nor what a
    fused attention kernel computes anew: its backward pass forms the scores a second time, one product more than the
    four of the gradients.

    Equal to what `torch.utils.flop_counter` counts with eager attention. With `"sdpa"` that counter adds the scores
    formed anew on a GPU, and misses all of the attention on a CPU, whose kernel it does not know.
    """
    forward = forward_flops(config, batch_size, length, source_length)
    model = build_on_meta(config)
    unasked = sum(_flops_without_gradient(module, length) for module in model.modules())
    reversible = {
        name for name, stack in model.named_modules() if isinstance(stack, FratrieStack) and stack.config.reversible
    }
    source = length if source_length is None else source_length
    anew = _flops_of_modules(model, length, source, reversible) if reversible else 0
    return 3 * forward + batch_size * (anew - unasked)


def flops_per_token(config: PreTrainedConfig, length: int, training: bool = False) -> float:
    """FLOPs of one token in a row of `length`; of a token of the source and one of the target in a seq2seq model.

    Args:
        config: of the model (see `build_on_meta`).
        length: tokens T per row.
        training: of a training step instead of a forward pass.
    """
    return (training_flops if training else forward_flops)(config, 1, length) / length


def _module_flops(module: nn.Module, tokens: int, source: int) -> int:
    """FLOPs of a module over one row, its submodules left out."""
    match module:
        case nn.Linear():
            return 2 * tokens * module.weight.numel()
        case nn.Conv2d():  # of the patches, before which the image token stands
            return 2 * (tokens - 1) * module.weight.numel()
        case MixtureOfExperts():
            router = module.router
            an_expert = sum(weight.numel() for weight in module.experts.parameters()) // router.num_experts
            return 2 * tokens * (router.weight.numel() + router.top_k * an_expert)
        case CrossAttention():
            return module.score_flops(tokens, source)
        case Mixer():
            return module.flops(tokens)
    return 0


def _flops_without_gradient(module: nn.Module, length: int) -> int:
    """FLOPs of the gradients of a module over one row that no parameter needs: those of the pixels."""
    return _module_flops(module, length, length) if isinstance(module, nn.Conv2d) else 0
