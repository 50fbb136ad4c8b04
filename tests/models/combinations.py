"""The configurations that the model tests build, run, train, save, reload and generate from.

`python tests/models/combinations.py` prints them as a markdown table.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from built import copy_of
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

import fratrie
from fratrie import norm_slots
from fratrie.modeling.attention import SoftmaxAttention

ENCODER, DECODER, SEQ2SEQ = SIBLINGS = ("encoder", "decoder", "seq2seq")
IMAGE = "image"  # the encoder with patches in the place of tokens: a sibling of its own in these tests

# Sizes that differ from one another wherever they can, so that no mixed-up dimension passes.
SIZES = {
    "vocab_size": 71,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BIASES_OFF = {
    "feed_forward_bias": False,
    "attention_bias": False,
    "attention_output_bias": False,
    "norm_bias": False,
}
NO_NORMS = {
    "mixer_input_norm": None,
    "mixer_output_norm": None,
    "feed_forward_input_norm": None,
    "feed_forward_output_norm": None,
    "norm_after_residual": False,
    "embedding_norm": None,
    "final_norm": None,
}
LLAMA = {
    **norm_slots("pre", "rms_norm"),
    **BIASES_OFF,
    "position_type": "rotary",
    "hidden_act": "silu",
    "gated_feed_forward": True,
    "tie_word_embeddings": False,
}
VIT = {
    **norm_slots("pre"),
    "embedding_norm": None,
    "patch_size": 4,
    "image_size": 12,
    "num_channels": 3,
    "max_position_embeddings": 10,  # nine patches and the vector that stands for the image
    "classifier_pooling": "first",
    "num_labels": 5,
}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True)
class Combination:
    """A configuration with a name: what it sets beyond a sibling's defaults."""

    name: str
    description: str
    fields: dict[str, Any] = field(hash=False)
    siblings: tuple[str, ...] = SIBLINGS


