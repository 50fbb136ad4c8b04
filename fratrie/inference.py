"""Linear maps laid out once for the matrix products of a CPU, in fewer bits if asked for.

Labelling and writing spend most of their time in linear maps, and a CPU spends much of that on reading weights and on
laying them out anew for every product.

Shapes: N tokens, I inputs, O outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeVar, cast, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from .modeling.linear_maps import Joined, has_more_to_its_call

Precision = Literal["float32", "bfloat16", "int8", "int8_weights"]
Product = Callable[[torch.Tensor], torch.Tensor]
Model = TypeVar("Model", bound=PreTrainedModel)

TOKENS_AT_ONCE = 256  # up to so many, what integers are rounded from and to stays in a processor's cache
FEW_TOKENS = 8  # up to so many, weights are read as they are; of more, they are first laid out in another dtype


def pack(model: Model, precision: Precision = "float32") -> Model:
    """Replace the linear layers of a model on a CPU, in place, by packed ones: it can no longer learn or be saved.

    Layers that read the same input become one product where a module says which do (`joint_maps`, see `Mixer`), as
    ours say. Only the products are in another precision; norms, attention, residuals and caches stay in that of the
    model. What does more than a product stays as it is: experts, other kinds of layers, and linear ones with hooks.

    Args:
        model: any Hugging Face model, from then on in `eval` mode and without gradients.
        precision: of the products. `"int8"` rounds the weights of each output, and the inputs of each token, to 8
            bits (Dettmers et al. 2022, section 2), so that a text gets the same in a batch and alone. `"int8_weights"`
            rounds the weights alone and multiplies them with inputs in bfloat16: for writing one text or a few.

    Returns:
        The same model.

    Raises:
        ValueError: for another precision, a model that is packed already, is not on a CPU or has no linear layers, and
            for `"bfloat16"` and `"int8_weights"`, a processor without products of bfloat16.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision={precision!r}: choose from {', '.join(map(repr, get_args(Precision)))}.")
    devices = {weight.device.type for weight in model.parameters()}
    if devices != {"cpu"}:
        raise ValueError(
            f"The weights are on {', '.join(sorted(devices))}: packed layers are for a CPU; elsewhere load the model "
            "with dtype='bfloat16' or a quantization_config."
        )
    if precision in ("bfloat16", "int8_weights") and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise ValueError("This processor has no products of bfloat16: use precision='float32' or 'int8'.")
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        raise ValueError(f"This {type(model).__name__} is packed already: load it anew for another precision.")
    found = [(module, names) for module in model.modules() for names in _maps_by_input(module)]
    if not found:
        raise ValueError(f"This {type(model).__name__} has no linear layers to pack.")
    for module, names in found:
        packed = _pack_jointly([getattr(module, name) for name in names], precision)
        for name, layer in zip(names, packed, strict=True):
            setattr(module, name, layer)
    setattr(model, "save_pretrained", _refuse_to_save)  # noqa: B010 (before anything is written)
    return model.eval().requires_grad_(False)


def place(model: Model, device: torch.device, precision: Precision | None = None) -> Model:
    """Move a model to the device that is to run it, its linear layers packed on a CPU where a precision is asked for.

    Args:
        model: any Hugging Face model.
        device: of the run.
        precision: in `"bfloat16"` the whole model is, with those of 8 bits the products alone; by default as the
            weights are.

    Raises:
        ValueError: as `pack`, and for a precision of 8 bits on another device than a CPU.
    """
    if precision in ("int8", "int8_weights") and device.type != "cpu":
        raise ValueError(f"precision={precision!r} is for a CPU, not for {device}: use 'bfloat16'.")
    model = cast(Any, model).to(device)
    if precision in ("float32", "bfloat16"):
        model = cast(Any, model).to(getattr(torch, precision))
    return pack(model, precision) if precision and device.type == "cpu" else model


def _maps_by_input(module: nn.Module) -> list[tuple[str, ...]]:
    """The names of a module's linear layers, those together that are to become one product."""
    layers = {
        name: layer
        for name, layer in module.named_children()
        if type(layer) is nn.Linear and not has_more_to_its_call(layer)
    }
    joint = []
    for names in getattr(module, "joint_maps", ()):
        if layers.keys() >= set(names):
            joint.append(names)
            layers = {name: layer for name, layer in layers.items() if name not in names}
    return [*joint, *((name,) for name in layers)]


def _pack_jointly(linears: Sequence[nn.Linear], precision: Precision) -> list["PackedLinear"]:
    """Pack layers that read the same input: each can compute its part, and carries what computes all at once."""
    if len(linears) == 1:
        return [PackedLinear(linears[0], _product(linears[0].weight, linears[0].bias, precision), precision)]
    weight = torch.cat([linear.weight for linear in linears])
    biases: list[torch.Tensor] = [
        each.weight.new_zeros(each.out_features) if each.bias is None else each.bias for each in linears
    ]
    bias = None if all(each.bias is None for each in linears) else torch.cat(biases)
    product, sizes = _product(weight, bias, precision), [linear.out_features for linear in linears]

    def joined(x: torch.Tensor) -> Sequence[torch.Tensor]:
        return product(x).to(x.dtype).split(sizes, dim=-1)

    def part(place: int) -> Product:
        return lambda x: joined(x)[place]

    packed = [PackedLinear(linear, part(place), precision) for place, linear in enumerate(linears)]
    for layer in packed:
        layer.joined = joined
    return packed


