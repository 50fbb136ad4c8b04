"""Configurations: each field changes something and survives JSON, and what contradicts itself is refused by name."""

import copy
import json
import math
from dataclasses import dataclass, field, fields

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from fratrie import (
    FratrieDecoderConfig,
    FratrieDecoderForCausalLM,
    FratrieDecoderForSequenceClassification,
    FratrieDecoderModel,
    FratrieEncoderConfig,
    FratrieEncoderForImageClassification,
    FratrieEncoderForMaskedLM,
    FratrieEncoderForSequenceClassification,
    FratrieEncoderModel,
    FratrieSeq2SeqConfig,
    FratrieSeq2SeqForConditionalGeneration,
    FratrieSeq2SeqModel,
    norm_slots,
)
from fratrie.modeling.configuration import FratrieConfig
from fratrie.modeling.stack import FratrieStack

TINY = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "initializer_range": 0.4,
    "experts_implementation": "eager",
    "num_labels": 3,
}
MODELS = {
    FratrieEncoderConfig: (
        FratrieEncoderForMaskedLM,
        FratrieEncoderForSequenceClassification,
        FratrieEncoderForImageClassification,
    ),
    FratrieDecoderConfig: (FratrieDecoderForCausalLM, FratrieDecoderForSequenceClassification),
    FratrieSeq2SeqConfig: (FratrieSeq2SeqForConditionalGeneration, None),
}
IDS = torch.randint(4, 30, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(12) < torch.tensor([[12], [9]])).long()
TARGETS = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])


# --- what a field can change ---------------------------------------------------------------------------------------


def build(config, head=0):
    torch.manual_seed(0)
    return MODELS[type(config)][head](config).eval()


def forward(model, **arguments):
    if isinstance(model, FratrieSeq2SeqForConditionalGeneration):
        arguments.setdefault("decoder_input_ids", IDS[:, :5])
    torch.manual_seed(1)
    return model(IDS, attention_mask=MASK, **arguments)


def weights(config):
    """Names and shapes of the parameters, tied ones once."""
    return sorted((name, tuple(parameter.shape)) for name, parameter in build(config).named_parameters())


def state(config):
    """Names of all that is saved, buffers too."""
    return sorted(build(config).state_dict())


def initial(config):
    return [parameter.detach().clone() for parameter in build(config).parameters()]


def output(config):
    return forward(build(config)).logits


def half_output(config):
    return forward(build(config).to(torch.bfloat16)).logits


def training(config):
    return forward(build(config).train()).logits


def training_loss(config):
    return forward(build(config).train(), labels=IDS).loss


def span_gradients(config):
    model = build(config).train()
    forward(model, labels=IDS).loss.backward()
    return [weight.grad for name, weight in model.named_parameters() if ".spans." in name]


def training_logits_shape(config):
    return forward(build(config).train(), labels=IDS.where(IDS % 3 == 0, -100)).logits.shape


def lacks_logits(config):
    decoder = {"decoder_input_ids": IDS} if config.is_encoder_decoder else {}
    return forward(build(config).train(), labels=IDS, **decoder).logits is None


def classification(config):
    return forward(build(config, 1)).logits


def classification_training(config):
    return forward(build(config, 1).train()).logits


def classification_weights(config):
    return [tuple(parameter.shape) for parameter in build(config, 1).classifier.parameters()]


def base_weights(config):
    return sorted(FratrieEncoderModel(config).state_dict())


def image_weights(config):
    return [tuple(parameter.shape) for parameter in build(config, 2).parameters()]


def image_tokens(config):
    pixels = torch.zeros(1, config.num_channels, config.image_size, config.image_size)
    return build(config, 2).model(pixel_values=pixels).last_hidden_state.shape


def multi_label_loss(config):
    return forward(build(config, 1), labels=TARGETS).loss


def returned(config):
    return sorted(name for name, value in forward(build(config)).items() if value is not None)


def generation(config):
    model = build(config)
    prompt = {} if isinstance(config, FratrieDecoderConfig) else {"inputs": IDS}
    return model.generate(**prompt, do_sample=False, max_new_tokens=8)


def passes(config):
    """Number of tokens that the first block sees."""
    seen = []
    model = build(config).train()
    stack = next(module for module in model.modules() if isinstance(module, FratrieStack))
    stack.layers[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].shape[:2].numel()))
    forward(model)
    return seen


def saved(config):
    return json.loads(config.to_json_string(use_diff=False))


@dataclass
class Case:
    """A field's other value, what it must change, and the fields that give it a meaning."""

    value: object
    changes: object
    base: dict = field(default_factory=dict)