COMBINATIONS = (
    Combination("default", "the layouts of BERT, GPT-2 and Vaswani et al.", {}),
    Combination("pre_norm", "LayerNorm before each branch, learned positions",
                {**norm_slots("pre"), "position_type": "learned"}, (ENCODER, SEQ2SEQ)),
    Combination("sinusoidal_scaled", "sinusoidal positions, scaled and normed embeddings",
                {"position_type": "sinusoidal", "scale_embeddings": True, "embedding_norm": "layer_norm"}),
    Combination("llama", "rotary, RMSNorm before each branch, SwiGLU, grouped heads, no biases, untied",
                {**LLAMA, "num_key_value_heads": 2}),
    Combination("rotary_scaled", "YaRN-scaled rotary positions on half of each head",
                {"position_type": "rotary",
                 "rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0,
                                     "original_max_position_embeddings": 10, "partial_rotary_factor": 0.5}}),
    Combination("rotary_by_layer_type", "rotary positions of another base in sliding layers, neighbours as pairs",
                {"position_type": "rotary", "rope_interleaved": True, "layer_types": [SLIDING, FULL],
                 "sliding_window": 4,
                 "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 100.0},
                                     FULL: {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}}}),
    Combination("modernbert", "first block without norm, rotary by layer type, GeGLU, no biases, SiLU in the head",
                {**norm_slots("pre"), **BIASES_OFF, "embedding_norm": "layer_norm", "first_input_norm": False,
                 "layer_types": [FULL, SLIDING], "sliding_window": 3, "position_type": "rotary",
                 "rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 5000.0},
                                     SLIDING: {"rope_type": "default", "rope_theta": 100.0}},
                 "gated_feed_forward": True, "head_bias": False, "head_activation": "silu",
                 "lm_head_bias": False}, (ENCODER,)),
    Combination("roberta", "learned positions behind two rows that belong to none",
                {"position_type": "learned", "position_offset": 2}),
    Combination("t5", "relative position buckets, RMSNorm, no biases, unscaled scores",
                {**norm_slots("pre", "rms_norm"), **BIASES_OFF, "position_type": "relative", "hidden_act": "relu",
                 "relative_num_buckets": 8, "relative_max_distance": 12, "attention_scale": 1.0}),
    Combination("alibi", "ALiBi with six heads, which together are wider than the model",
                {"position_type": "alibi", "num_attention_heads": 6, "head_dim": 8}),
    Combination("no_positions", "no positions at all", {"position_type": "none"}),
    Combination("sandwich", "norm before and after each branch",
                {**norm_slots("sandwich"), "position_type": "rotary"}),
    Combination("no_norms", "every norm slot empty", NO_NORMS),
    Combination("mixed_slots", "both kinds of norm, in some slots; some biases",
                {**NO_NORMS, "mixer_input_norm": "rms_norm", "feed_forward_output_norm": "layer_norm",
                 "final_norm": "rms_norm", "attention_bias": False, "feed_forward_bias": False}),
    Combination("post_norm_rms", "RMSNorm after each sum and after the embeddings",
                {**norm_slots("post", "rms_norm"), "embedding_norm": "rms_norm"}),
    Combination("query_key_norm", "RMSNorm on query and key heads, rotary positions",
                {"query_key_norm": "rms_norm", "position_type": "rotary"}),
    Combination("query_key_layer_norm", "LayerNorm without bias on query and key heads",
                {"query_key_norm": "layer_norm", "norm_bias": False}),
    Combination("multi_query", "one key-value head, scores scaled by a chosen factor",
                {"num_key_value_heads": 1, "attention_scale": 0.5}),
    Combination("grouped_wide_heads", "two key-value heads, head size of its own, rotary",
                {"num_key_value_heads": 2, "head_dim": 16, "position_type": "rotary"}),
    Combination("untied", "output layer of its own", {"tie_word_embeddings": False}),
    Combination("geglu", "feed-forward gated by GELU", {"gated_feed_forward": True}),
    Combination("biases_off", "no biases", BIASES_OFF),
    Combination("sliding", "sliding window in every layer, rotary",
                {"layer_types": [SLIDING, SLIDING], "sliding_window": 4, "position_type": "rotary"}),
    Combination("sliding_full", "sliding, then full attention; learned positions",
                {"layer_types": [SLIDING, FULL], "sliding_window": 3, "position_type": "learned"}),
    Combination("sliding_relative", "full, then sliding attention, with relative position buckets",
                {"layer_types": [FULL, SLIDING], "sliding_window": 3, "position_type": "relative",
                 "relative_num_buckets": 8, "relative_max_distance": 12}),
    Combination("sliding_alibi", "sliding window in every layer, ALiBi, grouped heads",
                {"layer_types": [SLIDING, SLIDING], "sliding_window": 4, "position_type": "alibi",
                 "num_key_value_heads": 2}),
    Combination("linear", "linear attention in every layer, short chunks, rotary",
                {"layer_types": [LINEAR, LINEAR], "linear_chunk_size": 4, "position_type": "rotary"}),
    Combination("linear_no_positions", "linear attention, one key-value head, no positions",
                {"layer_types": [LINEAR, LINEAR], "linear_chunk_size": 3, "position_type": "none",
                 "num_key_value_heads": 1}),
    Combination("linear_full", "linear, then full attention; learned positions",
                {"layer_types": [LINEAR, FULL], "position_type": "learned"}),
    Combination("all_mixers", "sliding, linear and full attention, grouped heads, query-key norm, output gates",
                {"num_hidden_layers": 3, "layer_types": [SLIDING, LINEAR, FULL], "sliding_window": 3,
                 "linear_chunk_size": 4, "num_key_value_heads": 2, "query_key_norm": "rms_norm_plus_one",
                 "attention_output_gate": True,
                 "position_type": "rotary"}),
    Combination("mixtral", "llama with four gated experts, two a token", {**LLAMA, "num_experts": 4}),
    Combination("shared_experts", "dense, then sparse layer; plain and gated shared experts; z loss; router logits",
                {"mlp_layer_types": ["dense", "sparse"], "num_experts": 4, "num_shared_experts": 1,
                 "shared_expert_intermediate_size": 20, "shared_experts_gate": True, "moe_intermediate_size": 24,
                 "norm_topk_prob": False, "router_z_loss_coef": 0.01,
                 "output_router_logits": True}),
    Combination("deepseek_router", "llama whose router scores by sigmoids, biased, within the best groups of experts",
                {**LLAMA, "num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 1,
                 "moe_intermediate_size": 24, "router_scoring": "sigmoid", "router_selection_bias": True,
                 "router_num_groups": 3, "router_groups_per_tok": 2, "routed_scaling_factor": 2.5}),
    Combination("latent", "keys and values kept as latents, interleaved rotary positions",
                {"position_type": "rotary", "rope_interleaved": True, "kv_lora_rank": 10, "q_lora_rank": 12,
                 "qk_nope_head_dim": 6, "v_head_dim": 5}),
    Combination("reformer", "attention by hashing in reversible layers, axial positions",
                {**norm_slots("pre"), "mixer_types": ["reformer", "reformer"], "reformer_num_buckets": 4,
                 "reformer_window": 3, "reversible": True, "position_type": "axial"}, (DECODER,)),
    Combination("odd_experts_linear", "one expert a token, of a size that no grouped kernel takes; linear attention",
                {"num_experts": 3, "num_experts_per_tok": 1, "intermediate_size": 18,
                 "layer_types": [FULL, LINEAR]}),
    Combination("recurrent", "an LSTM, then attention by random features; no positions",
                {"mixer_types": ["lstm", "performer"], "position_type": "none", "linear_chunk_size": 4}),
    Combination("hybrid", "short convolution, state space, gated delta rule, then softmax attention; rotary",
                {"num_hidden_layers": 4, "mixer_types": ["short_conv", "ssd", "gated_delta", "softmax"],
                 "linear_chunk_size": 4, "mamba_d_state": 5, "position_type": "rotary"}, (DECODER,)),
    Combination("windows", "windows with global tokens, with random blocks, and of learned widths; learned positions",
                {"num_hidden_layers": 3, "mixer_types": ["longformer", "bigbird", "adaptive_span"],
                 "sliding_window": 4, "bigbird_block_size": 2, "bigbird_random_blocks": 1, "adaptive_span_limit": 12,
                 "adaptive_span_ramp": 4, "position_type": "learned"}),
    Combination("compressed_to_states", "an encoder that compresses and hashes, a decoder that retains and forgets",
                {"encoder": {"mixer_types": ["linformer", "reformer"], "linformer_rank": 6,
                             "reformer_num_buckets": 4, "reformer_window": 3, "position_type": "learned"},
                 "decoder": {"mixer_types": ["retention", "kimi_delta"], "linear_chunk_size": 4,
                             "position_type": "rotary"}}, (SEQ2SEQ,)),
    Combination("dropouts", "every dropout",
                {"embedding_dropout": 0.1, "hidden_dropout": 0.1, "attention_dropout": 0.1,
                 "activation_dropout": 0.1}),
    Combination("padding_kept", "padding goes through all layers", {"unpad_inputs": False, "position_type": "rotary"}),
    Combination("token_types", "two token types", {"type_vocab_size": 2}, (ENCODER,)),
    Combination("sparse_prediction", "in training only masked rows pass the head",
                {"sparse_prediction": True}, (ENCODER,)),
    Combination("perceptron_head", "first token, two normed dense layers without bias, dropout, five labels",
                {"classifier_hidden_sizes": [16, 24], "classifier_norm": "layer_norm", "classifier_bias": False,
                 "classifier_pooling": "first", "classifier_dropout": 0.1, "num_labels": 5}, (ENCODER, DECODER)),
    Combination("marian", "sines before cosines, scaled decoder outputs, an output layer with bias",
                {"position_type": "sinusoidal", "sinusoid_layout": "halves", "scale_decoder_outputs": True,
                 "lm_head_bias": True}, (SEQ2SEQ,)),
    Combination("separate_embeddings", "an embedding for each stack, the output tied to the decoder's",
                {"share_embeddings": False}, (SEQ2SEQ,)),
    Combination("separate_untied", "an embedding for each stack, output layer of its own",
                {"share_embeddings": False, "tie_word_embeddings": False}, (SEQ2SEQ,)),
    Combination("unequal_stacks", "a wide shallow encoder with rotary positions, a narrow decoder with relative ones",
                {"share_embeddings": False,
                 "encoder": {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6, "vocab_size": 83,
                             "position_type": "rotary", "type_vocab_size": 2},
                 "decoder": {"position_type": "relative", "num_key_value_heads": 2}}, (SEQ2SEQ,)),
    Combination("linear_to_sliding",
                "linear attention in the encoder; sliding and linear attention and experts in the decoder",
                {"position_type": "rotary", "encoder": {"layer_types": [LINEAR, LINEAR]},
                 "decoder": {"layer_types": [SLIDING, LINEAR], "sliding_window": 3, "num_experts": 4}}, (SEQ2SEQ,)),
    Combination("vit", "images, classified by the vector before their patches", VIT, (IMAGE,)),
    Combination("vit_post_norm_mean", "images, norms after each sum, the mean of all vectors",
                {**VIT, **norm_slots("post"), "embedding_norm": "layer_norm", "classifier_pooling": "mean"}, (IMAGE,)),
    Combination("vit_rotary_experts", "images, rotary positions, gated experts, both losses of the router",
                {**VIT, "position_type": "rotary", "num_experts": 4, "gated_feed_forward": True,
                 "router_z_loss_coef": 0.01}, (IMAGE,)),
    Combination("vit_mixers", "images, sinusoidal positions, sliding and linear attention",
                {**VIT, "position_type": "sinusoidal", "layer_types": [SLIDING, LINEAR], "sliding_window": 2},
                (IMAGE,)),
    Combination("vit_relative", "images, relative positions, a dense layer before the labels",
                {**VIT, "position_type": "relative", "classifier_hidden_sizes": [16]}, (IMAGE,)),
)  # fmt: skip

