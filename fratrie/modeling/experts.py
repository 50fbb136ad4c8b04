"""A mixture of experts instead of a feed-forward, and the losses that keep its router balanced.

Shapes: B batch, T positions, N tokens, D hidden, E experts, F width of an expert, P experts per token (top-k), S = N·P
choices, G groups of experts, M experts of a group, L layers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface
from transformers.utils.generic import maybe_autocast

from .configuration import FratrieConfig
from .feed_forward import FeedForward


class Router(nn.Module):
    """Chooses the experts of each token: the `num_experts_per_tok` with the largest weights (Shazeer et al. 2017).

    A bias may guide the choice, and groups of experts narrow it (DeepSeek-AI 2024, equations 12 to 16).
    """

    def __init__(self, config: FratrieConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob, self.norm_eps = config.norm_topk_prob, config.router_norm_eps
        self.scoring = config.router_scoring
        self.num_groups = config.router_num_groups
        self.groups_per_tok = config.router_groups_per_tok
        self.scaling_factor = config.routed_scaling_factor
        self.has_fine_weights = "expert_weights" in (config.float32_parts or ())
        # Rounded to half precision, weights with a selection bias would choose other experts.
        exact = torch.promote_types(torch.float32, torch.get_default_dtype()) if config.router_selection_bias else None
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=exact))
        self.selection_bias: torch.Tensor | None
        bias = torch.zeros(config.num_experts, dtype=exact) if config.router_selection_bias else None
        self.register_buffer("selection_bias", bias)

    def initialise(self, std: float) -> None:
        """Draw the weights, and choose without a bias (see `FratriePreTrainedModel`)."""
        init.normal_(self.weight, mean=0.0, std=std)
        if self.selection_bias is not None:
            init.zeros_(self.selection_bias)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits `(N, E)`, and weights and indices `(N, P)` of the chosen experts."""
        inputs_ND: torch.Tensor = hidden_states
        weight_ED: torch.Tensor = self.weight
        if self.selection_bias is not None:  # as fine as the bias, which decides between nearly equal scores
            inputs_ND = _at_least_float32(inputs_ND)
            weight_ED = weight_ED.to(inputs_ND.dtype)
        logits_NE = nn.functional.linear(inputs_ND, weight_ED)
        scores_NE = _at_least_float32(logits_NE)
        scores_NE = scores_NE.sigmoid() if self.scoring == "sigmoid" else scores_NE.softmax(dim=-1)
        index_NP = self.choose(scores_NE)
        weights_NP = scores_NE.gather(-1, index_NP)
        if self.norm_topk_prob:
            weights_NP = weights_NP / (weights_NP.sum(dim=-1, keepdim=True) + self.norm_eps)
        weights_NP = weights_NP * self.scaling_factor
        return logits_NE, weights_NP if self.has_fine_weights else weights_NP.to(logits_NE.dtype), index_NP

    def choose(self, scores_NE: torch.Tensor) -> torch.Tensor:
        """Indices `(N, P)` of the experts with the largest scores, biased, within the best groups.

        A group is as good as its two best experts.
        """
        if self.selection_bias is not None:
            scores_NE = scores_NE + self.selection_bias
        if self.groups_per_tok < self.num_groups:
            scores_NGM = scores_NE.unflatten(-1, (self.num_groups, -1))
            best_NG = scores_NGM.topk(2, dim=-1).values.sum(dim=-1).topk(self.groups_per_tok, dim=-1).indices
            outside_NG = torch.ones_like(scores_NGM[..., 0], dtype=torch.bool).scatter(-1, best_NG, False)
            scores_NE = scores_NGM.masked_fill(outside_NG[..., None], -torch.inf).flatten(-2)
        return scores_NE.topk(self.top_k, dim=-1).indices


def _uses_grouped_kernel(config: FratrieConfig, tokens: torch.Tensor) -> bool:
    """Whether experts are computed by the grouped kernel, the default; on a CPU the loop is as fast, or faster.

    A graph cannot hold the loop, which depends on the number of tokens of each expert.
    """
    in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return config._experts_implementation == "grouped_mm" and (in_graph or tokens.device.type != "cpu")


