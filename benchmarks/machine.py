"""What a table of speeds was measured on: processor, versions, and the limits that no model can pass."""

import platform
import re
from pathlib import Path

import torch
import transformers

from .timing import device, times

DTYPES = (torch.float32, torch.bfloat16)
_SIDE = 2048
_BYTES = 1 << 28  # far above any cache


def describe() -> list[str]:
    """The lines that stand above the table: machine, versions, and the rates of its arithmetic and memory."""
    where = device()
    rates = ", ".join(f"{str(dtype).removeprefix('torch.')} {gemm_rate(dtype):.0f}" for dtype in DTYPES)
    return [
        f"- {_name(where)}, {torch.get_num_threads()} threads",
        f"- Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}",
        f"- matrices of {_SIDE}: {rates} GFLOP/s; memory {bandwidth():.0f} GB/s",
    ]


def gemm_rate(dtype: torch.dtype, rounds: int = 5) -> float:
    """GFLOP/s of a product of two square matrices."""
    left, right = (torch.rand(_SIDE, _SIDE, device=device()).to(dtype) for _ in range(2))
    return 2e-9 * _SIDE**3 / times({"product": lambda: left @ right}, rounds)["product"]


def bandwidth(rounds: int = 5) -> float:
    """GB/s read from memory and written to it by a copy."""
    source = torch.zeros(_BYTES, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return 2e-9 * _BYTES / times({"copy": lambda: target.copy_(source)}, rounds)["copy"]


def _name(where: torch.device) -> str:
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    file = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.+)", file.read_text()) if file.exists() else None
    return match[1] if match else platform.processor() or platform.machine()