CONFIGS: dict[str, type[PreTrainedConfig]] = {
    ENCODER: fratrie.FratrieEncoderConfig,
    DECODER: fratrie.FratrieDecoderConfig,
    SEQ2SEQ: fratrie.FratrieSeq2SeqConfig,
    IMAGE: fratrie.FratrieEncoderConfig,
}
# Each head of each sibling, with the Auto class that loads it; the first is the one that it is for.
HEADS: dict[str, dict[str, tuple[type[PreTrainedModel], Any]]] = {
    ENCODER: {
        "language_model": (fratrie.FratrieEncoderForMaskedLM, AutoModelForMaskedLM),
        "base": (fratrie.FratrieEncoderModel, AutoModel),
        "sequence_classification": (
            fratrie.FratrieEncoderForSequenceClassification,
            AutoModelForSequenceClassification,
        ),
        "token_classification": (
            fratrie.FratrieEncoderForTokenClassification,
            AutoModelForTokenClassification,
        ),
    },
    DECODER: {
        "language_model": (fratrie.FratrieDecoderForCausalLM, AutoModelForCausalLM),
        "base": (fratrie.FratrieDecoderModel, AutoModel),
        "sequence_classification": (
            fratrie.FratrieDecoderForSequenceClassification,
            AutoModelForSequenceClassification,
        ),
    },
    SEQ2SEQ: {
        "language_model": (fratrie.FratrieSeq2SeqForConditionalGeneration, AutoModelForSeq2SeqLM),
        "base": (fratrie.FratrieSeq2SeqModel, AutoModel),
    },
    IMAGE: {
        "image_classification": (fratrie.FratrieEncoderForImageClassification, AutoModelForImageClassification),
        "base": (fratrie.FratrieEncoderModel, AutoModel),
    },
}