class _ExpertsByDevice(ExpertsInterface):
    """Hugging Face's implementations, but for the grouped kernel where `_uses_grouped_kernel` says no."""

    def get_interface(self, experts_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """Return the implementation of this name, to be called with the experts and the arguments of `forward`."""
        implementation = ALL_EXPERTS_FUNCTIONS.get_interface(experts_implementation, default)
        if experts_implementation != "grouped_mm":
            return implementation

        def run(experts: "_Experts", tokens_ND: torch.Tensor, *routing: torch.Tensor, **named: torch.Tensor) -> Any:
            chosen = implementation if _uses_grouped_kernel(experts.config, tokens_ND) else default
            return chosen(experts, tokens_ND, *routing, **named)

        return run


_BY_DEVICE = _ExpertsByDevice()


class _Experts(nn.Module):
    """Weights of all experts as Hugging Face's experts interface expects them, and the loop over them (`"eager"`)."""

    config: FratrieConfig
    input_proj: str  # the parameter that leads into the experts

    def __init__(self, config: FratrieConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size or config.intermediate_size
        self.act_fn = ACT2FN[config.hidden_act]
        rows = self.intermediate_dim * (2 if self.input_proj == "gate_up_proj" else 1)
        setattr(self, self.input_proj, nn.Parameter(torch.empty(self.num_experts, rows, self.hidden_dim)))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))

    def initialise(self, std: float) -> None:
        """Draw the weights (see `FratriePreTrainedModel`)."""
        for weight in self.parameters(recurse=False):
            init.normal_(weight, mean=0.0, std=std)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Send tokens `(N, D)` through their experts `(N, P)` and add the results with their weights: `(N, D)`.

        The tokens are sorted by expert, so that each expert has a slice of them.
        """
        # Expert parallelism marks another rank's tokens by an index of E or more.
        index_S = top_k_index.flatten().clamp(max=self.num_experts)
        order_S = index_S.argsort(stable=True)
        *counts, others = index_S.bincount(minlength=self.num_experts + 1).tolist()
        tokens_ND = hidden_states.to(_autocast_dtype(hidden_states) or hidden_states.dtype)
        *rows, other_rows = tokens_ND.index_select(0, order_S // top_k_index.shape[1]).split([*counts, others])
        # Unbound, since each slice of a parameter would bring a gradient of the whole.
        weights = zip(getattr(self, self.input_proj).unbind(), self.down_proj.unbind(), strict=True)
        mixed = [
            nn.functional.linear(self.activate(nn.functional.linear(inputs, input_weight)), output_weight)
            for inputs, (input_weight, output_weight) in zip(rows, weights, strict=True)
            if len(inputs)
        ]
        mixed_SD = torch.cat([*mixed, torch.zeros_like(other_rows)]).index_select(0, order_S.argsort())
        mixed_NPD = mixed_SD.view(*top_k_index.shape, self.hidden_dim) * top_k_weights[..., None]
        return mixed_NPD.sum(dim=1).to(hidden_states.dtype)

    def activate(self, projected: torch.Tensor) -> torch.Tensor:
        """The activation between the two projections of an expert."""
        return self.act_fn(projected)


@use_experts_implementation(experts_interface=_BY_DEVICE, has_gate=False)
class PlainExperts(_Experts):
    """Experts `down(act(up(x)))`."""

    input_proj = "up_proj"

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See the base class; the decorator chooses the implementation."""
        return super().forward(hidden_states, top_k_index, top_k_weights)


@use_experts_implementation(experts_interface=_BY_DEVICE)
class GatedExperts(_Experts):
    """Experts `down(act(gate(x)) * up(x))`; gate and up lie in one matrix."""

    input_proj = "gate_up_proj"

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See the base class; the decorator chooses the implementation."""
        return super().forward(hidden_states, top_k_index, top_k_weights)

    def activate(self, projected: torch.Tensor) -> torch.Tensor:
        """Gate: the activation of the first half times the second."""
        gate, up = projected.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class MixtureOfExperts(nn.Module):
    """Each token passes the experts that the router chooses, and the shared ones if there are any."""

    def __init__(self, config: FratrieConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config)
        self.experts = (GatedExperts if config.gated_feed_forward else PlainExperts)(config)
        width = config.shared_experts_width
        self.shared_experts = FeedForward(config, width) if width else None
        self.shared_experts_gate = nn.Linear(config.hidden_size, 1, bias=False) if config.shared_experts_gate else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map `(…, D)` to `(…, D)`."""
        tokens_ND = hidden_states.flatten(0, -2)
        _, weights_NP, index_NP = self.router(tokens_ND)
        outputs_ND = self._run_experts(tokens_ND, index_NP, weights_NP)
        if self.shared_experts is not None:
            shared_ND = self.shared_experts(tokens_ND)
            if self.shared_experts_gate is not None:
                shared_ND = self.shared_experts_gate(tokens_ND).sigmoid() * shared_ND
            outputs_ND = outputs_ND + shared_ND
        return outputs_ND.view_as(hidden_states)

    def _run_experts(self, tokens_ND: torch.Tensor, index_NP: torch.Tensor, weights_NP: torch.Tensor) -> torch.Tensor:
        """Call the experts; autocast does not know the grouped kernel, which would compute in the weights' dtype."""
        dtype = _autocast_dtype(tokens_ND)
        if dtype is None or not _uses_grouped_kernel(self.config, tokens_ND):
            return self.experts(tokens_ND, index_NP, weights_NP)
        cast = {name: weight.to(dtype) for name, weight in self.experts.named_parameters()}
        with maybe_autocast(tokens_ND.device.type, enabled=False):
            return functional_call(self.experts, cast, (tokens_ND.to(dtype), index_NP, weights_NP)).to(tokens_ND.dtype)


