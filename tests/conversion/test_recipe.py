"""Recipes by themselves: rules of weights are invertible, and what has no counterpart is refused by its name."""

import pytest
import torch
import transformers
from families import CASES, inputs, our_model, their_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    LlamaConfig,
)

from fratrie import (
    FratrieDecoderConfig,
    FratrieDecoderForCausalLM,
    FratrieDecoderModel,
    FratrieEncoderConfig,
    FratrieEncoderForMaskedLM,
    FratrieEncoderForTokenClassification,
    FratrieEncoderModel,
    FratrieSeq2SeqConfig,
    FratrieSeq2SeqModel,
    norm_slots,
)
from fratrie.conversion import from_hf, to_hf
from fratrie.conversion.models import RECIPES, find_recipe
from fratrie.conversion.recipe import Field, Groups, Head, Recipe, Weight

CASE = {case.name: case for case in CASES}
SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
}
LLAMA_LIKE = {
    **SIZES,
    **norm_slots("pre", "rms_norm"),
    **dict.fromkeys(("attention_bias", "attention_output_bias", "feed_forward_bias"), False),
    "position_type": "rotary",
    "gated_feed_forward": True,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def randomised(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3)
    return model.eval()


def read_config(model_type, fields, theirs=None):
    recipe, head = find_recipe(model_type, theirs)
    return recipe.read_config(recipe.their_config(**fields), head)


REQUIRED = [(model_type, name, value) for model_type, recipe in RECIPES.items()
            for name, value in recipe.required.items()]  # fmt: skip


@pytest.mark.parametrize(("model_type", "name", "value"), REQUIRED)
def test_a_required_field_is_refused_by_name_and_value(model_type, name, value):
    recipe = RECIPES[model_type]
    config = recipe.their_config()
    other = {bool: True, float: 0.25, int: 7, str: "other"}[type(value)] if value != True else False  # noqa: E712
    setattr(config, name, other)
    with pytest.raises(ValueError) as error:
        recipe.read_config(config, recipe.heads[0])
    assert f"cannot represent this {model_type!r} model" in str(error.value)
    assert f"{name}={other!r} (only {value!r})" in str(error.value)


def test_all_wrong_fields_are_named_at_once():
    with pytest.raises(ValueError, match=r"is_decoder=True.*add_cross_attention=True"):
        read_config("bert", {"is_decoder": True, "add_cross_attention": True})


def test_a_field_that_old_checkpoints_have():
    for value in ("relative_key", "relative_key_query"):
        with pytest.raises(ValueError, match=f"position_embedding_type='{value}'"):
            read_config("bert", {"position_embedding_type": value})
    assert read_config("bert", {"position_embedding_type": "absolute"}).position_type == "learned"


def test_an_unknown_model_type_lists_the_known():
    model = DistilBertModel(DistilBertConfig(vocab_size=9, dim=8, n_heads=2, n_layers=1, hidden_dim=8))
    for refused in (lambda: from_hf(model), lambda: find_recipe("distilbert")):
        with pytest.raises(
            ValueError, match="No recipe for model type 'distilbert'; there are bert, roberta"
        ) as error:
            refused()
        assert all(model_type in str(error.value) for model_type in RECIPES)


def test_a_class_without_counterpart_lists_those_that_have_one():
    config = BertConfig(**SIZES)
    with pytest.raises(ValueError, match="BertForQuestionAnswering has no counterpart for model type 'bert'; BertM"):
        from_hf(BertForQuestionAnswering(config))
    ours = FratrieDecoderForCausalLM(FratrieDecoderConfig(**SIZES))
    with pytest.raises(ValueError, match=r"FratrieDecoderForCausalLM has no counterpart.*FratrieEncoderForMaskedLM"):
        to_hf(ours, "bert")


def test_values_without_counterpart():
    with pytest.raises(ValueError, match=r"classifier_pooling='max' has no counterpart; known are \['cls', 'mean'\]"):
        pair = Field("classifier_pooling", values={"cls": "first", "mean": "mean"})
        config = RECIPES["modernbert"].their_config()
        object.__setattr__(config, "classifier_pooling", "max")
        pair.read(config)
    with pytest.raises(ValueError, match="pooler_output_size=12"):
        from_hf(their_model(CASE["ViTModel-0"], pooler_output_size=12))
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    for model_type in ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"):
        with pytest.raises(ValueError, match=f"{model_type}.*partial_rotary_factor=0.5"):
            read_config(model_type, {"rope_parameters": rope})
    for name, value, expected in (("tie_word_embeddings", False, True), ("decoder_vocab_size", 5, 58101)):
        with pytest.raises(ValueError, match=f"marian: {name}={value} does not fit .* with which it is {expected}"):
            read_config("marian", {name: value})


def test_a_model_never_converted_needs_a_model_type():
    model = FratrieEncoderModel(FratrieEncoderConfig(**SIZES))
    with pytest.raises(ValueError, match="was not converted: give a model_type, one of bert, roberta"):
        to_hf(model)
    with pytest.raises(ValueError, match="No recipe for model type 'elmo'"):
        to_hf(model, "elmo")


def test_a_bert_of_our_own_becomes_hugging_faces():
    for ours_class in (FratrieEncoderModel, FratrieEncoderForMaskedLM, FratrieEncoderForTokenClassification):
        ours = randomised(ours_class(FratrieEncoderConfig(**SIZES, type_vocab_size=2, pad_token_id=0)))
        theirs = to_hf(ours, "bert")
        ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
        mask = (ids != 0).long()
        with torch.no_grad():
            actual, expected = (model(ids, attention_mask=mask)[0][mask.bool()] for model in (theirs, ours))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(from_hf(theirs).state_dict()[next(iter(ours.state_dict()))], next(iter(ours.parameters())))


def test_a_llama_of_our_own_becomes_hugging_faces():
    ours = randomised(FratrieDecoderForCausalLM(FratrieDecoderConfig(**LLAMA_LIKE)))
    theirs = to_hf(ours, "llama")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=1e-5, atol=1e-5)
    assert isinstance(theirs.config, LlamaConfig)
    # It is of no other family; which says what of it is strange there.
    for model_type, field in (("gpt2", "position_type='rotary'"), ("qwen2", "attention_bias=False")):
        with pytest.raises(ValueError, match=f"A '{model_type}' model cannot have this: .*{field}"):
            to_hf(ours, model_type)


