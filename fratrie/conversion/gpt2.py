"""GPT-2 (Radford et al. 2019)."""

from fratrie.modeling.configuration import FratrieDecoderConfig
from fratrie.modeling.decoder import (
    FratrieDecoderForCausalLM,
    FratrieDecoderForSequenceClassification,
    FratrieDecoderModel,
)

from .recipe import Field, Head, Recipe, Weight

GPT2 = Recipe(
    model_type="gpt2",
    config=FratrieDecoderConfig,
    fields=(
        Field("vocab_size"),
        Field("n_embd", "hidden_size"),
        Field("n_layer", "num_hidden_layers"),
        Field("n_head", "num_attention_heads"),
        Field("n_inner", "intermediate_size", default=lambda config: 4 * config.n_embd),
        Field("n_positions", "max_position_embeddings"),
        Field("activation_function", "hidden_act"),
        Field("resid_pdrop", "hidden_dropout"),
        Field("embd_pdrop", "embedding_dropout"),
        Field("attn_pdrop", "attention_dropout"),
        Field("layer_norm_epsilon", "norm_eps"),
        Field("initializer_range"),
        Field("scale_attn_weights", "attention_scale", values={True: None, False: 1.0}),
        Field("add_cross_attention"),
        Field("use_cache"),
        Field("tie_word_embeddings"),
        Field("pad_token_id"),
        Field("bos_token_id"),
        Field("eos_token_id"),
    ),
    weights=(
        Weight("wte", "embed_tokens"),
        Weight("wpe", "embed_positions"),
        Weight("h.*.ln_1", "layers.*.mixer_input_norm"),
        Weight("h.*.attn.c_attn", ("layers.*.mixer.q_proj", "layers.*.mixer.k_proj", "layers.*.mixer.v_proj"),
               transposed=True),
        Weight("h.*.attn.c_proj", "layers.*.mixer.o_proj", transposed=True),
        Weight("h.*.ln_cross_attn", "layers.*.cross_attention_input_norm"),
        Weight("h.*.crossattention.q_attn", "layers.*.cross_attention.q_proj", transposed=True),
        Weight("h.*.crossattention.c_attn", ("layers.*.cross_attention.k_proj", "layers.*.cross_attention.v_proj"),
               transposed=True),
        Weight("h.*.crossattention.c_proj", "layers.*.cross_attention.o_proj", transposed=True),
        Weight("h.*.ln_2", "layers.*.feed_forward_input_norm"),
        Weight("h.*.mlp.c_fc", "layers.*.feed_forward.up_proj", transposed=True),
        Weight("h.*.mlp.c_proj", "layers.*.feed_forward.down_proj", transposed=True),
        Weight("ln_f", "norm"),
    ),
    heads=(
        Head("GPT2Model", FratrieDecoderModel),
        Head("GPT2LMHeadModel", FratrieDecoderForCausalLM, "transformer.", (Weight("lm_head", "lm_head"),)),
        Head("GPT2ForSequenceClassification", FratrieDecoderForSequenceClassification, "transformer.",
             (Weight("score", "classifier.out_proj"),), always={"classifier_output_bias": False}),
    ),
    required={
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
    },
    inert=(
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
        "summary_first_dropout",
    ),
)  # fmt: skip