ROTARY = {"position_type": "rotary"}
SPARSE = {"num_experts": 4}
SHARES = {"num_experts": 4, "num_shared_experts": 1}
LATENT = {"kv_lora_rank": 8}
PERFORMER = {"mixer_types": ["performer"] * 2}
SHORT = {"layer_types": ["conv", "full_attention"]}
DELTA = {"mixer_types": ["gated_delta", "softmax"]}
MAMBA = {"mixer_types": ["ssd", "softmax"]}
REFORMER = {"mixer_types": ["reformer"] * 2, "reformer_num_buckets": 4}
GROUPED = {"num_experts": 8, "router_num_groups": 4}
BIGBIRD = {"mixer_types": ["bigbird"] * 2, "bigbird_block_size": 1, "bigbird_random_blocks": 1}
LINFORMER = {"mixer_types": ["linformer"] * 2}
SPANS = {"mixer_types": ["adaptive_span"] * 2}
DENSE_HEAD = {"classifier_hidden_sizes": [8]}
IMAGE = {"patch_size": 4, "image_size": 8}
MULTI = {"problem_type": "multi_label_classification"}
SHARED = {
    "vocab_size": Case(31, weights),
    "hidden_size": Case(24, weights),
    "num_hidden_layers": Case(3, weights),
    "num_attention_heads": Case(2, output),
    "num_key_value_heads": Case(2, weights),
    "head_dim": Case(8, weights),
    "intermediate_size": Case(20, weights),
    "hidden_act": Case("relu", output),
    "gated_feed_forward": Case(True, weights),
    "feed_forward_bias": Case(False, weights),
    "attention_bias": Case(False, weights),
    "attention_output_bias": Case(False, weights),
    "norm_bias": Case(False, weights),
    "attention_scale": Case(2.0, output),
    "query_key_norm": Case("rms_norm", weights),
    "attention_output_gate": Case(True, weights),
    "kv_lora_rank": Case(6, weights),
    "q_lora_rank": Case(6, weights, LATENT),
    "qk_nope_head_dim": Case(6, weights, LATENT),
    "v_head_dim": Case(6, weights, LATENT),
    "position_type": Case("alibi", weights),
    "max_position_embeddings": Case(40, weights),
    "axial_shape": Case([4, 8], weights, {"position_type": "axial"}),
    "axial_dims": Case([4, 12], weights, {"position_type": "axial"}),
    "position_offset": Case(2, weights, {"position_type": "learned"}),
    "sinusoid_layout": Case("halves", output, {"position_type": "sinusoidal"}),
    "rope_interleaved": Case(True, output, ROTARY),
    "rope_parameters": Case({"rope_type": "default", "rope_theta": 100.0}, output, ROTARY),
    "relative_num_buckets": Case(16, weights, {"position_type": "relative"}),
    "relative_max_distance": Case(9, output, {"position_type": "relative", "relative_num_buckets": 8}),
    "layer_types": Case(["full_attention", "linear_attention"], output),
    "mixer_types": Case(["softmax", "latent"], weights, {"kv_lora_rank": 8}),
    "sliding_window": Case(2, output, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}),
    "linear_feature_map": Case("relu", output, {"layer_types": ["linear_attention"] * 2}),
    "performer_num_features": Case(5, output, PERFORMER),
    "performer_seed": Case(7, output, PERFORMER),
    "bigbird_block_size": Case(2, output, BIGBIRD),
    "bigbird_random_blocks": Case(2, output, BIGBIRD),
    "bigbird_seed": Case(1, output, BIGBIRD),
    "adaptive_span_limit": Case(9, span_gradients, SPANS),
    "adaptive_span_ramp": Case(3.5, output, SPANS),
    "adaptive_span_loss_coef": Case(0.5, span_gradients, SPANS),
    "reformer_num_buckets": Case(2, output, REFORMER),
    "reformer_num_hashes": Case(1, output, REFORMER),
    "reformer_window": Case(1, output, REFORMER),
    "reformer_seed": Case(7, output, REFORMER),
    "mixer_input_norm": Case("rms_norm", weights, {"mixer_input_norm": None}),
    "mixer_output_norm": Case("rms_norm", weights, {"norm_after_residual": False, "mixer_output_norm": None}),
    "feed_forward_input_norm": Case("rms_norm", weights, {"feed_forward_input_norm": None}),
    "feed_forward_output_norm": Case(
        "rms_norm", weights, {"norm_after_residual": False, "feed_forward_output_norm": None}
    ),
    "first_input_norm": Case(False, weights, {"mixer_input_norm": "layer_norm"}),
    "norm_after_residual": Case(
        True, output, {**norm_slots("sandwich"), "norm_after_residual": False, "final_norm": None}
    ),
    "reversible": Case(True, output, {"norm_after_residual": False}),
    "embedding_norm": Case("rms_norm", weights, {"embedding_norm": None}),
    "final_norm": Case("rms_norm", weights, {"final_norm": None}),
    "norm_eps": Case(0.5, output),
    "mlp_layer_types": Case(["dense", "sparse"], weights, SPARSE),
    "num_experts": Case(4, weights),
    "num_experts_per_tok": Case(1, output, SPARSE),
    "moe_intermediate_size": Case(8, weights, SPARSE),
    "num_shared_experts": Case(1, weights, SPARSE),
    "shared_expert_intermediate_size": Case(8, weights, SHARES),
    "shared_experts_gate": Case(True, weights, SHARES),
    "norm_topk_prob": Case(False, output, SPARSE),
    "router_norm_eps": Case(0.5, output, SPARSE),
    "router_scoring": Case("sigmoid", output, SPARSE),
    "router_selection_bias": Case(True, state, SPARSE),
    "router_num_groups": Case(4, output, {"num_experts": 8}),
    "router_groups_per_tok": Case(2, output, GROUPED),
    "routed_scaling_factor": Case(2.5, output, SPARSE),
    "router_aux_loss_coef": Case(1.0, training_loss, SPARSE),
    "router_z_loss_coef": Case(1.0, training_loss, SPARSE),
    "router_aux_loss_scope": Case("model", training_loss, SPARSE),
    "output_router_logits": Case(True, returned, SPARSE),
    "float32_parts": Case(["expert_weights"], half_output, SPARSE),
    "embedding_dropout": Case(0.3, training),
    "hidden_dropout": Case(0.3, training),
    "attention_dropout": Case(0.3, training),
    "activation_dropout": Case(0.3, training),
    "scale_embeddings": Case(True, output),
    "tie_word_embeddings": Case(False, weights),
    "initializer_range": Case(0.1, initial),
    "unpad_inputs": Case(False, passes),
    "chunked_loss": Case(True, lacks_logits),
    "pad_token_id": Case(3, initial),
    "bos_token_id": Case(2, saved),
    "eos_token_id": Case(7, saved),
    "classifier_pooling": Case("first", classification),
    "classifier_hidden_sizes": Case([8, 4], classification_weights),
    "classifier_activation": Case("relu", classification, DENSE_HEAD),
    "classifier_norm": Case("rms_norm", classification_weights, DENSE_HEAD),
    "classifier_bias": Case(False, classification_weights, DENSE_HEAD),
    "classifier_output_bias": Case(False, classification_weights),
    "classifier_dropout": Case(0.3, classification_training),
    "pos_weight": Case([1.0, 2.0, 3.0], multi_label_loss, MULTI),
    "label_thresholds": Case([0.1, 0.2, 0.3], saved),
    "label_calibration": Case([[[0, -1], [1, 1]]] * 3, classification),
    "foreign_fields": Case({"summary_type": "cls_index", "n_special": 0}, saved),
}
# Of what acts, or runs at all, where causal alone.
CAUSAL = {
    # A causal sum in other pieces differs in its last bits.
    "linear_chunk_size": Case(5, output, {"layer_types": ["linear_attention"] * 2}),
    "short_conv_kernel_size": Case(5, weights, SHORT),
    "short_conv_bias": Case(True, weights, SHORT),
    "linear_num_key_heads": Case(2, weights, DELTA),
    "linear_num_value_heads": Case(8, weights, DELTA),
    "linear_key_head_dim": Case(6, weights, DELTA),
    "linear_value_head_dim": Case(6, weights, DELTA),
    "linear_conv_kernel_dim": Case(3, weights, DELTA),
    "mamba_n_heads": Case(4, weights, MAMBA),
    "mamba_d_head": Case(8, weights, MAMBA),
    "mamba_n_groups": Case(2, weights, MAMBA),
    "mamba_d_state": Case(5, weights, MAMBA),
    "mamba_d_conv": Case(2, weights, MAMBA),
    "mamba_conv_bias": Case(False, weights, MAMBA),
    "mamba_proj_bias": Case(True, weights, MAMBA),
    "mamba_time_step_limit": Case([0.5, 2], output, MAMBA),
}
# Of what runs where bidirectional alone.
BIDIRECTIONAL = {
    "bigbird_random_plan": Case("first", output, BIGBIRD),
    "linformer_rank": Case(3, weights, LINFORMER),
    "linformer_sharing": Case("key_value", weights, LINFORMER),
}
ENCODER = {
    **SHARED,
    **BIDIRECTIONAL,
    "type_vocab_size": Case(2, weights),
    "patch_size": Case(2, image_weights, IMAGE),
    "image_size": Case(12, image_tokens, IMAGE),
    "num_channels": Case(1, image_weights, IMAGE),
    "pooler_activation": Case("tanh", base_weights),
    "head_activation": Case("relu", output),
    "head_bias": Case(False, weights),
    "lm_head_bias": Case(False, weights),
    "sparse_prediction": Case(True, training_logits_shape),
}
CROSS = {"add_cross_attention": True}
DECODER = {
    **SHARED,
    **CAUSAL,
    "bos_token_id": Case(2, generation, {"bos_token_id": 1}),
    "eos_token_id": Case(None, generation, {"bos_token_id": 1, "eos_token_id": list(range(30)), "pad_token_id": 0}),
    "use_cache": Case(False, returned),
    "add_cross_attention": Case(True, weights),
    "cross_attention_hidden_size": Case(10, weights, CROSS),
}
SPECIAL = {"pad_token_id": 0, "eos_token_id": 1}
SEQ2SEQ = {
    "encoder": Case({"num_hidden_layers": 1}, weights),
    "decoder": Case({"num_hidden_layers": 1}, weights),
    "share_embeddings": Case(False, weights),
    "tie_word_embeddings": Case(False, weights),
    "chunked_loss": Case(True, lacks_logits),
    "use_cache": Case(False, returned),
    "initializer_range": Case(0.1, initial),
    "vocab_size": Case(31, weights),
    "pad_token_id": Case(3, initial),
    "bos_token_id": Case(2, saved),
    "eos_token_id": Case(None, generation, {**SPECIAL, "eos_token_id": list(range(1, 30))}),
    "decoder_start_token_id": Case(5, generation, SPECIAL),
    "lm_head_bias": Case(True, weights),
    "scale_decoder_outputs": Case(True, output),
    "foreign_fields": Case({"classif_dropout": 0.0}, saved),
}
TABLES = {FratrieEncoderConfig: ENCODER, FratrieDecoderConfig: DECODER, FratrieSeq2SeqConfig: SEQ2SEQ}
ROWS = [
    pytest.param(config_class, name, case, id=f"{config_class.__name__[7:-6]}-{name}")
    for config_class, table in TABLES.items()
    for name, case in table.items()
]