ALIBI = {"position_type": "alibi"}


def with_alibi(recipe):
    """One of ours that no family can be, in the class of the recipe's first head."""
    if recipe.config is FratrieSeq2SeqConfig:
        stacks = {stack: {**SIZES, **ALIBI} for stack in ("encoder", "decoder")}
        return FratrieSeq2SeqModel(FratrieSeq2SeqConfig(**stacks, decoder_start_token_id=2))
    fields = {"pad_token_id": 0}
    if "type_vocab_size" in recipe.write:
        fields |= {"type_vocab_size": 2}
    if recipe.model_type == "vit":
        fields |= {"patch_size": 4, "image_size": 8}
    if {"moe_intermediate_size", "num_local_experts"} & {pair.theirs for pair in recipe.fields}:
        fields |= {"num_experts": 4, "moe_intermediate_size": 8}
    if "hidden_act" in recipe.required:
        fields["hidden_act"] = recipe.required["hidden_act"]
    return recipe.heads[0].ours(recipe.config(**SIZES, **ALIBI, **fields))


@pytest.mark.parametrize("model_type", RECIPES)
def test_no_family_has_alibi(model_type):
    # DeepSeek's configuration cannot even be written without the ranks of its attention.
    with pytest.raises(ValueError, match="kv_lora_rank" if model_type == "deepseek_v3" else "position_type='alibi'"):
        to_hf(with_alibi(RECIPES[model_type]), model_type)