class PackedLinear(nn.Module):
    """`x Wᵀ + b` by a packed weight, in the dtype of `x`.

    Attributes:
        joined: what computes this layer and others that read its input at once (see `apply_jointly`).
    """

    joined: Joined

    def __init__(self, linear: nn.Linear, product: Product, precision: Precision) -> None:
        super().__init__()
        self.in_features, self.out_features, self.precision = linear.in_features, linear.out_features, precision
        self.weight = linear.weight.detach().to("meta")  # models ask for its shape and dtype
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(…, I)` to `(…, O)`, without a gradient.

        Raises:
            ValueError: in training.
        """
        if self.training:
            raise ValueError("A packed model cannot learn: train the model that it was made from.")
        return self.product(x).to(x.dtype)

    def extra_repr(self) -> str:
        """Sizes and precision, as `print(model)` shows them."""
        return f"in_features={self.in_features}, out_features={self.out_features}, precision={self.precision!r}"

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        _refuse_to_save()


def _refuse_to_save(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError("A packed model cannot be saved: save the model that it was made from.")


@torch.no_grad()
def _product(weight_OI: torch.Tensor, bias_O: torch.Tensor | None, precision: Precision) -> Product:
    if precision == "int8":
        return _integer_product(weight_OI, bias_O)
    if precision == "int8_weights":
        return _product_of_integer_weights(weight_OI, bias_O)
    return _float_product(weight_OI, bias_O, getattr(torch, precision))


def _float_product(weight_OI: torch.Tensor, bias_O: torch.Tensor | None, dtype: torch.dtype) -> Product:
    """A product in `dtype`, its weight in oneDNN's layout, as compiled graphs have it."""
    weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI.to(dtype))
    bias = None if bias_O is None else bias_O.to(dtype)

    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x.to(dtype), weight, bias, "none", [], "")

    return product


def _integer_product(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Product:
    """A product of integers, with sums in 32 bits."""
    weight_OI, scales_O1 = _rounded(weight_OI.float())
    weight_IO, scales_O = weight_OI.T, scales_O1.flatten()
    bias = torch.zeros_like(scales_O) if bias_O is None else bias_O.float()

    def outputs(x_NI: torch.Tensor) -> torch.Tensor:
        tokens_NI, scales_N1 = _rounded(x_NI.float())
        return torch.addcmul(bias, torch._int_mm(tokens_NI, weight_IO).float().mul_(scales_N1), scales_O)

    def product(x: torch.Tensor) -> torch.Tensor:
        x_NI = x.reshape(-1, x.shape[-1]).contiguous()  # of another layout, torch leaves a last single row unwritten
        if len(x_NI) <= TOKENS_AT_ONCE:
            y_NO = outputs(x_NI)
        else:
            y_NO = x.new_empty(len(x_NI), len(scales_O))
            for some_x, some_y in zip(x_NI.split(TOKENS_AT_ONCE), y_NO.split(TOKENS_AT_ONCE), strict=True):
                some_y.copy_(outputs(some_x))
        return y_NO.view(*x.shape[:-1], len(scales_O))

    return product


def _product_of_integer_weights(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Product:
    """A product of bfloat16 and integers, each output scaled after."""
    dtype = torch.bfloat16
    bias = None if bias_O is None else bias_O.to(dtype)
    weight, scales_O1 = _rounded(weight_OI.float())
    scales = scales_O1.flatten().to(dtype)
    few = FEW_TOKENS if weight.shape[1] % 16 == 0 else 0  # torch reads 16 inputs at once, past the end of others

    def product(x: torch.Tensor) -> torch.Tensor:
        x_NI = x.reshape(-1, x.shape[-1]).to(dtype).contiguous()
        if len(x_NI) <= few:
            y_NO = torch._weight_int8pack_mm(x_NI, weight, scales)
        else:
            y_NO = nn.functional.linear(x_NI, weight.to(dtype)).mul_(scales)
        return (y_NO if bias is None else y_NO.add_(bias)).view(*x.shape[:-1], len(scales))

    return product


def _rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `(N, I)` as integers of 8 bits, and the size of their steps `(N, 1)`."""
    largest, tiny = torch.iinfo(torch.int8).max, torch.finfo(rows.dtype).tiny
    scales_N1 = rows.abs().amax(dim=1, keepdim=True).div_(largest).clamp_min_(tiny)
    return (rows / scales_N1).round_().to(torch.int8), scales_N1