def own_fields(config_class):
    return {f.name for f in fields(config_class)} - {f.name for f in fields(PreTrainedConfig)}


@pytest.mark.parametrize("config_class", TABLES)
def test_every_field_is_in_the_table(config_class):
    untested = set(CAUSAL) if config_class is FratrieEncoderConfig else set(BIDIRECTIONAL)
    assert set(TABLES[config_class]) == own_fields(config_class) - untested


@pytest.mark.parametrize("config_class, name, case", ROWS)
def test_every_field_changes_something(config_class, name, case):
    fields_before = {**TINY, **case.base}
    if config_class is FratrieSeq2SeqConfig:
        fields_before.pop("num_labels")
    before, after = (
        case.changes(config_class(**settings)) for settings in (fields_before, {**fields_before, name: case.value})
    )
    same = case.changes(config_class(**fields_before))
    assert equal(before, same), "the comparison itself is not reproducible"
    assert not equal(before, after)


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, list) and one and isinstance(one[0], torch.Tensor):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize("config_class, name, case", ROWS)
def test_every_field_survives_its_file(config_class, name, case, tmp_path):
    settings = {**TINY, **case.base, name: case.value}
    if config_class is FratrieSeq2SeqConfig:
        settings.pop("num_labels")
    config = config_class(**settings)
    config.save_pretrained(tmp_path)
    for loaded in (config_class.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is config_class
        for field_name in own_fields(config_class):
            ours, theirs = getattr(config, field_name), getattr(loaded, field_name)
            ours, theirs = (x.to_dict() if isinstance(x, PreTrainedConfig) else x for x in (ours, theirs))
            if isinstance(ours, dict):  # what the library itself notes on saving
                ours, theirs = ({k: v for k, v in x.items() if k != "transformers_version"} for x in (ours, theirs))
            assert ours == theirs, field_name
        if not isinstance(case.value, dict):
            assert getattr(loaded, name) == case.value


def test_a_field_that_a_causal_sum_alone_needs_changes_no_encoder():
    one, other = (
        output(FratrieEncoderConfig(**TINY, layer_types=["linear_attention"] * 2, linear_chunk_size=size))
        for size in (2, 64)
    )
    assert torch.equal(one, other)


# --- unknown fields ------------------------------------------------------------------------------------------------

CONFIGS = list(TABLES)
every_config = pytest.mark.parametrize("config_class", CONFIGS)


@every_config
@pytest.mark.parametrize(
    "name, hint",
    [
        ("vocab_sise", r"vocab_sise \(did you mean vocab_size\?\)"),
        ("tie_word_embedding", r"tie_word_embedding \(did you mean tie_word_embeddings\?\)"),
        ("qqqqqqqq", r"has no field qqqqqqqq\."),
        ("temperature", r"temperature \(belongs to model\.generation_config\)"),
        ("num_beams", r"num_beams \(belongs to model\.generation_config\)"),
        ("max_new_tokens", r"max_new_tokens \(belongs to model\.generation_config\)"),
    ],
)
def test_unknown_fields_name_the_closest(config_class, name, hint):
    with pytest.raises(ValueError, match=f"{config_class.__name__} has no field.*{hint}|{hint}"):
        config_class(**{name: 1})


def test_all_unknown_fields_are_named_at_once():
    with pytest.raises(ValueError, match=r"hiden_size \(did you mean hidden_size\?\), temperature \(belongs"):
        FratrieEncoderConfig(hiden_size=8, temperature=0.5)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_unknown_fields_of_a_stack_are_named(stack):
    with pytest.raises(ValueError, match=r"hiden_size \(did you mean hidden_size\?\)"):
        FratrieSeq2SeqConfig(**{stack: {"hiden_size": 8}})


@every_config
def test_an_unknown_field_in_a_file_is_named(config_class, tmp_path):
    config_class().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_sise": 3}))
    with pytest.raises(ValueError, match="did you mean vocab_size"):
        config_class.from_pretrained(tmp_path)


@pytest.mark.parametrize("config_class", [FratrieEncoderConfig, FratrieDecoderConfig])
def test_a_field_of_the_other_sibling_is_unknown(config_class):
    other = {"add_cross_attention": True} if config_class is FratrieEncoderConfig else {"type_vocab_size": 2}
    with pytest.raises(ValueError, match="has no field"):
        config_class(**other)


@every_config
def test_wrong_types_are_named(config_class):
    with pytest.raises(Exception, match=r"vocab_size.*expected int, got str.*'many'"):
        config_class(vocab_size="many")


# --- contradictions ------------------------------------------------------------------------------------------------

ROPE = {"rope_type": "default", "rope_theta": 1e4}
SLIDES = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}
CONTRADICTIONS = [
    *(
        ({name: value}, rf"{name}={value} must be at least 1")
        for name in ("num_hidden_layers", "num_attention_heads", "head_dim",
                     "num_key_value_heads", "intermediate_size", "max_position_embeddings",
                     "linear_chunk_size")
        for value in (0, -4)
    ),
    *(({name: -4}, rf"{name}=-4 must be at least") for name in ("vocab_size", "hidden_size")),
    *(
        ({name: value}, rf"{name}={value} must lie in \[0, 1\)")
        for name in ("embedding_dropout", "hidden_dropout", "attention_dropout", "activation_dropout",
                     "classifier_dropout")
        for value in (-0.1, 1.0)
    ),
    ({"hidden_size": 30}, r"hidden_size=30 is not a multiple of num_attention_heads=4.*set head_dim"),
    ({"num_key_value_heads": 3}, r"num_attention_heads=4 is not a multiple of num_key_value_heads=3.*same number"),
    ({"norm_eps": 0.0}, r"norm_eps=0.0 must be positive"),
    ({"attention_scale": 0.0}, r"attention_scale=0.0 must be positive"),
    *(
        ({name: value}, rf"{name}={value} must be finite")
        for name, value in (("attention_scale", math.inf), ("norm_eps", math.inf), ("initializer_range", math.nan))
    ),
    *(({name: ""}, f"{name}='' is unknown") for name in ("hidden_act", "classifier_activation")),
    ({"id2label": ["joie"]}, r"id2label=\['joie'\] must give each number a label"),
    ({"dtype": "float31"}, "dtype='float31' is none of torch's"),
    ({"torch_dtype": "Tensor"}, "dtype='Tensor' is none of torch's"),
    ({"dtype": [1]}, r"dtype=\[1\] is none of torch's"),
    *(
        ({name: value}, rf"{name}={token_id} lies outside.*vocab_size=30")
        for name, value, token_id in (
            ("pad_token_id", 30, 30), ("bos_token_id", -1, -1), ("eos_token_id", 99, 99), ("eos_token_id", [1, 31], 31)
        )
    ),
    ({"position_offset": 2, "position_type": "none"}, "position_offset=2 has no use .* set position_type='learned'"),
    ({"sinusoid_layout": "halves"}, "sinusoid_layout='halves' has no use with position_type='learned'"),
    ({"rope_interleaved": True}, "rope_interleaved=True has no use .* set position_type='rotary'"),
    ({"classifier_norm": "rms_norm"}, "classifier_norm='rms_norm' .* no use without classifier_hidden_sizes"),
    ({"classifier_bias": False}, "classifier_bias=False have no use without classifier_hidden_sizes"),
    ({"kv_lora_rank": 0}, "kv_lora_rank=0 must be at least 1"),
    ({"q_lora_rank": 8}, r"\{'q_lora_rank': 8\} have no use without kv_lora_rank"),
    ({"kv_lora_rank": 8, "num_key_value_heads": 2}, "kv_lora_rank=8 .* leave out num_key_value_heads=2"),
    ({"kv_lora_rank": 8, "query_key_norm": "rms_norm"}, "kv_lora_rank=8 .* query_key_norm=rms_norm"),
    ({"kv_lora_rank": 8, "layer_types": ["linear_attention"] * 2}, "kv_lora_rank=8 has no use without a 'full_attent"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
     r"rope_parameters=.*5\.0.*position_type='learned'.*set position_type='rotary'"),
    ({"rope_theta": 5.0}, r"5\.0.*position_type='learned'.*set position_type='rotary'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, r"linear.*position_type='learned'"),
    ({"position_type": "sinusoidal", "hidden_size": 15, "head_dim": 4}, r"even hidden_size, not 15"),
    ({"position_type": "rotary", "head_dim": 5}, r"even head_dim, not 5"),
    ({"position_type": "rotary", "rope_parameters": {"rope_type": "yarm"}}, r"rope_type='yarm' is unknown: use defa"),
    ({"position_type": "rotary", "rope_parameters": {"sliding_attention": ROPE}},
     r"one set, or one for each of the layer types \['full_attention'\]"),
    ({"position_type": "rotary", "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
     r"one set, or one for each of the layer types \['full_attention'\]"),
    ({"position_type": "rotary", "rope_parameters": {"full_attention": ROPE}, **SLIDES},
     r"rope_parameters=.*full_attention.*one for each of the layer types \['full_attention', 'sliding_attention'\]"),
    ({"position_type": "rotary", "rope_parameters": {"full_attention": ROPE, "sliding_attention": None}, **SLIDES},
     r"rope_parameters=.*'sliding_attention': None.*one for each of the layer types"),
    ({"position_type": "rotary",
      "rope_parameters": {"full_attention": ROPE, "sliding_attention": {"rope_type": "yarm"}}, **SLIDES},
     r"rope_type='yarm' is unknown: use default, .*yarn"),
    ({"position_offset": -1}, r"position_offset=-1 must not be negative"),
    ({"position_type": "relative", "relative_num_buckets": 1}, r"relative_num_buckets=1 and .*_distance=128"),
    ({"position_type": "relative", "relative_max_distance": 2}, r"relative_max_distance=2 leave no room.*above"),
    ({"layer_types": ["full_attention", "chunked_attention"]},
     r"layer_types\[1\]='chunked_attention' is unknown: use conv, full_attention, linear_attention, "),
    ({"layer_types": ["full_attention"]}, r"layer_types|num_hidden_layers"),
    ({"mlp_layer_types": ["dense"]}, r"mlp_layer_types|num_hidden_layers"),
    ({"mlp_layer_types": ["dense", "thick"]}, r"thick"),
    *(
        ({"layer_types": ["full_attention", "linear_attention"], "position_type": kind},
         rf"layer_types\[1\]='linear_attention' takes no position bias.*position_type='{kind}'.*choose another")
        for kind in ("relative", "alibi")
    ),
    ({"layer_types": ["sliding_attention"] * 2}, r"sliding_window=None: set it to a positive size"),
    ({"layer_types": ["sliding_attention"] * 2, "sliding_window": -1}, r"sliding_window=-1: set it to a positive"),
    ({"sliding_window": 4}, r"sliding_window=4 has no use without a 'sliding_attention' layer"),
    ({"mixer_input_norm": None, "first_input_norm": False}, r"first_input_norm=False has no use without mixer_input"),
    ({"mixer_output_norm": None, "feed_forward_output_norm": None, "norm_after_residual": True},
     r"norm_after_residual=True has no use without mixer_output_norm or feed_forward_output_norm"),
    ({"hidden_act": "gelo"}, r"hidden_act='gelo' is unknown: did you mean .*gelu"),
    ({"hidden_act": "zzz"}, r"hidden_act='zzz' is unknown: choose from .*gelu.*silu"),
    ({"classifier_activation": "tanhh"}, r"classifier_activation='tanhh' is unknown: did you mean tanh"),
    ({"mlp_layer_types": ["sparse", "dense"]}, r"num_experts=0: set num_experts"),
    ({"num_experts": 4, "mlp_layer_types": ["dense", "dense"]}, r"num_experts=4 has no use without a 'sparse' layer"),
    ({"num_experts": 4, "num_experts_per_tok": 5}, r"num_experts_per_tok=5 must lie between 1 and num_experts=4"),
    ({"num_experts": 4, "num_experts_per_tok": 0}, r"num_experts_per_tok=0 must lie between 1 and num_experts=4"),
    *(
        ({"num_experts": 8, "router_num_groups": 4, "router_groups_per_tok": chosen},
         rf"router_groups_per_tok={chosen} must lie between 1 and router_num_groups=4")
        for chosen in (0, 5)
    ),
    ({"float32_parts": ["norms"]}, r"float32_parts=\['norms'\] must be of \['down_proj', 'expert_weights', 'rot"),
    ({"num_experts": 4, "router_num_groups": 0}, r"router_groups_per_tok=1 must lie .*router_num_groups=0"),
    *(
        ({"num_experts": 8, "router_num_groups": groups},
         rf"router_num_groups={groups} must divide num_experts=8 into groups of two or more")
        for groups in (3, 8)
    ),
    ({"num_experts": 8, "router_num_groups": 4, "router_groups_per_tok": 1, "num_experts_per_tok": 3},
     r"num_experts_per_tok=3 experts cannot be found in router_groups_per_tok=1 groups of 2: allow more groups"),
    *(
        ({"num_experts": 4, "routed_scaling_factor": factor}, rf"routed_scaling_factor={factor} must be positive")
        for factor in (0.0, -1.0)
    ),
    ({"num_experts": 4, "router_norm_eps": 0.0}, r"router_norm_eps=0.0 must be positive"),
    ({"num_experts": -2}, r"num_experts=-2"),
    ({"num_experts": 4, "num_shared_experts": -1}, r"num_shared_experts=-1"),
    ({"num_experts": 4, "moe_intermediate_size": -1}, r"moe_intermediate_size=-1"),
    ({"num_shared_experts": 1}, r"num_shared_experts=1 has no use without a 'sparse' layer"),
    ({**SHARES, "shared_expert_intermediate_size": 0}, r"shared_expert_intermediate_size=0 must be at least 1"),
    ({"num_experts": 4, "shared_expert_intermediate_size": 8}, r"size=8 has no use without num_shared_experts"),
    ({"num_experts": 4, "shared_experts_gate": True}, r"gate=True has no use without num_shared_experts"),
    ({"classifier_hidden_sizes": [8, 0]}, r"classifier_hidden_sizes=\[8, 0\]"),
    ({"initializer_range": -1.0}, r"initializer_range=-1.0"),
    ({"pos_weight": [1.0, 2.0]}, r"pos_weight has 2 values for 3 labels: give one per label"),
    ({"label_thresholds": [0.5]}, r"label_thresholds has 1 values for 3 labels: give one per label"),
    ({"pos_weight": [1.0] * 3, "problem_type": "regression"}, r"pos_weight.*problem_type='regression'"),
    ({"pos_weight": [1, float("inf"), 1]}, r"pos_weight=\[1, inf, 1\] must be positive"),
    ({"pos_weight": [1.0, 0.0, 1.0]}, r"pos_weight=\[1.0, 0.0, 1.0\] must be positive"),
    ({"label_thresholds": [0.5, 1.5, 0.5]}, r"label_thresholds=\[0.5, 1.5, 0.5\] must lie in \[0, 1\]"),
    ({"label_calibration": [[[0, 0], [1, 1]]]}, r"label_calibration has 1 lines for 3 labels: give one per label"),
    *(
        ({"label_calibration": [line] * 3}, r"label_calibration has the line .*: give two points")
        for line in ([[0, 0]], [[0, 0], [0, 1]], [[0, 1], [1, 0]], [[0, 0], [1, float("inf")]], [[0, 0], [1]])
    ),
]  # fmt: skip


@pytest.mark.parametrize("config_class", [FratrieEncoderConfig, FratrieDecoderConfig])
@pytest.mark.parametrize("settings, message", CONTRADICTIONS, ids=lambda x: str(x)[:60] if isinstance(x, dict) else "")
def test_contradictions_are_refused_with_value_and_way_out(config_class, settings, message):
    with pytest.raises(ValueError, match=message):
        config_class(**copy.deepcopy({**TINY, **settings}))  # the library completes what it is given


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"patch_size": 0}, r"image_size=8 must be a multiple of patch_size=0"),
        ({"patch_size": -4}, r"image_size=8 must be a multiple of patch_size=-4"),
        ({"patch_size": 3}, r"image_size=8 must be a multiple of patch_size=3"),
        ({"patch_size": 16}, r"image_size=8 must be a multiple of patch_size=16"),
        ({"image_size": 0}, r"image_size=0 must be a multiple of patch_size=4"),
        ({"num_channels": 0}, r"num_channels=0 must be at least 1"),
        ({"image_size": 24}, r"max_position_embeddings=32 are too few for an image of 36 patches.*use 37"),
        ({"head_activation": "gelo"}, r"head_activation='gelo' is unknown: did you mean .*gelu"),
    ],
    ids=str,
)
def test_contradictions_of_an_encoder_of_images_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        FratrieEncoderConfig(**{**TINY, **IMAGE, **settings})


