"""Every field of every family's configuration: ours follows it, or refuses it by name; none is lost on the way."""

from dataclasses import fields

import pytest
import torch
from families import CASES, SPREAD, inputs, our_model, precise, real_tokens, their_model
from transformers import PreTrainedConfig

from fratrie.conversion import to_hf
from fratrie.conversion.models import RECIPES

# Another value of fields whose kind does not say what would be one.
OTHER = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 32),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), 33),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 8),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 1),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 28),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim"), 10),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "classifier_activation"), "relu"),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id", "bos_token_id"), 3),
    "eos_token_id": [7, 9],
    "forced_eos_token_id": [7, 9],
    **dict.fromkeys(("decoder_layers", "num_layers", "num_decoder_layers"), 1),
    "encoder_layers": 4,  # Hugging Face's own decoders alone fail with fewer than in the decoder
    "n_group": 2,
    "n_routed_experts": 12,
    "num_key_value_heads": 4,
    "classifier_pooling": "mean",
    "feed_forward_proj": "gated-gelu",
    "attention_types": [[["local", "global", "global"], 1]],
    "attention_window": 8,
    "encoder_attention_type": "transient-global",
    "image_size": 16,
    "patch_size": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "max_window_layers": 2,
    "mlp_only_layers": [1],
    "num_experts_per_tok": 1,
    "pooler_act": "relu",
    "pooler_output_size": 12,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0},
    "sliding_window": 5,
    "summary_activation": "tanh",
    "summary_type": "mean",
}
MODERN_ROPE = {
    kind: {"rope_type": "linear", "rope_theta": theta, "factor": 3.0}
    for kind, theta in (("full_attention", 300.0), ("sliding_attention", 30.0))
}
# Hugging Face computes nothing with these: a window without a size, groups of keys that all heads have, a decoder that
# is none.
NO_DECODER = (ValueError, "should be used as a decoder model if cross attention is added")
NO_WINDOW = (TypeError, "'NoneType' object cannot be interpreted as an integer")
# How Hugging Face's models end with these.
IMPOSSIBLE = {
    ("deepseek_v3", "num_key_value_heads"): (RuntimeError, "size of tensor a .* must match the size of tensor b"),
    ("qwen2", "layer_types"): NO_WINDOW,
    ("qwen3", "layer_types"): NO_WINDOW,
    **{(name, "add_cross_attention"): NO_DECODER for name in ("bert", "roberta", "xlm-roberta", "camembert")},
    ("big_bird", "add_cross_attention"): (TypeError, NO_DECODER[1]),
}


OTHER_OF_FAMILY = {
    ("modernbert", "rope_parameters"): MODERN_ROPE,
    ("deepseek_v3", "num_key_value_heads"): 2,
    ("lfm2", "layer_types"): ["full_attention", "conv", "conv"],
    ("lfm2", "full_attn_idxs"): [0, 2],
    ("lfm2_moe", "layer_types"): ["full_attention", "conv", "conv"],
    ("bamba", "attn_layer_indices"): [0, 2],
    ("bamba", "mamba_n_heads"): 8,
    ("bamba", "mamba_n_groups"): 4,
    ("bamba", "mamba_d_head"): "auto",  # nothing else fits to the other sizes
    ("bamba", "time_step_limit"): (0.5, 1.0),
    ("qwen3_next", "layer_types"): ["full_attention", "linear_attention", "linear_attention"],
    ("qwen3_next", "linear_num_value_heads"): 4,
    ("big_bird", "attention_type"): "original_full",
}


def other_value(model_type, name, value):
    if (model_type, name) in OTHER_OF_FAMILY:
        return OTHER_OF_FAMILY[model_type, name]
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    assert isinstance(value, float) or "dropout" in name, (name, value)
    return 0.37 if value is None or value == 0 else value / 2


def own_fields(config_class):
    return [f.name for f in fields(config_class) if f.name not in {f.name for f in fields(PreTrainedConfig)}]