@pytest.mark.parametrize(
    ("name", "changes", "refused"),
    [
        ("BertForMaskedLM-0", norm_slots("pre"), "feed_forward_input_norm='layer_norm'"),
        ("BertForMaskedLM-0", {"layer_types": ["full_attention", "sliding_attention", "full_attention"],
                               "sliding_window": 3}, "layer_types="),
        ("BertForMaskedLM-0", {"hidden_dropout": 0.3}, "embedding_dropout="),
        ("BertModel-0", {"pooler_activation": "relu"}, "pooler_activation='relu'"),
        ("GPT2LMHeadModel-0", {"attention_scale": 0.7}, "attention_scale=0.7"),
        ("LlamaForCausalLM-0", {"query_key_norm": "rms_norm"}, "query_key_norm='rms_norm'"),
        ("Qwen2ForCausalLM-0", {"layer_types": ["linear_attention"] * 3}, "layer_types="),
        ("ViTForImageClassification-0", {"classifier_pooling": "mean"}, "classifier_pooling='mean'"),
    ],
)  # fmt: skip
def test_a_changed_configuration_is_refused(name, changes, refused):
    """By the field that the family lacks, rather than written as another model."""
    ours = our_model(their_model(CASE[name], dtype=torch.float32))
    config = type(ours.config)(**{**ours.config.to_dict(), **changes})
    with pytest.raises(ValueError, match=refused):
        to_hf(randomised(type(ours)(config)))


@pytest.mark.parametrize(
    ("name", "changes", "followed"),
    [
        ("BertForMaskedLM-0", {"hidden_dropout": 0.3, "embedding_dropout": 0.3}, {"hidden_dropout_prob": 0.3}),
        ("GPT2LMHeadModel-0", {"attention_dropout": 0.3}, {"attn_pdrop": 0.3}),
        ("LlamaForCausalLM-0", {"norm_eps": 0.3, "head_dim": 10}, {"rms_norm_eps": 0.3, "head_dim": 10}),
        ("MistralForCausalLM-0", {"sliding_window": 7}, {"sliding_window": 7}),
        ("Qwen2ForCausalLM-0", {"layer_types": ["full_attention", "full_attention", "sliding_attention"],
                                "sliding_window": 5},
         {"sliding_window": 5, "use_sliding_window": True,
          "layer_types": ["full_attention", "full_attention", "sliding_attention"]}),
        ("ModernBertForMaskedLM-0", {"sliding_window": 5}, {"local_attention": 10, "sliding_window": 5}),
        ("CamembertForMaskedLM-0", {"max_position_embeddings": 20}, {"max_position_embeddings": 22}),
    ],
)  # fmt: skip
def test_a_changed_configuration_is_followed(name, changes, followed):
    case = CASE[name]
    ours = our_model(their_model(case, dtype=torch.float32))
    changed = randomised(type(ours)(type(ours.config)(**{**ours.config.to_dict(), **changes})))
    theirs = to_hf(changed)
    assert {field: getattr(theirs.config, field) for field in followed} == followed
    their_inputs, our_inputs = inputs(case, theirs)
    rows = our_inputs["attention_mask"].bool()
    with torch.no_grad():
        expected, actual = theirs(**their_inputs).logits[rows], changed(**our_inputs).logits[rows]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_value_that_their_configuration_refuses():
    ours = FratrieEncoderModel(FratrieEncoderConfig(**SIZES, type_vocab_size=2, pad_token_id=None))
    with pytest.raises(ValueError, match="roberta: positions begin behind pad_token_id=None"):
        to_hf(ours, "roberta")
    with pytest.raises(ValueError, match=r"no 'qwen3_moe' model like it: .*moe_intermediate_size"):
        to_hf(FratrieDecoderForCausalLM(FratrieDecoderConfig(**LLAMA_LIKE)), "qwen3_moe")