def test_an_image_may_fill_the_learned_positions_and_exceed_positions_without_a_table():
    full = {**TINY, "patch_size": 2, "image_size": 8, "max_position_embeddings": 17}
    assert image_tokens(FratrieEncoderConfig(**full)) == (1, 17, 16)
    assert FratrieEncoderConfig(**full).num_patches == 16 and FratrieEncoderConfig(**TINY).num_patches == 0
    beyond = {**full, "max_position_embeddings": 5, "position_type": "rotary"}
    assert image_tokens(FratrieEncoderConfig(**beyond)) == (1, 17, 16)


def test_models_of_texts_and_of_images_are_not_mixed_up():
    texts, images = FratrieEncoderConfig(**TINY), FratrieEncoderConfig(**TINY, **IMAGE)
    with pytest.raises(ValueError, match="patch_size=4: a model of images has no words to fill in"):
        FratrieEncoderForMaskedLM(images)
    with pytest.raises(ValueError, match="needs a patch_size in its configuration"):
        FratrieEncoderForImageClassification(texts)
    pixels = torch.zeros(2, 3, 8, 8)
    with pytest.raises(ValueError, match="pixel_values given to a model of texts: set patch_size"):
        FratrieEncoderModel(texts)(pixel_values=pixels)
    model = FratrieEncoderModel(images)
    with pytest.raises(ValueError, match=r"Pixels of shape \(2, 12\) do not fit"):
        model(IDS)
    for inputs in ({}, {"input_ids": IDS}, {"inputs_embeds": torch.zeros(2, 5, 16)}):
        arguments = {"pixel_values": pixels, **inputs} if inputs else {}
        with pytest.raises(ValueError, match="exactly one"):
            model(**arguments)


