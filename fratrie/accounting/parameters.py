"""Parameters by role and by layer, read from a model on the meta device."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import cast

import torch
from transformers import PreTrainedConfig

from ..modeling import decoder, encoder, seq2seq
from ..modeling.experts import Router
from ..modeling.pretrained import FratriePreTrainedModel

OTHER_MIXERS = "other parts of mixers"
# Every parameter has exactly one role: the pattern that its whole name matches. Matrices come first, in the order of
# the published tables; `SMALL_ROLES` are what those leave out.
ROLES = {
    "token embedding": r".*embed_tokens\.weight",
    "patch embedding": r".*embed_tokens\.projection\.weight",
    "unembedding": r"lm_head\.weight",
    "query": r".*\.mixer\.q(_down|_up)?_proj\.weight",
    "latent key and value": r".*\.mixer\.kv_(down|up)_proj\.weight",
    "key": r".*\.mixer\.k_proj\.weight",
    "value": r".*\.mixer\.v_proj\.weight",
    "attention output": r".*\.mixer\.o_proj\.weight",
    "cross-attention query": r".*\.cross_attention\.q_proj\.weight",
    "cross-attention key": r".*\.cross_attention\.k_proj\.weight",
    "cross-attention value": r".*\.cross_attention\.v_proj\.weight",
    "cross-attention output": r".*\.cross_attention\.o_proj\.weight",
    "gate projection": r".*\.feed_forward\.gate_proj\.weight",
    "up projection": r".*\.feed_forward\.up_proj\.weight",
    "down projection": r".*\.feed_forward\.down_proj\.weight",
    "router": r".*\.router\.weight",
    "experts' gate and up projection": r".*\.experts\.gate_up_proj",
    "experts' up projection": r".*\.experts\.up_proj",
    "experts' down projection": r".*\.experts\.down_proj",
    "shared experts": r".*\.(shared_experts\.\w+|shared_experts_gate)\.weight",
    "head": r"(head_dense|pooler\.dense|classifier\.(dense\.\d+|out_proj))\.weight",
    "position embedding": r".*embed_positions\.(rows\.|columns\.)?weight",
    OTHER_MIXERS: r"(?!)",  # what no line above names
    "token type embedding": r".*embed_token_types\.weight",
    "image token": r".*embed_tokens\.image_token",
    "position bias": r".*position_bias\.table\.weight",
    "biases": r"(?!.*norms?(\.\d+)?\.bias).*\.bias",
    "norms": r".*norms?(\.\d+)?\.(weight|bias)",
}
SMALL_ROLES = frozenset(list(ROLES)[list(ROLES).index("position embedding") :])
_LM_CLASSES: dict[str, type[FratriePreTrainedModel]] = {
    "fratrie_encoder": encoder.FratrieEncoderForMaskedLM,
    "fratrie_decoder": decoder.FratrieDecoderForCausalLM,
    "fratrie_seq2seq": seq2seq.FratrieSeq2SeqForConditionalGeneration,
}


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters; tied weights count once.

    Args:
        counts: by place (`"layers.0"`, `"encoder.layers.0"`, else `""`) and role.
        active: parameters that take part in the pass of one token: of the experts only those it is sent to.
    """

    counts: dict[tuple[str, str], int]
    active: int

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.counts.values())

    @property
    def by_role(self) -> dict[str, int]:
        """By role, in the order of `ROLES`, without empty ones."""
        totals = self._sum(1)
        return {role: totals[role] for role in ROLES if role in totals}

    @property
    def by_layer(self) -> dict[str, int]:
        """By layer; `""` holds what lies outside of the layers."""
        return self._sum(0)

    def _sum(self, part: int) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for key, count in self.counts.items():
            totals[key[part]] += count
        return dict(totals)


def build_on_meta(config: PreTrainedConfig) -> FratriePreTrainedModel:
    """Build the model of `config` without weights: the class that `architectures` names, else the language model.

    Raises:
        ValueError: for a configuration that is none of the siblings', or an unknown class.
    """
    if config.model_type not in _LM_CLASSES:
        raise ValueError(
            f"model_type={config.model_type!r} is none of {', '.join(_LM_CLASSES)}: make it one with fratrie convert."
        )
    model_class = _LM_CLASSES[config.model_type]
    for name in (config.architectures or [])[:1]:
        classes = {known.__name__: known for known in _subclasses(FratriePreTrainedModel)}
        if name not in classes:
            raise ValueError(f"architectures={config.architectures}: use one of {', '.join(sorted(classes))}.")
        model_class = classes[name]
    with torch.device("meta"):
        return model_class(config)


def count_parameters(config: PreTrainedConfig) -> Parameters:
    """Count the parameters of the model of `config` (see `build_on_meta`)."""
    model = build_on_meta(config)
    counts: Counter[tuple[str, str]] = Counter()
    idle = 0
    for name, parameter in model.named_parameters():
        roles = [role for role, pattern in ROLES.items() if re.fullmatch(pattern, name)]
        if not roles and ".mixer." in name:
            roles = [OTHER_MIXERS]
        assert len(roles) == 1, (name, roles)
        place = re.search(r"(?:(?:encoder|decoder)\.)?layers\.\d+", name)
        counts[place.group() if place else "", roles[0]] += parameter.numel()
        if roles[0].startswith("experts'"):
            router = cast(Router, model.get_submodule(name.rsplit(".", 2)[0] + ".router"))
            idle += parameter.numel() // router.num_experts * (router.num_experts - router.top_k)
    return Parameters(dict(counts), sum(counts.values()) - idle)


def require_positive(**sizes: int) -> None:
    """Raise a `ValueError` that names a size below one."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1.")


def _subclasses(parent: type[FratriePreTrainedModel]) -> list[type[FratriePreTrainedModel]]:
    return [child for direct in parent.__subclasses__() for child in (direct, *_subclasses(direct))]