def test_strange_weights_are_named():
    theirs = BertModel(BertConfig(**SIZES))
    theirs.adapter = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match=r"BertModel: FratrieEncoderModel has no .* adapter\.weight"):
        from_hf(theirs)
    ours = FratrieEncoderModel(FratrieEncoderConfig(**SIZES, type_vocab_size=2))
    ours.register_parameter("extra", torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match=r"FratrieEncoderModel: BertModel has no .* extra"):
        to_hf(ours, "bert")


def test_a_second_name_of_a_tied_weight_is_no_strange_weight():
    recipe = rule_recipe((Weight("their", "our"),))
    weight = torch.ones(3, 2)
    states = {"their.weight": weight, "copy.weight": weight}
    assert recipe.read_weights(states, HEAD, None).keys() == {"our.weight"}
    with pytest.raises(ValueError, match=r"has no counterpart for the weights copy\.weight\.$"):
        recipe.read_weights({**states, "copy.weight": weight.clone()}, HEAD, None)


HEAD = Head("BertModel", FratrieEncoderModel)


def rule_recipe(rules):
    return Recipe("bert", FratrieEncoderConfig, fields=(), weights=rules, heads=(HEAD,))


@st.composite
def rules(draw):
    """Rules with distinct names, with or without layers, and tensors that their side may hold."""
    lines, states = [], {}
    for number in range(draw(st.integers(1, 4))):
        parts = draw(st.integers(1, 3))
        layers = draw(st.sampled_from(["", ".*"]))
        names = tuple(f"our{number}{layers}.part{part}" for part in range(parts))
        line = Weight(f"their{number}{layers}.x", names, transposed=draw(st.booleans()), leading=draw(st.booleans()))
        size, rows = draw(st.integers(1, 4)), parts * draw(st.integers(1, 3))
        for layer in draw(st.sets(st.integers(0, 12), min_size=1, max_size=3)) if layers else [""]:
            for ending in draw(st.sets(st.sampled_from(["", ".weight", ".bias"]), min_size=1)):
                shape = (rows,) if ending == ".bias" else (size, rows) if line.transposed else (rows, size)
                tensor = torch.randn((1, *shape) if line.leading else shape)
                states[line.theirs.replace("*", str(layer)) + ending] = tensor
        lines.append(line)
    return rule_recipe(tuple(lines)), states


@settings(max_examples=60, deadline=None)
@given(rules())
def test_weights_there_and_back(drawn):
    recipe, theirs = drawn
    ours = recipe.read_weights(theirs, HEAD, None)
    assert len(ours) >= len(theirs) and all(tensor.is_contiguous() for tensor in ours.values())
    back = recipe.write_weights(ours, HEAD, None)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], tensor) and back[name].is_contiguous() for name, tensor in theirs.items())
    again = recipe.read_weights(back, HEAD, None)
    assert again.keys() == ours.keys() and all(torch.equal(again[name], ours[name]) for name in ours)


def test_what_a_rule_does_to_a_tensor():
    """Stacked rows in the order of the names; a transposed matrix, whose bias is not; a first dimension."""
    line = Weight("their", ("a", "b"), transposed=True)
    matrix, bias = torch.arange(8.0).reshape(2, 4), torch.arange(4.0)
    recipe = rule_recipe((line,))
    ours = recipe.read_weights({"their.weight": matrix, "their.bias": bias}, HEAD, None)
    assert ours["a.weight"].tolist() == [[0, 4], [1, 5]] and ours["b.weight"].tolist() == [[2, 6], [3, 7]]
    assert ours["a.bias"].tolist() == [0, 1] and ours["b.bias"].tolist() == [2, 3]
    assert Weight("x", "y", leading=True).read(matrix[None])[0].tolist() == matrix.tolist()
    assert Weight("x", "y", leading=True).write([bias]).shape == (1, 4)


