"""Architectures of published models by name: the block's fields, without weights.

`preset("bert-base")` is the configuration whose model has the sizes and the computation of that model. The numbers are
those of the papers and model cards named beside them.
"""

import copy
import difflib
import math
from typing import Any

from .modeling.configuration import FratrieDecoderConfig, FratrieEncoderConfig, first_layers, norm_slots, with_changes
from .modeling.seq2seq_configuration import FratrieSeq2SeqConfig

_SIBLINGS = {"encoder": FratrieEncoderConfig, "decoder": FratrieDecoderConfig, "seq2seq": FratrieSeq2SeqConfig}


def _size(hidden: int, layers: int, heads: int, feed_forward: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": feed_forward,
    }


def _dropout(rate: float, *names: str) -> dict[str, float]:
    return {f"{name}_dropout": rate for name in names}


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _tokens(pad: int | None, bos: int | None, eos: int | None) -> dict[str, int | None]:
    return {"pad_token_id": pad, "bos_token_id": bos, "eos_token_id": eos}


_NO_BIASES = {"attention_bias": False, "attention_output_bias": False, "feed_forward_bias": False}

# Vaswani et al. 2017, table 3 and section 3.2: projections of the attention without biases, shared embeddings, and
# 37,000 tokens of English and German.
_TRANSFORMER = {"vocab_size": 37_000, "attention_bias": False, "attention_output_bias": False}

# Devlin et al. 2019, section 3; google-bert/bert-base-uncased. The pooler is the dense layer of the classifier.
_BERT = {
    "vocab_size": 30_522,
    "type_vocab_size": 2,
    "norm_eps": 1e-12,
    "pad_token_id": 0,
    "classifier_pooling": "first",
    **_dropout(0.1, "embedding", "hidden", "attention", "classifier"),
}
_BERT_BASE = {**_BERT, **_size(768, 12, 12, 3072), "classifier_hidden_sizes": [768]}

# Liu et al. 2019, section 3 and FacebookAI/roberta-base: positions begin behind the padding id, in row two.
_ROBERTA_BASE = {
    **_BERT_BASE,
    "vocab_size": 50_265,
    "type_vocab_size": 1,
    "norm_eps": 1e-5,
    "position_offset": 2,
    "head_activation": "gelu",
    **_tokens(1, 0, 2),
}

# Warner et al. 2024, appendix A; answerdotai/ModernBERT-base: every third layer sees all, the others 64 tokens to each
# side.
_MODERNBERT_BASE = {
    "vocab_size": 50_368,
    **_size(768, 22, 12, 1152),
    **_NO_BIASES,
    **norm_slots("pre"),
    "embedding_norm": "layer_norm",
    "first_input_norm": False,
    "norm_bias": False,
    "gated_feed_forward": True,
    "position_type": "rotary",
    "float32_parts": ["rotations"],
    "rope_parameters": {"full_attention": _rope(160_000.0), "sliding_attention": _rope(10_000.0)},
    "max_position_embeddings": 8192,
    "layer_types": ["sliding_attention" if layer % 3 else "full_attention" for layer in range(22)],
    "sliding_window": 64,
    "head_activation": "gelu",
    "head_bias": False,
    "classifier_hidden_sizes": [768],
    "classifier_activation": "gelu",
    "classifier_norm": "layer_norm",
    "classifier_bias": False,
    **_tokens(50_283, 50_281, 50_282),
}

# Radford et al. 2019, table 2; openai-community/gpt2.
_GPT2 = {
    "vocab_size": 50_257,
    "max_position_embeddings": 1024,
    "hidden_act": "gelu_new",
    **_tokens(None, 50_256, 50_256),
    **_dropout(0.1, "embedding", "hidden", "attention"),
}

# Touvron et al. 2023; meta-llama/Llama-2-7b-hf. Its descendants differ in sizes, positions and details.
_LLAMA = {
    "vocab_size": 32_000,
    **_NO_BIASES,
    **norm_slots("pre", "rms_norm"),
    "norm_eps": 1e-5,
    "hidden_act": "silu",
    "gated_feed_forward": True,
    "position_type": "rotary",
    "rope_parameters": _rope(10_000.0),
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    **_tokens(None, 1, 2),
}