@pytest.mark.parametrize("config_class", [FratrieEncoderConfig, FratrieDecoderConfig])
def test_rotary_parameters_may_be_one_set_a_layer_type(config_class, tmp_path):
    sets = {"full_attention": {"rope_theta": 500.0}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    config = config_class(**TINY, **SLIDES, position_type="rotary", rope_parameters=copy.deepcopy(sets))
    completed = {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
    }
    assert config.rope_parameters == completed
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == completed


SEQ2SEQ_CONTRADICTIONS = [
    ({"decoder": {"add_cross_attention": False}}, r"add_cross_attention=False.*attends the encoder"),
    ({"hidden_dropout": 1.5}, r"hidden_dropout=1.5 must lie in"),
    ({"initializer_range": math.nan}, "initializer_range=nan must be finite"),
    ({"sliding_window": 2**64, "layer_types": ["sliding_attention"] * 6}, r"sliding_window=\d+ must be below 1e\+18"),
    ({"attention_scale": 1e300}, r"attention_scale=1e\+300 must be below 1e\+18"),
    ({"pad_token_id": 30}, r"pad_token_id=30 lies outside"),
    ({"decoder_start_token_id": 30}, r"decoder_start_token_id=30 lies outside"),
]


@pytest.mark.parametrize(
    "settings, message", SEQ2SEQ_CONTRADICTIONS, ids=lambda x: str(x) if isinstance(x, dict) else ""
)
def test_contradictions_between_the_stacks_are_refused(settings, message):
    base = {name: value for name, value in TINY.items() if name != "num_labels"}
    with pytest.raises(ValueError, match=message):
        FratrieSeq2SeqConfig(**{**base, **settings})


def test_special_tokens_of_two_complete_stacks_are_the_decoders():
    ids = {"pad_token_id": 3, "bos_token_id": 1, "eos_token_id": [2, 4]}
    base = {name: value for name, value in TINY.items() if name not in ("num_labels", *ids)}
    stacks = {
        "encoder": FratrieEncoderConfig(**base, pad_token_id=5),
        "decoder": FratrieDecoderConfig(**base, **ids, add_cross_attention=True),
    }
    config = FratrieSeq2SeqConfig(**stacks)
    assert {name: getattr(config, name) for name in ids} == ids and config.decoder_start_token_id == 3
    assert FratrieSeq2SeqConfig(**stacks, pad_token_id=0).pad_token_id == 0


UNBUILDABLE = [
    (FratrieEncoderModel, {"vocab_size": 0}, r"vocab_size=0 must be at least 1"),
    (FratrieDecoderModel, {"hidden_size": 0}, r"hidden_size=0 must be at least 1"),
    (FratrieSeq2SeqModel, {"decoder": {"hidden_size": 32}},
     r"share_embeddings=True.*\(30, 16\) and \(30, 32\).*share_embeddings=False"),
    (FratrieSeq2SeqModel, {"encoder": {"vocab_size": 31}}, r"\(31, 16\) and \(30, 16\)"),
]  # fmt: skip


@pytest.mark.parametrize("model_class, settings, message", UNBUILDABLE, ids=str)
def test_sizes_that_only_a_configuration_may_have_are_refused_when_a_model_is_built(model_class, settings, message):
    base = {name: value for name, value in TINY.items() if name != "num_labels"}
    config = model_class.config_class(**{**base, **settings})
    with pytest.raises(ValueError, match=message):
        model_class(config)


@pytest.mark.parametrize("config_class", [FratrieEncoderConfig, FratrieDecoderConfig])
def test_a_contradiction_made_later_is_refused_on_saving(config_class, tmp_path):
    config = config_class(**TINY)
    config.num_shared_experts = 1
    with pytest.raises(Exception, match="num_shared_experts=1"):
        config.save_pretrained(tmp_path)


# --- defaults, seq2seq, norm slots ---------------------------------------------------------------------------------


def test_derived_defaults():
    config = FratrieConfig(**TINY)
    assert (config.num_key_value_heads, config.head_dim, config.rope_parameters) == (4, 4, None)
    assert config.layer_types == ["full_attention"] * 2 and config.mlp_layer_types == ["dense"] * 2
    assert FratrieConfig(**TINY, position_type="rotary").rope_parameters == {
        "rope_type": "default",
        "rope_theta": 10_000.0,
    }
    assert FratrieConfig(**TINY, position_type="rotary", rope_theta=5e5).rope_parameters["rope_theta"] == 5e5


# What both kinds of configuration have is the whole model's.
@pytest.mark.parametrize("name", sorted(set(SHARED) - {"tie_word_embeddings", "chunked_loss", "foreign_fields"}))
def test_shared_fields_of_a_seq2seq_model_reach_both_stacks(name):
    case = SHARED[name]
    by_label = ("pos_weight", "label_thresholds", "label_calibration")
    value = case.value[:2] if name in by_label else case.value  # two labels by default
    dropped = ("num_labels", "problem_type")
    settings = {key: setting for key, setting in {**TINY, **case.base}.items() if key not in dropped}
    config = FratrieSeq2SeqConfig(**{**settings, name: value})
    for stack in (config.encoder, config.decoder):
        assert getattr(stack, name) == value


def test_stacks_say_what_differs():
    config = FratrieSeq2SeqConfig(
        **{**TINY, "num_labels": 2}, encoder={"num_hidden_layers": 3}, decoder={"intermediate_size": 8}
    )
    assert (config.encoder.num_hidden_layers, config.decoder.num_hidden_layers) == (3, 2)
    assert (config.encoder.intermediate_size, config.decoder.intermediate_size) == (24, 8)
    assert config.decoder.add_cross_attention and config.decoder.cross_attention_hidden_size == 16
    assert config.encoder.position_type == "sinusoidal" and config.encoder.norm_after_residual


def test_shared_fields_beside_complete_stacks_are_not_dropped_silently():
    """`hidden_size` at the top goes to both stacks, says the documentation; complete ones leave it no place."""
    stacks = {
        "encoder": FratrieEncoderConfig(**TINY),
        "decoder": FratrieDecoderConfig(**TINY, add_cross_attention=True),
    }
    with pytest.raises(ValueError, match="hidden_size"):
        FratrieSeq2SeqConfig(**stacks, vocab_size=30, hidden_size=64)


def test_start_token_is_the_padding_by_default():
    assert FratrieSeq2SeqConfig(pad_token_id=3).decoder_start_token_id == 3
    assert FratrieSeq2SeqConfig(pad_token_id=3, decoder_start_token_id=4).decoder_start_token_id == 4


def test_norm_slots():
    names = ("mixer_input_norm", "mixer_output_norm", "feed_forward_input_norm", "feed_forward_output_norm")
    filled = {"pre": [1, 0, 1, 0], "post": [0, 1, 0, 1], "sandwich": [1, 1, 1, 1]}
    for position, slots in filled.items():
        for norm in ("layer_norm", "rms_norm"):
            settings = norm_slots(position, norm)
            assert [settings[name] for name in names] == [norm if slot else None for slot in slots]
            assert settings["norm_after_residual"] == (position == "post")
            assert settings["final_norm"] == (None if position == "post" else norm)
            for config_class in (FratrieEncoderConfig, FratrieDecoderConfig):
                config = config_class(**TINY, **settings)
                assert all(getattr(config, name) == value for name, value in settings.items())
    with pytest.raises(ValueError, match="'middle': use 'pre', 'post' or 'sandwich'"):
        norm_slots("middle")


def test_documentation_names_every_field():
    for config_class in (FratrieEncoderConfig, FratrieDecoderConfig):
        text = FratrieConfig.__doc__ + config_class.__doc__
        for name in own_fields(config_class):
            assert name in text, name
    for name in own_fields(FratrieSeq2SeqConfig) - own_fields(FratrieConfig):
        assert name in FratrieSeq2SeqConfig.__doc__, name


def test_thresholds_may_be_whole_numbers_or_given_by_label(tmp_path):
    labels = {"id2label": {0: "joie", 1: "peur", 2: "fierté"}}
    config = FratrieEncoderConfig(**labels, label_thresholds={"fierté": 1, "joie": 0.25}, pos_weight=[2, 1, 3])
    assert config.label_thresholds == [0.25, 0.5, 1] and config.pos_weight == [2, 1, 3]
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["label_thresholds"] == [0.25, 0.5, 1]
    assert FratrieEncoderConfig.from_pretrained(tmp_path).label_thresholds == [0.25, 0.5, 1]
    changed = FratrieEncoderConfig.from_pretrained(tmp_path, label_thresholds={"peur": 0})
    assert changed.label_thresholds == [0.5, 0, 0.5]
    changed.label_thresholds = {"joie": 1}
    changed.save_pretrained(tmp_path)
    assert FratrieEncoderConfig.from_pretrained(tmp_path).label_thresholds == [1, 0.5, 0.5]
    with pytest.raises(ValueError, match=r"label_thresholds names 'colère', but the labels are 'joie', 'peur'"):
        FratrieEncoderConfig(**labels, label_thresholds={"colère": 0.5, "joie": 0.5})
    with pytest.raises(ValueError, match=r"label_thresholds=\[2, 0.5, 0.5\] must lie in"):
        FratrieEncoderConfig(**labels, label_thresholds={"joie": 2})


@pytest.mark.parametrize("config_class", [FratrieEncoderConfig, FratrieDecoderConfig, FratrieSeq2SeqConfig])
@pytest.mark.parametrize(
    "fields",
    [
        *({"hiden_size": 3}, {"vocab_size": "many"}, {"initializer_range": "few"}),
        *({"id2label": "joie"}, {"dtype": "float31"}),
    ],
    ids=str,
)
def test_what_is_wrong_in_a_config_file_is_said_of_that_file(config_class, fields, tmp_path):
    config_class().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    for load in (config_class.from_pretrained, AutoConfig.from_pretrained):
        with pytest.raises(ValueError, match=next(iter(fields))) as error:
            load(tmp_path)
        assert str(error.value).startswith(f"{file}: ")


def test_a_model_type_that_is_no_name_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": ["fratrie_encoder"]}))
    with pytest.raises(ValueError, match=r"holds a \"\['fratrie_encoder'\]\" model"):
        FratrieEncoderModel.from_pretrained(tmp_path)