def test_rows_that_lie_by_group_come_to_lie_by_part():
    """Of each of two heads a query, a key of two rows and a gate: two matrices of ours, one of which stacks parts."""
    line = Weight(
        "their", ("states", "gate"), groups=lambda theirs: Groups(theirs.num_attention_heads, ((1, 2), (1,)))
    )
    recipe, config = rule_recipe((line,)), BertConfig(num_attention_heads=2)
    rows = torch.arange(8.0)
    theirs = {"their.weight": rows[:, None] + torch.tensor([0.0, 0.5]), "their.bias": rows}
    ours = recipe.read_weights(theirs, HEAD, config)
    assert ours["states.bias"].tolist() == [0, 4, 1, 2, 5, 6] and ours["gate.bias"].tolist() == [3, 7]
    assert ours["states.weight"][:, 1].tolist() == [0.5, 4.5, 1.5, 2.5, 5.5, 6.5]
    back = recipe.write_weights(ours, HEAD, config)
    assert back.keys() == theirs.keys() and all(torch.equal(back[name], theirs[name]) for name in theirs)


def test_a_rule_holds_for_its_configurations_alone():
    line = Weight("their", "our", when={"is_decoder": True})
    assert not line.holds(BertConfig()) and line.holds(BertConfig(is_decoder=True))
    with pytest.raises(ValueError, match=r"has no counterpart for the weights their\.weight\.$"):
        rule_recipe((line,)).read_weights({"their.weight": torch.ones(1)}, HEAD, BertConfig())


ROPE = {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0}
# What ours has one word for, or none: fields that the way back has to remember.
REMEMBERED = [
    ("BertForMaskedLM-0", {"chunk_size_feed_forward": 3}),
    ("BertForMaskedLM-0", {"position_embedding_type": "absolute", "task_specific_params": {"a": {"b": 1}}}),
    ("BertForSequenceClassification-0", {"classifier_dropout": 0.0, "hidden_dropout_prob": 0.0}),
    ("BertForSequenceClassification-0", {"classifier_dropout": None, "hidden_dropout_prob": 0.2}),
    ("ModernBertForMaskedLM-0", {"global_attn_every_n_layers": 3, "layer_norm_eps": 1e-5}),
    ("ModernBertForMaskedLM-0", {"layer_types": ["full_attention"] * 3, "local_rope_theta": 77.0}),
    ("GPT2LMHeadModel-0", {"n_inner": 64}),
    ("GPT2LMHeadModel-0", {"n_inner": None, "n_ctx": 1024}),
    ("Qwen2ForCausalLM-0", {"head_dim": 4}),
    ("Qwen2ForCausalLM-0", {"hidden_size": 18}),
    ("Qwen3MoeForCausalLM-0", {"head_dim": 4}),
    ("Qwen3MoeForCausalLM-0", {"mlp_only_layers": [0, 1, 2]}),
    ("MixtralForCausalLM-0", {"head_dim": 4, "rope_parameters": {**ROPE, "rope_type": "yarn"}}),
    ("MixtralForCausalLM-0", {"router_aux_loss_coef": 0.3, "num_experts_per_tok": 3}),
    ("T5ForConditionalGeneration-0", {"bos_token_id": 2, "n_positions": 512, "output_past": True}),
    ("T5ForConditionalGeneration-0", {"feed_forward_proj": "gated-gelu_new", "decoder_start_token_id": 0}),
    ("T5EncoderModel-0", {"num_decoder_layers": 6}),
    ("ViTForImageClassification-0", {"pooler_output_size": 12, "image_size": [8, 8]}),
]


@pytest.mark.parametrize(("name", "fields"), REMEMBERED)
def test_what_ours_has_no_word_for_is_remembered(name, fields):
    case = CASE[name]
    theirs = their_model(case, dtype=torch.float32, **fields)
    back = to_hf(our_model(theirs))
    assert back.config.to_dict() | UNCOMPARED == theirs.config.to_dict() | UNCOMPARED