# Yang et al. 2025 (arXiv 2505.09388), tables 1 and 2; Qwen/Qwen3-8B: normed heads, head size apart from the width.
_QWEN3 = {
    **_LLAMA,
    "vocab_size": 151_936,
    "head_dim": 128,
    "query_key_norm": "rms_norm",
    "norm_eps": 1e-6,
    "rope_parameters": _rope(1_000_000.0),
    "max_position_embeddings": 40_960,
    **_tokens(None, 151_643, 151_645),
}

# Lewis et al. 2020, section 2.1; facebook/bart-base: positions begin in row two, as in RoBERTa.
_BART = {
    "vocab_size": 50_265,
    "position_type": "learned",
    "max_position_embeddings": 1024,
    "position_offset": 2,
    "hidden_act": "gelu",
    "embedding_norm": "layer_norm",
    "scale_embeddings": False,
    "decoder_start_token_id": 2,
    **_tokens(1, 0, 2),
    **_dropout(0.1, "embedding", "hidden", "attention", "activation"),
}

# Raffel et al. 2020, section 2.1 and 3.1.1; google-t5/t5-small: unscaled scores, no biases, one bias of distances per
# stack.
_T5 = {
    "vocab_size": 32_128,
    **_NO_BIASES,
    **norm_slots("pre", "rms_norm"),
    "norm_eps": 1e-6,
    "position_type": "relative",
    "attention_scale": 1.0,
    "float32_parts": ["down_proj"],
    "head_dim": 64,
    "scale_embeddings": False,
    "scale_decoder_outputs": True,
    "decoder_start_token_id": 0,
    **_tokens(0, None, 1),
    **_dropout(0.1, "embedding", "hidden", "attention", "activation"),
}

_PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer-base": (
        "seq2seq",
        {**_TRANSFORMER, **_size(512, 6, 8, 2048), **_dropout(0.1, "embedding", "hidden")},
    ),
    "transformer-big": (
        "seq2seq",
        {**_TRANSFORMER, **_size(1024, 6, 16, 4096), **_dropout(0.3, "embedding", "hidden")},
    ),
    "bert-base": ("encoder", _BERT_BASE),
    "bert-large": ("encoder", {**_BERT, **_size(1024, 24, 16, 4096), "classifier_hidden_sizes": [1024]}),
    "roberta-base": ("encoder", _ROBERTA_BASE),
    # Martin et al. 2020; almanach/camembert-base.
    "camembert-base": ("encoder", {**_ROBERTA_BASE, "vocab_size": 32_005, **_tokens(1, 5, 6)}),
    # Conneau et al. 2020; FacebookAI/xlm-roberta-base.
    "xlm-roberta-base": ("encoder", {**_ROBERTA_BASE, "vocab_size": 250_002}),
    "modernbert-base": ("encoder", _MODERNBERT_BASE),
    # Beltagy et al. 2020, section 5; allenai/longformer-base-4096: 512 tokens of window, half of them to each side.
    "longformer-base-4096": (
        "encoder",
        {
            **_ROBERTA_BASE,
            "max_position_embeddings": 4096,
            "mixer_types": ["longformer"] * 12,
            "sliding_window": 256,
        },
    ),
    # Zaheer et al. 2020, table 8; google/bigbird-roberta-base.
    "bigbird-roberta-base": (
        "encoder",
        {
            **_BERT_BASE,
            "vocab_size": 50_358,
            "hidden_act": "gelu_new",
            "max_position_embeddings": 4096,
            "mixer_types": ["bigbird"] * 12,
            "bigbird_block_size": 64,
            "bigbird_random_blocks": 3,
            "bigbird_random_plan": "first",
            **_tokens(0, 1, 2),
        },
    ),
    # Wang et al. 2024 (arXiv 2402.05672); intfloat/multilingual-e5-small: a bare encoder whose mean is the vector.
    "multilingual-e5-small": (
        "encoder",
        {
            **_BERT,
            "vocab_size": 250_037,
            **_size(384, 12, 12, 1536),
            "classifier_pooling": "mean",
            "architectures": ["FratrieEncoderModel"],
        },
    ),
    # Dosovitskiy et al. 2021, table 1; google/vit-base-patch16-224, fine-tuned for the 1000 classes of ImageNet.
    "vit-base-patch16-224": (
        "encoder",
        {
            **_size(768, 12, 12, 3072),
            **norm_slots("pre"),
            "norm_eps": 1e-12,
            "patch_size": 16,
            "image_size": 224,
            "max_position_embeddings": 197,
            "classifier_pooling": "first",
            "num_labels": 1000,
            "architectures": ["FratrieEncoderForImageClassification"],
        },
    ),
    "gpt2": ("decoder", {**_GPT2, **_size(768, 12, 12, 3072)}),
    "gpt2-medium": ("decoder", {**_GPT2, **_size(1024, 24, 16, 4096)}),
    "gpt2-large": ("decoder", {**_GPT2, **_size(1280, 36, 20, 5120)}),
    "gpt2-xl": ("decoder", {**_GPT2, **_size(1600, 48, 25, 6400)}),
    # Brown et al. 2020, table 2.1. The usual count of its weights has the output layer apart from the embedding, and
    # so has this preset; the banded layers of the paper, which have no more and no fewer weights, are full here.
    "gpt3-175b": (
        "decoder",
        {
            **_GPT2,
            **_size(12_288, 96, 96, 49_152),
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            **_dropout(0.0, "embedding", "hidden", "attention"),
        },
    ),
    "llama-2-7b": ("decoder", {**_LLAMA, **_size(4096, 32, 32, 11_008)}),
    "llama-2-70b": ("decoder", {**_LLAMA, **_size(8192, 80, 64, 28_672), "num_key_value_heads": 8}),
    # Black et al. 2021; EleutherAI/gpt-neo-1.3B: every second layer sees 256 tokens, and no scores are scaled.
    "gpt-neo-1.3b": (
        "decoder",
        {
            **_GPT2,
            **_size(2048, 24, 16, 8192),
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "attention_scale": 1.0,
            "layer_types": ["full_attention", "sliding_attention"] * 12,
            "sliding_window": 256,
            **_dropout(0.0, "embedding", "hidden", "attention"),
        },
    ),
    # Liquid AI 2025; LiquidAI/LFM2-1.2B: short convolutions with six layers of attention between them.
    "lfm2-1.2b": (
        "decoder",
        {
            **_LLAMA,
            "vocab_size": 65_536,
            **_size(2048, 16, 32, 8192),
            "num_key_value_heads": 8,
            "query_key_norm": "rms_norm",
            "mixer_types": ["softmax" if layer in (2, 5, 8, 10, 12, 14) else "short_conv" for layer in range(16)],
            "rope_parameters": _rope(1_000_000.0),
            "max_position_embeddings": 128_000,
            "tie_word_embeddings": True,
            **_tokens(0, 1, 7),
        },
    ),
    # Chu et al. 2024; ibm-ai-platform/Bamba-9B: state spaces with three layers of attention, half of whose heads turn.
    "bamba-9b": (
        "decoder",
        {
            **_LLAMA,
            "vocab_size": 128_256,
            **_size(4096, 32, 32, 14_336),
            "num_key_value_heads": 8,
            "mixer_types": ["softmax" if layer in (9, 18, 27) else "ssd" for layer in range(32)],
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "rope_parameters": {**_rope(10_000.0), "partial_rotary_factor": 0.5},
            "max_position_embeddings": 262_144,
            **_tokens(0, 128_000, 128_001),
        },
    ),
    # Grattafiori et al. 2024, table 3; meta-llama/Meta-Llama-3-8B.
    "llama-3-8b": (
        "decoder",
        {
            **_LLAMA,
            "vocab_size": 128_256,
            **_size(4096, 32, 32, 14_336),
            "num_key_value_heads": 8,
            "rope_parameters": _rope(500_000.0),
            "max_position_embeddings": 8192,
            **_tokens(None, 128_000, 128_001),
        },
    ),
    # Jiang et al. 2023, table 1; mistralai/Mistral-7B-v0.1.
    "mistral-7b": (
        "decoder",
        {
            **_LLAMA,
            **_size(4096, 32, 32, 14_336),
            "num_key_value_heads": 8,
            "layer_types": ["sliding_attention"] * 32,
            "sliding_window": 4096,
            "max_position_embeddings": 32_768,
        },
    ),
    # Yang et al. 2024 (arXiv 2407.10671), table 1; Qwen/Qwen2-7B: biases of query, key and value alone.
    "qwen2-7b": (
        "decoder",
        {
            **_LLAMA,
            "vocab_size": 152_064,
            **_size(3584, 28, 28, 18_944),
            "num_key_value_heads": 4,
            "attention_bias": True,
            "norm_eps": 1e-6,
            "rope_parameters": _rope(1_000_000.0),
            "max_position_embeddings": 131_072,
            **_tokens(None, 151_643, 151_643),
        },
    ),
    "qwen3-8b": ("decoder", {**_QWEN3, **_size(4096, 36, 32, 12_288), "num_key_value_heads": 8}),
    "qwen3-30b-a3b": (
        "decoder",
        {
            **_QWEN3,
            **_size(2048, 48, 32, 6144),
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "router_aux_loss_scope": "model",
            "router_aux_loss_coef": 0.008,  # published as 0.001 for a loss that is num_experts_per_tok times ours
        },
    ),
    # Jiang et al. 2024, table 1; mistralai/Mixtral-8x7B-v0.1.
    "mixtral-8x7b": (
        "decoder",
        {
            **_LLAMA,
            **_size(4096, 32, 32, 14_336),
            "num_key_value_heads": 8,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_scope": "model",
            "router_aux_loss_coef": 0.04,  # published as 0.02, see above
            "float32_parts": ["expert_weights"],
            "rope_parameters": _rope(1_000_000.0),
            "max_position_embeddings": 32_768,
        },
    ),
    # DeepSeek-AI 2024, section 4.2; deepseek-ai/DeepSeek-V3, without the modules that predict further tokens.
    "deepseek-v3": (
        "decoder",
        {
            **_LLAMA,
            **_size(7168, 61, 128, 18_432),
            "vocab_size": 129_280,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "norm_eps": 1e-6,
            "max_position_embeddings": 163_840,
            "rope_parameters": {
                **_rope(10_000.0),
                "rope_type": "yarn",
                "factor": 40.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "attention_scale": (0.1 * math.log(40.0) + 1.0) ** 2 * 192**-0.5,  # YaRN's, on 128 + 64 numbers per head
            "rope_interleaved": True,
            "head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58,
            "router_scoring": "sigmoid",
            "router_selection_bias": True,
            "router_num_groups": 8,
            "router_groups_per_tok": 4,
            "routed_scaling_factor": 2.5,
            "router_aux_loss_coef": 0.0,  # the selection bias keeps the experts balanced
        },
    ),
    "bart-base": ("seq2seq", {**_BART, **_size(768, 6, 12, 3072)}),
    "bart-large": ("seq2seq", {**_BART, **_size(1024, 12, 16, 4096)}),
    # Junczys-Dowmunt et al. 2018, Tiedemann and Thottingal 2020; Helsinki-NLP/opus-mt-en-fr.
    "marian": (
        "seq2seq",
        {
            "vocab_size": 59_514,
            **_size(512, 6, 8, 2048),
            "hidden_act": "swish",
            "sinusoid_layout": "halves",
            "lm_head_bias": True,
            "decoder_start_token_id": 59_513,
            **_tokens(59_513, None, 0),
            **_dropout(0.1, "embedding", "hidden"),
        },
    ),
    "t5-small": ("seq2seq", {**_T5, **_size(512, 6, 8, 2048)}),
    "t5-base": ("seq2seq", {**_T5, **_size(768, 12, 12, 3072)}),
    # Shazeer 2020 and google/t5-v1_1-small: gated feed-forward, an output layer of its own.
    "t5-v1.1-small": (
        "seq2seq",
        {
            **_T5,
            **_size(512, 8, 6, 1024),
            "hidden_act": "gelu_new",
            "gated_feed_forward": True,
            "tie_word_embeddings": False,
            "scale_decoder_outputs": False,
        },
    ),
}

PRESETS = tuple(_PRESETS)


def preset(name: str, **overrides: Any) -> FratrieEncoderConfig | FratrieDecoderConfig | FratrieSeq2SeqConfig:
    """Build the configuration of a published architecture.

    Args:
        name: one of `PRESETS`.
        **overrides: fields to change, for example `vocab_size`; fewer layers are the first ones.

    Raises:
        ValueError: for an unknown name, and for fields that do not fit each other.
    """
    if name not in _PRESETS:
        close = difflib.get_close_matches(name.lower(), PRESETS, n=3)
        hint = f"did you mean {', '.join(close)}?" if close else f"use one of {', '.join(PRESETS)}."
        raise ValueError(f"There is no preset {name!r}: {hint}")
    sibling, fields = _PRESETS[name]
    fields = copy.deepcopy(with_changes(fields, overrides))
    if "num_hidden_layers" in overrides:
        fields = {**first_layers(fields, overrides["num_hidden_layers"]), **overrides}
    return _SIBLINGS[sibling](**fields)