@dataclass(frozen=True)
class Case:
    """A combination for one of the siblings."""

    combination: Combination
    sibling: str

    def __str__(self) -> str:
        return f"{self.sibling}-{self.combination.name}"

    @property
    def name(self) -> str:
        return self.combination.name

    def config(self, **overrides: Any) -> PreTrainedConfig:
        """The tiny configuration of this case."""
        return CONFIGS[self.sibling](**{**SIZES, **self.combination.fields, **overrides})

    def build(self, head: str | None = None, **overrides: Any) -> PreTrainedModel:
        """A seeded model in evaluation mode, whose biases and norms have left their neutral first values.

        The head is the sibling's first one by default: it predicts tokens, or labels images.
        """

        def build() -> PreTrainedModel:
            torch.manual_seed(0)
            model = HEADS[self.sibling][head or first_head(self.sibling)][0](self.config(**overrides)).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.15 * torch.randn_like(parameter))
            return model

        return copy_of((str(self), head or first_head(self.sibling), repr(overrides)), build)


CASES = [Case(combination, sibling) for combination in COMBINATIONS for sibling in combination.siblings]


def first_head(sibling: str) -> str:
    """The head that a sibling is for."""
    return next(iter(HEADS[sibling]))


def cases(*siblings: str, names: tuple[str, ...] | None = None) -> list[Case]:
    """The cases of some siblings, or of all those of text; of some combinations, or of all of them."""
    known = {combination.name for combination in COMBINATIONS}
    assert known.issuperset(names or ()), set(names or ()) - known
    return [case for case in CASES if case.sibling in (siblings or SIBLINGS) and (names is None or case.name in names)]


def case_of(sibling: str, name: str | None = None) -> Case:
    """The case with these two names, or a sibling's first one."""
    (case,) = cases(sibling, names=(name or ("vit" if sibling == IMAGE else "default"),))
    return case