UNCOMPARED = dict.fromkeys(("_name_or_path", "architectures", "dtype"))


def test_what_is_remembered_gives_way_to_what_changed():
    ours = our_model(their_model(CASE["GPT2LMHeadModel-0"], dtype=torch.float32, n_ctx=1024))
    assert ours.config.foreign_fields == {"model_type": "gpt2", "n_inner": None, "n_ctx": 1024}
    changed = type(ours)(type(ours.config)(**{**ours.config.to_dict(), "intermediate_size": 24}))
    back = to_hf(changed).config
    assert (back.n_inner, back.n_ctx) == (24, 1024)
    assert not hasattr(to_hf(our_model(their_model(CASE["LlamaForCausalLM-0"])), "mistral").config, "pretraining_tp")


def test_what_the_recipe_does_not_write_stays_when_ours_has_changed():
    ours = our_model(their_model(CASE["Qwen3MoeForCausalLM-1"], dtype=torch.float32, chunk_size_feed_forward=2))
    changed = type(ours)(type(ours.config)(**{**ours.config.to_dict(), "mlp_layer_types": ["sparse"] * 3}))
    back = to_hf(changed).config
    assert (back.decoder_sparse_step, back.mlp_only_layers, back.chunk_size_feed_forward) == (1, [], 2)


def test_the_weight_of_the_balancing_loss_follows_ours():
    ours = our_model(their_model(CASE["MixtralForCausalLM-0"], router_aux_loss_coef=0.5))
    for weight in (0.0, 0.7):
        ours.config.router_aux_loss_coef = weight
        assert to_hf(ours).config.router_aux_loss_coef == pytest.approx(weight / 2)


def test_losses_of_the_router_that_theirs_cannot_say_are_told(caplog):
    ours = our_model(their_model(CASE["MixtralForCausalLM-0"], dtype=torch.float32))
    transformers.utils.logging.enable_propagation()
    try:
        to_hf(ours)
        assert "has no place" not in caplog.text
        ours.config.router_z_loss_coef, ours.config.router_aux_loss_scope = 0.1, "layer"
        to_hf(ours)
    finally:
        transformers.utils.logging.disable_propagation()
    for field in ("router_z_loss_coef=0.1", "router_aux_loss_scope='layer'"):
        assert f"{field} has no place in a 'mixtral' model" in caplog.text


def test_a_pattern_of_layers_that_changed():
    ours = our_model(their_model(CASE["Qwen3MoeForCausalLM-1"], dtype=torch.float32))
    assert ours.config.mlp_layer_types == ["dense", "sparse", "dense"]
    for pattern in (["sparse"] * 3, ["sparse", "dense", "dense"]):
        changed = type(ours)(type(ours.config)(**{**ours.config.to_dict(), "mlp_layer_types": pattern}))
        assert our_model(to_hf(changed)).config.mlp_layer_types == pattern


def test_the_length_that_relative_positions_are_meant_for_is_free():
    ours = our_model(their_model(CASE["T5EncoderModel-0"], dtype=torch.float32))
    ours.config.max_position_embeddings = 40
    assert type(to_hf(ours)).__name__ == "T5EncoderModel"


@pytest.mark.parametrize("model_type", ["bart", "marian"])
def test_initial_weights_of_stacks_and_output_layer(model_type):
    ours = read_config(model_type, {"init_std": 0.3})
    assert {config.initializer_range for config in (ours, *ours.stacks)} == {0.3}