def main_output(output):
    return output["logits"] if "logits" in output else output["last_hidden_state"]


def followed_or_refused(case, changed):
    """`followed` or `refused`, or what is wrong with ours for a configuration of theirs with a changed field."""
    (name,) = changed
    theirs = their_model(case, **changed)
    try:
        ours = our_model(theirs)
    except ValueError as error:
        return "refused" if name in str(error) else f"refused without its name: {error}"
    their_inputs, our_inputs = inputs(case, theirs)
    with torch.no_grad(), precise(case):
        expected, actual = (main_output(output) for output in (theirs(**their_inputs), ours(**our_inputs)))
    rows = real_tokens(case, our_inputs, expected)
    if not torch.allclose(actual[rows], expected[rows], rtol=1e-10, atol=1e-10):
        return "other outputs"
    back = to_hf(ours).config
    kept = getattr(back, name) == getattr(theirs.config, name) and type(getattr(back, name)) is type(
        getattr(theirs.config, name)
    )
    return "followed" if kept else f"lost on the way back: {getattr(back, name)!r}"


FIRST = [case for case in CASES if case.fields is SPREAD[case.model_type][0] and not case.theirs.endswith("Model")]
FIRST += [case for case in CASES if case.theirs in ("BertModel", "MarianMTModel", "ViTModel", "GPT2LMHeadModel")
          and case.fields is SPREAD[case.model_type][0]]  # fmt: skip
FIRST = list({case.name: case for case in FIRST}.values())
# Fields of the body are walked once a recipe; what a head may read besides, with every head.
# Which alone their configuration refuses: another field names the layers one by one.
NEVER_ALONE = {("gpt_neo", "num_layers"), ("lfm2_moe", "num_hidden_layers")}
READ_BY_HEADS = {"hidden_act", "hidden_activation", "pad_token_id", "tie_word_embeddings", "pooler_act"}
WALKED_WHOLE = {id(case.recipe): case.name for case in reversed(FIRST)}.values()


def walked_fields(case):
    own = own_fields(case.recipe.their_config)
    heads = {pair.theirs for head in case.recipe.heads for pair in head.fields}
    return own if case.name in WALKED_WHOLE else [name for name in own if name in READ_BY_HEADS | heads]


@pytest.mark.slow
@pytest.mark.parametrize("case", FIRST, ids=[case.name for case in FIRST])
def test_each_field_is_followed_or_refused(case):
    wrong, refused = {}, set()
    config = case.recipe.their_config(**case.fields)
    for name in walked_fields(case):
        if (case.model_type, name) in IMPOSSIBLE.keys() | NEVER_ALONE:
            continue
        value = other_value(case.model_type, name, getattr(config, name))
        assert value != getattr(config, name), name
        outcome = followed_or_refused(case, {name: value})
        if outcome == "refused":
            refused.add(name)
        elif outcome != "followed":
            wrong[name] = f"{value!r}: {outcome}"
    assert not wrong
    # What is refused is what the recipe says that it cannot represent.
    assert refused <= {*case.recipe.required, "pooler_output_size", "decoder_vocab_size", "tie_word_embeddings"}


@pytest.mark.parametrize(("model_type", "name"), sorted(IMPOSSIBLE))
def test_impossible_fields_are_so_for_hugging_face(model_type, name):
    """And ours refuses their configurations."""
    case = next(case for case in CASES if case.model_type == model_type)
    fields_ = {name: other_value(model_type, name, False)}
    error, message = IMPOSSIBLE[model_type, name]
    with pytest.raises(error, match=message):
        theirs = their_model(case, **fields_)
        theirs(**inputs(case, theirs)[0])
    with pytest.raises(ValueError, match=name):
        case.recipe.read_config(case.recipe.their_config(**{**case.fields, **fields_}), case.head)


def test_every_recipe_is_walked():
    assert {case.model_type for case in FIRST} == set(RECIPES)