def load_balancing_loss(
    router_logits: tuple[torch.Tensor, ...],
    top_k: int,
    attention_mask: torch.Tensor | None = None,
    scope: str = "layer",
) -> torch.Tensor:
    """How unevenly the experts are used (Fedus et al. 2021, equations 4 to 6).

    E · Σ (share of the choices that fell on an expert) · (its mean probability): 1 when both are uniform, E when one
    expert takes everything.

    Args:
        router_logits: `(N, E)` per layer.
        top_k: experts per token.
        attention_mask: `(B, T)` with B · T = N; padding does not count.
        scope: over the tokens of each `"layer"`, of which the mean is taken; or of all of the `"model"` at once.
    """
    shares, means = [], []
    for logits_NE in router_logits:
        probabilities_NE = _at_least_float32(logits_NE).softmax(dim=-1)
        choices_NP = probabilities_NE.topk(top_k, dim=-1).indices
        chosen_NE = nn.functional.one_hot(choices_NP, logits_NE.shape[-1]).sum(dim=1).to(probabilities_NE.dtype)
        shares.append(_mean_over_tokens(chosen_NE, attention_mask) / top_k)
        means.append(_mean_over_tokens(probabilities_NE, attention_mask))
    share_LE, mean_LE = torch.stack(shares), torch.stack(means)
    if scope == "model":
        share_LE, mean_LE = share_LE.mean(dim=0, keepdim=True), mean_LE.mean(dim=0, keepdim=True)
    return share_LE.shape[-1] * (share_LE * mean_LE).sum(dim=-1).mean()


def router_z_loss(router_logits: tuple[torch.Tensor, ...], attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Mean of the squared log-sum-exp of the router's logits, which keeps them small (Zoph et al. 2022, equation 5).

    Arguments as for `load_balancing_loss`.
    """
    losses = [
        _mean_over_tokens(_at_least_float32(logits_NE).logsumexp(dim=-1).square(), attention_mask)
        for logits_NE in router_logits
    ]
    return torch.stack(losses).mean()


class RouterLosses(NamedTuple):
    """The losses of the routers of a pass, before their weights; `None` without sparse layers."""

    balance: torch.Tensor | None = None
    z: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        config: FratrieConfig,
        router_logits: tuple[torch.Tensor, ...] | None,
        attention_mask: torch.Tensor | None,
    ) -> "RouterLosses":
        """Compute both over the real tokens.

        Args:
            config: of the stack.
            router_logits: `(B · T, E)` per sparse layer.
            attention_mask: padding `(B, past + T)`, zero there; in another form it says nothing of tokens.
        """
        if not router_logits:
            return cls()
        mask = None
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            mask = attention_mask[:, -(router_logits[0].shape[0] // attention_mask.shape[0]) :]  # without the past
        balance = load_balancing_loss(router_logits, config.num_experts_per_tok, mask, config.router_aux_loss_scope)
        return cls(balance, router_z_loss(router_logits, mask))

    def add_to(
        self, loss: torch.Tensor | None, config: FratrieConfig, share: torch.Tensor | float
    ) -> torch.Tensor | None:
        """Add the weighted losses to that of a head, `share` of them (see `losses.share_of_batch`)."""
        if loss is None or self.balance is None or self.z is None:
            return loss
        assert config.router_aux_loss_coef is not None
        extra = config.router_aux_loss_coef * self.balance + config.router_z_loss_coef * self.z
        return loss + (share * extra).to(loss.device)


def needs_router_logits(config: FratrieConfig, is_training: bool, requested: bool | None) -> bool:
    """Whether a pass has to record the routers of a stack: they were asked for, or are part of the training loss."""
    requested = config.output_router_logits if requested is None else requested
    return "sparse" in (config.mlp_layer_types or []) and (requested or is_training)


def _at_least_float32(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(torch.promote_types(torch.float32, numbers.dtype))


def _autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype in which autocast multiplies such a tensor, `None` where it leaves it as it is."""
    device = x.device.type
    is_enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_enabled and x.dtype != torch.float64 else None


def _mean_over_tokens(values_N: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Mean over the first dimension, real tokens alone; weighed, since a compiled graph cannot select them."""
    if attention_mask is None:
        return values_N.mean(dim=0)
    real_N = attention_mask.flatten().to(values_N.dtype)
    return torch.tensordot(real_N, values_N, dims=1) / real_N.sum().clamp_min(1)