def test_vit_sides():
    assert read_config("vit", {"patch_size": [16, 16]}).max_position_embeddings == (224 // 16) ** 2 + 1
    with pytest.raises(ValueError, match=r"vit: image_size=\[8, 16\] is not a square"):
        read_config("vit", {"image_size": [8, 16]})


@pytest.mark.parametrize("name", ["MistralForCausalLM-0", "LlamaForCausalLM-1"])
def test_a_model_without_experts_is_no_mixtral(name):
    with pytest.raises(ValueError, match="num_experts=0"):
        to_hf(our_model(their_model(CASE[name], dtype=torch.float32)), "mixtral")


def test_an_encoder_without_token_types_is_no_bert():
    ours = FratrieEncoderModel(FratrieEncoderConfig(**SIZES))
    with pytest.raises(ValueError, match="bert: type_vocab_size=0 must be at least 1"):
        to_hf(ours, "bert")


def test_a_model_that_was_cut_is_refused():
    theirs = their_model(CASE["BertModel-0"])
    del theirs.encoder.layer[-1]
    with pytest.raises(ValueError, match=r"weights of this BertModel are not those of its configuration: layers\.2"):
        from_hf(theirs)


def test_rotary_parameters_that_their_class_ignores_are_refused():
    case = CASE["ModernBertModel-0"]
    half = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    theirs = case.recipe.their_config(
        **{**case.fields, "rope_parameters": {"full_attention": half, "sliding_attention": half}}
    )
    with pytest.raises(ValueError, match=r"modernbert: rope_parameters with partial_rotary_factor=0\.5"):
        case.recipe.read_config(theirs, case.head)


def test_rotary_parameters_by_layer_type_are_refused_where_theirs_has_one_set():
    rope = {"rope_type": "default", "rope_theta": 100.0}
    config = FratrieDecoderConfig(
        **{**LLAMA_LIKE, "attention_bias": True},
        sliding_window=3,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters={"full_attention": rope, "sliding_attention": rope},
    )
    with pytest.raises(ValueError, match=r"rope_parameters=.* must be one set"):
        to_hf(FratrieDecoderModel(config), "qwen2")


def test_each_weight_keeps_its_dtype():
    case = CASE["LlamaForCausalLM-0"]
    theirs = their_model(case, dtype=torch.bfloat16)
    theirs.model.norm.float()
    ours = our_model(theirs)
    assert ours.model.norm.weight.dtype == torch.float32 and ours.lm_head.weight.dtype == torch.bfloat16
    back = to_hf(ours)
    for name, weight in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight) and back.state_dict()[name].dtype == weight.dtype, name


def test_what_has_no_weights_or_is_not_ours_is_refused():
    case = CASE["BertModel-0"]
    theirs = their_model(case)
    with pytest.raises(ValueError, match="BertModel is not one of our models"):
        to_hf(theirs)
    with pytest.raises(ValueError, match="FratrieEncoderModel is already one of our models"):
        from_hf(our_model(theirs))
    with pytest.raises(ValueError, match="BertModel is on the meta device"):
        from_hf(theirs.to("meta"))
    with pytest.raises(ValueError, match=r"Linear is not a model of transformers.*merge_and_unload"):
        from_hf(torch.nn.Linear(2, 2))


def test_what_the_other_side_has_no_place_for_is_told(caplog):
    case = CASE["BertForSequenceClassification-0"]
    ours = our_model(their_model(case))
    ours.config.label_thresholds = [0.2, 0.3, 0.4]
    transformers.utils.logging.enable_propagation()
    try:
        to_hf(ours)
    finally:
        transformers.utils.logging.disable_propagation()
    assert "label_thresholds=[0.2, 0.3, 0.4] has no place in a 'bert' model" in caplog.text


