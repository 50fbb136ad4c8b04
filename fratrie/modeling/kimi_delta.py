"""Kimi Delta Attention: Gated DeltaNet with a decay of its own for each channel of a key (Kimi Team 2025).

Shapes: B batch, T tokens, D hidden, H heads of values, C size of a key, V size of a value.
"""

import torch
from torch import nn

from .configuration import FratrieConfig
from .gated_delta import GatedDelta
from .plans import Plan


class KimiDelta(GatedDelta):
    """As its parent, but decays by channel; low-rank maps lead to them and to the output gate, which is a sigmoid."""

    by_channel = True

    def build_gates(self, config: FratrieConfig) -> None:
        """Add the maps to the steps of the decays and to the output gate, by way of the size of a head."""
        size, keys, values = config.hidden_size, self.key_dim, self.value_dim
        self.step_down_proj = nn.Linear(size, keys, bias=False)
        self.step_up_proj = nn.Linear(keys, self.value_heads * keys, bias=False)
        self.gate_down_proj = nn.Linear(size, values, bias=False)
        self.gate_up_proj = nn.Linear(values, self.value_heads * values, bias=False)

    def steps(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The steps of the decays, before their bias: `(B, T, H · C)`."""
        return self.step_up_proj(self.step_down_proj(x_BTD))

    def gate(self, x_BTD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The output gate `(B, T, H · V)`, computed in this dtype."""
        return self.gate_up_proj(self.gate_down_proj(x_BTD)).to(dtype).sigmoid()

    @classmethod
    def tensor_parallel_plan(cls, config: FratrieConfig) -> Plan:
        """The large maps are split (see `GatedDelta.tensor_parallel_plan`)."""
        into = dict.fromkeys(("qkv_proj", "step_up_proj", "gate_up_proj"), "colwise_gather_output")
        whole = dict.fromkeys(("rate_proj", "step_down_proj", "gate_down_proj"), "replicate")
        return into | whole | {"out_proj": "rowwise_split_input"}