@cache
def choices(case: Case) -> set[Any]:
    """What a case chooses: the values of its fields, numbers only as given or not, and how its layers attend."""
    found: set[Any] = set()
    for stack in stack_configs(case.config()):
        for name, value in stack.to_dict().items():
            for each in value if isinstance(value, list) else [value]:
                kind = each if isinstance(each, str) else str(sorted(each)) if isinstance(each, dict) else bool(each)
                found.add((name, kind))
        groups = stack.num_attention_heads // stack.num_key_value_heads
        found |= {("groups", groups > 1), *((case.sibling, stack.position_type, kind) for kind in stack.layer_types)}
    return found


def spread(chosen: list[Case]) -> list[Case]:
    """Few of these cases that make every choice that any of them makes, for tests that take long."""
    left, few = set().union(*map(choices, chosen)), []
    while left:
        few.append(max(chosen, key=lambda case: len(left & choices(case))))
        left -= choices(few[-1])
    return few


# Lengths of the documents of a batch (of its inputs, for an encoder-decoder), and of an encoder-decoder's outputs.
LENGTHS, OUTPUT_LENGTHS = (9, 6, 3), (5, 7, 2)
Documents = list[torch.Tensor]


def documents(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> Documents:
    """Random documents of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, SIZES["vocab_size"], (length,), generator=generator) for length in lengths]


def pad(rows: Documents, side: str = "right", value: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A padded batch and its mask."""
    padded = torch.nn.utils.rnn.pad_sequence(rows, True, value, padding_side=side)
    ones = [torch.ones(len(row), dtype=torch.long) for row in rows]
    return padded, torch.nn.utils.rnn.pad_sequence(ones, True, 0, padding_side=side)


def padded_inputs(sibling: str, side: str = "right", rows: slice = slice(None)) -> dict[str, torch.Tensor]:
    """Ids and masks of (some rows of) the batch of documents, in the form of a sibling; or of three images."""
    if sibling == IMAGE:
        return {"pixel_values": torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(1))[rows]}
    input_ids, attention_mask = pad(documents()[rows], side)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    if sibling == SEQ2SEQ:
        output_ids, output_mask = pad(documents(OUTPUT_LENGTHS, seed=2)[rows], side)
        inputs |= {"decoder_input_ids": output_ids, "decoder_attention_mask": output_mask}
    return inputs


def training_inputs(sibling: str) -> dict[str, torch.Tensor]:
    """A batch with labels for the sibling's first head."""
    inputs = padded_inputs(sibling)
    if sibling == IMAGE:
        return inputs | {"labels": torch.tensor([4, 0, 2])}
    if sibling == SEQ2SEQ:
        ids, mask = inputs.pop("decoder_input_ids"), inputs["decoder_attention_mask"]
    else:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100)
    if sibling == ENCODER:
        labels[:, ::2] = -100
    return inputs | {"labels": labels}


def with_global_tokens(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs, with every first token named as global where the model has mixers that ask."""
    if not any(mixer.takes_global_tokens for mixer in stack_configs(model.config)[0].mixers):
        return inputs
    tokens = torch.zeros_like(inputs["input_ids"])
    tokens[:, 0] = 1
    return inputs | {"global_attention_mask": tokens}


def output_mask(sibling: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Which positions of a model's output belong to real tokens; of images, all."""
    if sibling == IMAGE:
        return torch.ones(len(inputs["pixel_values"]), dtype=torch.bool)
    return inputs["decoder_attention_mask" if sibling == SEQ2SEQ else "attention_mask"].bool()


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The layer types of a configuration, of both stacks for an encoder-decoder."""
    return [kind for stack in stack_configs(config) for kind in stack.layer_types]


def gives_weights(config: PreTrainedConfig) -> list[bool]:
    """Whether each layer of a stack is a softmax attention, of which kernels and weights can be asked for."""
    return [issubclass(mixer, SoftmaxAttention) for mixer in config.mixers]


def keeps_tokens(config: PreTrainedConfig) -> list[bool]:
    """Whether the cache of each layer of a stack holds every token, or else a state of constant size."""
    return [mixer.keeps_tokens for mixer in config.mixers]


def stack_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The configurations of the stacks of blocks."""
    return [config.encoder, config.decoder] if config.is_encoder_decoder else [config]


def markdown_table() -> str:
    """All combinations as a table: name, siblings, description."""
    rows = ["| combination | " + " | ".join(HEADS) + " | what it sets |", "|---|:-:|:-:|:-:|:-:|---|"]
    for combination in COMBINATIONS:
        marks = " | ".join("✓" if sibling in combination.siblings else "" for sibling in HEADS)
        rows.append(f"| `{combination.name}` | {marks} | {combination.description} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown_table())