@pytest.mark.parametrize(
    ("name", "tokens", "used"),
    [
        ("GPT2LMHeadModel-0", {"bos_token_id": 50256, "eos_token_id": 50256}, {}),
        ("GPT2Model-0", {"pad_token_id": -1, "eos_token_id": [50256, 3]}, {"eos_token_id": [3]}),
        ("LlamaForCausalLM-0", {"bos_token_id": 31, "eos_token_id": 30}, {"eos_token_id": 30}),
        ("BertModel-0", {"bos_token_id": 99}, {}),
        ("BartForConditionalGeneration-0", {"bos_token_id": 31}, {}),
        ("MarianMTModel-1", {"bos_token_id": 30}, {}),  # of the decoder's 29 tokens
        ("T5EncoderModel-0", {"eos_token_id": 31}, {}),
    ],
)
def test_special_tokens_outside_the_vocabulary_are_kept_and_not_used(name, tokens, used, tmp_path, caplog):
    case = CASE[name]
    theirs = their_model(case, **tokens)
    theirs.save_pretrained(tmp_path)
    transformers.utils.logging.enable_propagation()
    try:
        models = our_model(theirs), case.head.ours.from_pretrained(tmp_path)
    finally:
        transformers.utils.logging.disable_propagation()
    for ours in models:
        assert {token: getattr(ours.config, token) for token in tokens} == dict.fromkeys(tokens) | used
        back = to_hf(ours).config
        assert {token: getattr(back, token) for token in tokens} == tokens
    for token, value in tokens.items():
        assert (f"{token}={value} lies outside the vocabulary" in caplog.text) == (used.get(token) != value)


def test_an_unusable_start_of_a_decoder_is_refused():
    with pytest.raises(ValueError, match="decoder_start_token_id=31 lies outside the vocabulary"):
        from_hf(their_model(CASE["BartForConditionalGeneration-0"], decoder_start_token_id=31))


def test_a_special_token_is_taken_away_by_an_argument(tmp_path):
    theirs = their_model(CASE["GPT2LMHeadModel-0"])
    theirs.save_pretrained(tmp_path)
    ours = FratrieDecoderForCausalLM.from_pretrained(tmp_path, bos_token_id=None)
    assert ours.config.bos_token_id is None and ours.config.eos_token_id == 1
    assert to_hf(ours).config.bos_token_id is None


def test_a_changed_table_of_sinusoids_is_refused():
    theirs = their_model(CASE["MarianMTModel-0"])
    our_model(theirs.bfloat16().float())  # a time in half precision has rounded it, no more
    theirs.model.decoder.embed_positions.weight.data[3, 5] += 0.05
    with pytest.raises(ValueError, match=r"decoder\.embed_positions has been changed: ours computes it"):
        from_hf(theirs)


def test_arguments_of_theirs_that_ours_does_not_read_are_refused():
    ids = torch.tensor([[3, 4, 5]])
    gpt2 = our_model(their_model(CASE["GPT2LMHeadModel-0"]))
    for types in (ids, ids * 0):  # whose embeddings theirs adds, those of zeros as well
        for cached in ({}, {"use_cache": True, "cache": gpt2(ids).cache}):
            with pytest.raises(ValueError, match="takes no token_type_ids: leave it out"):
                gpt2(ids, token_type_ids=types, **cached)
    vit = our_model(their_model(CASE["ViTModel-0"]))
    pixels = torch.zeros(1, 3, 8, 8, dtype=torch.float64)
    vit(pixel_values=pixels, bool_masked_pos=None, interpolate_pos_encoding=False)
    for name, value in (("bool_masked_pos", torch.ones(1, 4, dtype=torch.bool)), ("interpolate_pos_encoding", True)):
        with pytest.raises(ValueError, match=f"FratrieEncoderModel takes no {name}: leave it out"):
            vit(pixel_values=pixels, **{name: value})
    with pytest.raises(ValueError, match="takes no head_mask"):
        gpt2(ids, head_mask=torch.ones(3, 4))


def test_a_decoder_without_inputs_says_what_to_give():
    theirs = their_model(CASE["BartForConditionalGeneration-0"])
    ours, ids = our_model(theirs), torch.tensor([[3, 4, 5]])
    with pytest.raises(ValueError, match=r"decoder_input_ids .* prepare_decoder_input_ids_from_labels"):
        ours(ids)
    shifted = ours.prepare_decoder_input_ids_from_labels(ids)
    torch.testing.assert_close(ours(ids, decoder_input_ids=shifted).logits, theirs(ids).logits)
