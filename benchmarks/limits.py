"""What the time of a row is made of: its matrix products alone, below which it cannot go, and a profile of all."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCT = re.compile(r"(mm|mv|linear|linear_pointwise)_?$|scaled_dot_product|convolution")


def products_alone(work: Callable[[], object]) -> Callable[[], None]:
    """The matrix products that a call of `work` makes, backward passes included, and nothing else.

    Attention by a kernel that holds its products counts as one. The products are of the tensors that `work` gave them
    (packed weights as well), which are kept for it. Let them take turns with the other candidates of a row.
    """
    with _Products() as products:
        work()
    return partial(_call, products.calls)


class _Products(TorchDispatchMode):
    """Keeps each call of an operator that multiplies matrices, with its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        if _PRODUCT.search(func._schema.name):
            self.calls.append(call)
        return call()


@torch.no_grad()
def _call(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


def profile(work: Callable[[], object], operators: int = 12) -> str:
    """The operators that take most of a call's time, by their own time, as a table of PyTorch's profiler."""
    activities = torch.profiler.supported_activities()
    with torch.profiler.profile(activities=activities) as found:
        work()
    key = "self_cuda_time_total" if torch.profiler.ProfilerActivity.CUDA in activities else "self_cpu_time_total"
    return found.key_averages().table(sort_by=key, row_limit=operators, max_name_column_width=60)
