"""What every model keeps, whatever its configuration: the contract of Hugging Face's own common model tests."""

import copy
import fnmatch
import re
from typing import Any

import pytest
import torch
from combinations import (
    CASES,
    COMBINATIONS,
    DECODER,
    ENCODER,
    HEADS,
    IMAGE,
    LENGTHS,
    SEQ2SEQ,
    SIBLINGS,
    Case,
    case_of,
    cases,
    documents,
    gives_weights,
    layer_types,
    markdown_table,
    output_mask,
    padded_inputs,
    spread,
    stack_configs,
    training_inputs,
    with_global_tokens,
)
from transformers.cache_utils import DynamicCache

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_case_of_text = pytest.mark.parametrize("case", cases(), ids=str)
every_sibling = pytest.mark.parametrize("sibling", SIBLINGS)
every_head = pytest.mark.parametrize(
    ("sibling", "head"), [(sibling, head) for sibling in HEADS for head in HEADS[sibling]]
)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def lengths(case: Case) -> tuple[int, ...]:
    """How many vectors pass each stack."""
    return {SEQ2SEQ: (9, 7), IMAGE: (10,)}.get(case.sibling, (9,))


def test_combinations_are_named_once_and_all_in_the_table():
    names = [combination.name for combination in COMBINATIONS]
    assert len(names) == len(set(names))
    assert all(f"`{name}`" in markdown_table() for name in names)
    assert len({repr(case.config().to_dict()) for case in CASES}) == len(CASES)


@every_case
def test_output_shapes(case: Case):
    inputs = padded_inputs(case.sibling)
    shape = output_mask(case.sibling, inputs).shape
    config = case.config()
    with torch.no_grad():
        logits = case.build()(**inputs).logits
        states = case.build("base")(**inputs).last_hidden_state
    assert logits.shape == (*shape, config.num_labels if case.sibling == IMAGE else config.vocab_size)
    assert states.shape == (shape[0], lengths(case)[-1], stack_configs(config)[-1].hidden_size)
    assert logits.isfinite().all() and states.isfinite().all()
    assert logits.std() > 0.05


@every_case
def test_every_parameter_gets_a_gradient(case: Case):
    model = case.build().train()
    inputs = training_inputs(case.sibling)
    if getattr(stack_configs(model.config)[0], "type_vocab_size", 0):
        inputs["token_type_ids"] = (inputs["input_ids"] % 2).long()
    model(**with_global_tokens(model, inputs)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # What is added to all keys alike leaves a softmax as it is; the second of two stacks has no global tokens.
        if not name.endswith(("k_proj.bias", "k_global_proj.bias")) and not re.match(r".*decoder.*_global_", name):
            assert parameter.grad.abs().max() > 0, name


@every_case
def test_three_steps_lower_the_loss(case: Case):
    model = case.build()
    inputs = training_inputs(case.sibling)
    before = model(**inputs).loss.item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()
    assert model.eval()(**inputs).loss.item() < before - 0.05


@every_case
@torch.no_grad()
def test_a_row_alone_equals_the_row_in_a_batch_padded_on_either_side_by_any_token(case: Case):
    model, caching = case.build(), [{}]
    if case.sibling in (DECODER, SEQ2SEQ):
        caching = [{"use_cache": False}, {"use_cache": True}]
    for kwargs in caching:
        rows = [padded_inputs(case.sibling, rows=slice(row, row + 1)) for row in range(len(LENGTHS))]
        alone = torch.cat([model(**row, **kwargs).logits[output_mask(case.sibling, row)] for row in rows])
        for side in ("right", "left"):
            inputs = padded_inputs(case.sibling, side)
            for name in (name for name in inputs if name.endswith("input_ids")):
                inputs[name][inputs[name.replace("input_ids", "attention_mask")] == 0] = 5
            close(model(**inputs, **kwargs).logits[output_mask(case.sibling, inputs)], alone)


@every_case
def test_eager_equals_sdpa_forward_and_backward(case: Case):
    inputs = training_inputs(case.sibling)
    models = [case.build(attn_implementation=name) for name in ("eager", "sdpa")]
    for model, name in zip(models, ("eager", "sdpa"), strict=True):
        assert {config._attn_implementation for config in stack_configs(model.config)} == {name}
        model(**inputs).loss.backward()
    mask = output_mask(case.sibling, inputs)
    close(models[0](**inputs).logits[mask], models[1](**inputs).logits[mask])
    pairs = zip(models[0].named_parameters(), models[1].parameters(), strict=True)
    for (name, parameter), other in pairs:
        if not name.endswith("k_proj.bias"):
            close(parameter.grad, other.grad, 1e-4)


@pytest.mark.parametrize("case", cases(names=("padding_kept", "sliding_alibi", "t5", "all_mixers")), ids=str)
@torch.no_grad()
def test_eager_equals_sdpa_where_a_query_sees_no_key(case: Case):
    """Before left padding ends there is nothing to see: such rows are zero in every implementation."""
    inputs = padded_inputs(case.sibling, "left")
    inputs["attention_mask"][2] = 0
    kwargs = {} if case.sibling == ENCODER else {"use_cache": True}
    eager, sdpa = (
        case.build(attn_implementation=name, unpad_inputs=False)(**inputs, **kwargs).logits
        for name in ("eager", "sdpa")
    )
    close(eager, sdpa)


@every_case
@torch.no_grad()
def test_hidden_states_are_one_a_layer_and_the_embeddings(case: Case):
    model = case.build("base")
    inputs = padded_inputs(case.sibling)
    outputs = model(**inputs, output_hidden_states=True)
    if case.sibling == SEQ2SEQ:
        recorded = [outputs.encoder_hidden_states, outputs.decoder_hidden_states]
        last = [outputs.encoder_last_hidden_state, outputs.last_hidden_state]
    else:
        recorded, last = [outputs.hidden_states], [outputs.last_hidden_state]
    for config, states, final, length in zip(stack_configs(model.config), recorded, last, lengths(case), strict=True):
        assert len(states) == config.num_hidden_layers + 1
        assert {state.shape for state in states} == {(3, length, config.hidden_size)}
        assert torch.equal(states[-1], final)
        assert not torch.allclose(states[0], states[1])


@every_case
@torch.no_grad()
def test_attentions_are_one_a_softmax_layer_and_sum_to_one(case: Case):
    model = case.build("base", attn_implementation="eager")
    inputs = padded_inputs(case.sibling)
    outputs = model(**inputs, output_attentions=True)
    if case.sibling == SEQ2SEQ:
        input_mask, mask = inputs["attention_mask"].bool(), inputs["decoder_attention_mask"].bool()
        encoder, decoder = stack_configs(model.config)
        check_attentions(encoder, outputs.encoder_attentions, input_mask, input_mask, causal=False)
        check_attentions(decoder, outputs.decoder_attentions, mask, mask, causal=True)
        assert len(outputs.cross_attentions) == decoder.num_hidden_layers
        full = copy.copy(decoder)
        full.layer_types = ["full_attention"] * decoder.num_hidden_layers
        full.mixer_types = ["softmax"] * decoder.num_hidden_layers
        check_attentions(full, outputs.cross_attentions, mask, input_mask, causal=False)
    else:
        mask = inputs["attention_mask"].bool() if case.sibling != IMAGE else torch.ones(3, 10, dtype=torch.bool)
        check_attentions(model.config, outputs.attentions, mask, mask, causal=case.sibling == DECODER)


def check_attentions(config: Any, attentions: Any, queries: torch.Tensor, keys: torch.Tensor, causal: bool):
    layers = zip(config.layer_types, config.mixers, gives_weights(config), strict=True)
    kinds = [(kind, mixer) for kind, mixer, gives in layers if gives]
    assert len(attentions or ()) == len(kinds)
    for (kind, mixer), weights in zip(kinds, attentions or (), strict=True):
        assert weights.shape == (3, config.num_attention_heads, queries.shape[1], keys.shape[1])
        rows = weights.transpose(1, 2)[queries]
        close(rows.sum(-1), torch.ones_like(rows[..., 0]))
        seen = queries[:, :, None] & keys[:, None, :]
        if causal:
            seen = seen & torch.ones_like(seen[0]).tril()
        if kind == "sliding_attention" or mixer.takes_global_tokens:
            reach = config.sliding_window - (1 if causal else 0)
            places = torch.arange(keys.shape[1])
            seen = seen & ((places[:, None] - places).abs() <= reach)
        forbidden = ~seen[:, None].expand_as(weights) & queries[:, None, :, None]
        assert not weights[forbidden].any()
        if not mixer.adds_to_scores:  # else some may be hidden by what it adds
            assert (weights[seen[:, None].expand_as(weights)] > 0).all()


@torch.no_grad()
def test_attentions_and_hidden_states_do_not_change_the_output():
    for case in cases(names=("default", "all_mixers", "shared_experts")):
        model = case.build(attn_implementation="eager")
        inputs = padded_inputs(case.sibling)
        plain = model(**inputs)
        recorded = model(**inputs, output_attentions=True, output_hidden_states=True)
        mask = output_mask(case.sibling, inputs)
        close(recorded.logits[mask], plain.logits[mask])


@every_case_of_text
@torch.no_grad()
def test_embeddings_as_input_equal_their_ids(case: Case):
    model = case.build()
    inputs = padded_inputs(case.sibling)
    expected = model(**inputs).logits
    embedded = dict(inputs)
    embedded["inputs_embeds"] = model.get_input_embeddings()(embedded.pop("input_ids"))
    if case.sibling == SEQ2SEQ:
        embed = model.get_decoder().get_input_embeddings()
        embedded["decoder_inputs_embeds"] = embed(embedded.pop("decoder_input_ids"))
    mask = output_mask(case.sibling, inputs)
    close(model(**embedded).logits[mask], expected[mask])


@every_sibling
def test_ids_and_embeddings_together_or_neither_are_refused(sibling: str):
    model = case_of(sibling).build("base")
    inputs = padded_inputs(sibling)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(**inputs, inputs_embeds=torch.zeros(3, 9, 32))
    del inputs["input_ids"]
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(**inputs)


@every_head
@torch.no_grad()
def test_return_dict_false_gives_the_same_as_a_tuple(sibling: str, head: str):
    model = case_of(sibling).build(head)
    inputs = padded_inputs(sibling)
    named = model(**inputs, output_hidden_states=True)
    plain = model(**inputs, output_hidden_states=True, return_dict=False)
    assert isinstance(plain, tuple) and len(plain) == len(named.to_tuple())
    assert torch.equal(plain[0], named[0])


@every_head
@torch.no_grad()
def test_the_configuration_can_ask_for_tuples(sibling: str, head: str):
    model = case_of(sibling).build(head)
    inputs = padded_inputs(sibling)
    expected = model(**inputs)[0]
    model.config.return_dict = False
    outputs = model(**inputs)
    assert isinstance(outputs, tuple)
    assert torch.equal(outputs[0], expected)


@pytest.mark.parametrize("sibling", [DECODER, SEQ2SEQ])
@pytest.mark.parametrize("head", ["language_model", "base"])
@torch.no_grad()
def test_the_old_name_of_the_cache_is_still_accepted(sibling: str, head: str):
    model = case_of(sibling).build(head)
    ids, other = documents((4, 5))
    inputs = {"input_ids": ids[None]}
    inputs |= {"decoder_input_ids": other[None]} if sibling == SEQ2SEQ else {}
    key = "decoder_input_ids" if sibling == SEQ2SEQ else "input_ids"
    whole = model(**inputs)[0]
    past = model(**{**inputs, key: inputs[key][:, :-1]}, use_cache=True)
    assert past.past_key_values is past.cache is past["past_key_values"]
    with pytest.warns(FutureWarning, match="past_key_values"):
        last = model(**{**inputs, key: inputs[key][:, -1:]}, past_key_values=past.cache)[0]
    close(last[:, -1], whole[:, -1])


@torch.no_grad()
def test_the_old_name_of_the_cache_is_accepted_by_the_decoders_classifier():
    model = case_of(DECODER).build("sequence_classification", pad_token_id=None)
    (ids,) = documents((5,))
    cache = DynamicCache(config=model.config)
    model.model(ids[None, :-1], cache=cache, use_cache=True)
    with pytest.warns(FutureWarning, match="past_key_values"):
        logits = model(ids[None, -1:], past_key_values=cache).logits
    close(logits, model(ids[None]).logits)


@pytest.mark.parametrize(
    "case",
    [case for case in cases() if getattr(case.config(), "share_embeddings", True)],
    ids=str,
)
def test_resized_embeddings_reload_and_take_new_tokens(case: Case, tmp_path):
    model = case.build()
    inputs = padded_inputs(case.sibling)
    mask = output_mask(case.sibling, inputs)
    with torch.no_grad():
        before = model(**inputs).logits
    old, new = model.config.vocab_size, model.config.vocab_size + 6
    tied = model.config.tie_word_embeddings
    assert model.resize_token_embeddings(new).weight.shape[0] == new
    assert {config.vocab_size for config in [model.config, *stack_configs(model.config)]} == {new}
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    with torch.no_grad():
        close(model(**inputs).logits[mask][:, :old], before[mask])
    inputs["input_ids"][0, 0] = new - 1
    with torch.no_grad():
        after = model(**inputs).logits
    assert after.shape[-1] == new and after[mask].isfinite().all()
    model.save_pretrained(tmp_path)
    reloaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    state = reloaded.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())
    with torch.no_grad():  # a kernel may add up weights at another address of memory in another order
        close(reloaded.eval()(**inputs).logits, after, 1e-6)
    assert (reloaded.get_output_embeddings().weight is reloaded.get_input_embeddings().weight) == tied


def test_resizing_resizes_the_bias_of_the_masked_language_model():
    for name in ("default", "untied"):
        model = case_of(ENCODER, name).build()
        bias = model.lm_head.bias.detach().clone()
        model.resize_token_embeddings(80)
        assert model.lm_head.bias.shape == (80,)
        assert torch.equal(model.lm_head.bias[: len(bias)], bias)
        model.resize_token_embeddings(60)
        assert model.lm_head.bias.shape == (60,) and model.lm_head.out_features == 60


def test_resizing_reaches_both_stacks_and_the_head_of_an_encoder_decoder():
    for name in ("default", "untied"):
        model = case_of(SEQ2SEQ, name).build()
        model.resize_token_embeddings(80)
        encoder, decoder = model.get_encoder().embed_tokens, model.get_decoder().embed_tokens
        assert encoder.weight is decoder.weight
        assert encoder.num_embeddings == decoder.num_embeddings == model.lm_head.out_features == 80


def test_resizing_two_vocabularies_at_once_is_refused():
    model = case_of(SEQ2SEQ, "separate_embeddings").build()
    with pytest.raises(ValueError, match="share_embeddings=False"):
        model.resize_token_embeddings(80)


# An encoder-decoder and images compile what stacks compile: of them only what they do not show, and the default.
SEEN_IN_TRAINING = ("dropouts", "perceptron_head", "sparse_prediction")
COMPILABLE = [
    *spread([c for c in cases(ENCODER, DECODER) if c.name not in SEEN_IN_TRAINING]),
    *(c for c in cases(SEQ2SEQ) if c.combination.siblings == (SEQ2SEQ,) or c.name in ("default", "all_mixers")),
    *cases(IMAGE, names=("vit", "vit_rotary_experts")),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILABLE, ids=str)
@torch.no_grad()
def test_forward_compiles_into_one_graph(case: Case):
    torch._dynamo.reset()
    model = case.build()
    if "sparse" in [kind for config in stack_configs(model.config) for kind in config.mlp_layer_types]:
        model.set_experts_implementation("batched_mm")
    inputs = padded_inputs(case.sibling)
    mask = output_mask(case.sibling, inputs)
    kwargs = {"use_cache": False} if case.sibling in (DECODER, SEQ2SEQ) else {}
    # Run first without the compiler, which cannot trace the laying of the hooks that record router logits.
    expected = model(**inputs, **kwargs).logits
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    close(compiled(**inputs, **kwargs).logits[mask], expected[mask])


def packed_row(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.cat(rows)[None],
        "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
    }


@pytest.mark.parametrize("case", cases(ENCODER, DECODER), ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_packed_documents_equal_separate_ones_with_the_default_use_of_the_cache(case: Case, training: bool):
    if training and case.name == "dropouts":
        model = case.build(embedding_dropout=0.0, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
    else:
        model = case.build()
    model.train(training)
    rows = documents()
    with torch.no_grad():
        packed = model(**packed_row(rows))
        separate = torch.cat([model(input_ids=row[None]).logits[0] for row in rows])
    close(packed.logits[0], separate)
    if case.sibling == DECODER:
        assert packed.cache is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sibling", "name", "said_by"),
    [  # every two of the choices meet
        (ENCODER, "default", "position_ids"),
        (ENCODER, "linear", "cu_seq_lens"),
        (DECODER, "default", "cu_seq_lens"),
        (DECODER, "linear", "position_ids"),
    ],
)
@torch.no_grad()
def test_packed_documents_do_not_leak_when_compiled(sibling: str, name: str, said_by: str):
    """A compiler cannot look for the documents of a row, yet it keeps them apart."""
    torch._dynamo.reset()
    model = case_of(sibling, name).build()
    packed = packed_row(documents())
    if said_by == "cu_seq_lens":
        del packed["position_ids"]
        packed["cu_seq_lens_q"] = packed["cu_seq_lens_k"] = torch.tensor([0, 9, 15, 18], dtype=torch.int32)
    kwargs = {} if sibling == ENCODER else {"use_cache": False}
    expected = model(**packed, **kwargs).logits
    close(expected[0], torch.cat([model(row[None], **kwargs).logits[0] for row in documents()]))
    close(torch.compile(model, backend="eager")(**packed, **kwargs).logits, expected)


def test_a_cache_of_packed_rows_is_refused():
    model = case_of(DECODER).build()
    for asked in ({"use_cache": True}, {"cache": DynamicCache(config=model.config)}):
        with pytest.raises(ValueError, match=r"^Packed rows hold several documents.*: set use_cache=False\.$"):
            model(**packed_row(documents()), **asked)


def test_packed_rows_are_refused_by_a_decoder_that_attends_an_encoder():
    model = case_of(SEQ2SEQ).build()
    packed = packed_row(documents())
    with pytest.raises(
        ValueError, match=r"^Rows that hold several documents cannot attend one .*: pad them instead\.$"
    ):
        model(
            input_ids=documents()[0][None],
            decoder_input_ids=packed["input_ids"],
            decoder_position_ids=packed["position_ids"],
        )


@pytest.mark.parametrize("case", cases(ENCODER, DECODER, names=("default", "mixtral", "shared_experts")), ids=str)
def test_packed_training_loss_equals_the_padded_one(case: Case):
    model = case.build().train()
    rows = documents()
    padded = training_inputs(case.sibling)
    labels = torch.cat([row[: len(doc)] for row, doc in zip(padded["labels"], rows, strict=True)])
    packed = model(**packed_row(rows), labels=labels[None])
    close(packed.loss, model(**padded).loss)


@pytest.mark.parametrize("sibling", [*SIBLINGS, IMAGE])
def test_the_loss_is_divided_by_the_number_of_targets_of_the_global_batch(sibling: str):
    model = case_of(sibling).build()
    inputs = training_inputs(sibling)
    labels = inputs["labels"] if sibling != DECODER else inputs["labels"][:, 1:]
    targets = int((labels != -100).sum())
    close(model(**inputs, num_items_in_batch=torch.tensor(4 * targets)).loss * 4, model(**inputs).loss)


@pytest.mark.parametrize("sibling", [*SIBLINGS, IMAGE])
def test_router_losses_join_the_loss_in_training_and_where_they_are_asked_for(sibling: str):
    model = case_of(sibling, "vit_rotary_experts" if sibling == IMAGE else "shared_experts").build()
    inputs = training_inputs(sibling)
    evaluated, asked_for = (model(**inputs, output_router_logits=wanted) for wanted in (False, True))
    trained = model.train()(**inputs)
    close(asked_for.loss, trained.loss)
    coefficients = stack_configs(model.config)[0]
    extra = trained.loss - evaluated.loss
    stacks = 2 if sibling == SEQ2SEQ else 1
    expected = stacks * (
        coefficients.router_aux_loss_coef * trained.aux_loss + coefficients.router_z_loss_coef * trained.z_loss
    )
    close(extra, expected)
    assert extra > 0.005


@every_sibling
@torch.no_grad()
def test_router_logits_are_returned_on_request_one_a_sparse_layer(sibling: str):
    inputs = padded_inputs(sibling)
    names = ["encoder_router_logits", "decoder_router_logits"] if sibling == SEQ2SEQ else ["router_logits"]
    for name, wanted, layers in (("mixtral", None, 0), ("mixtral", True, 2), ("shared_experts", None, 1)):
        outputs = case_of(sibling, name).build()(**inputs, output_router_logits=wanted)
        for field in names:
            logits = getattr(outputs, field) or ()
            assert len(logits) == layers, (name, wanted, field)
            tokens = inputs["decoder_input_ids" if field[0] == "d" else "input_ids"].numel()
            assert all(layer.shape == (tokens, 4) for layer in logits)


@torch.no_grad()
def test_token_types_change_the_output_and_are_refused_where_the_model_has_none():
    inputs = padded_inputs(ENCODER)
    types = (torch.arange(9) > 3).long().expand(3, 9)
    model = case_of(ENCODER, "token_types").build()
    assert not torch.allclose(model(**inputs, token_type_ids=types).logits, model(**inputs).logits)
    close(model(**inputs, token_type_ids=0 * types).logits, model(**inputs).logits)
    with pytest.raises(ValueError, match="type_vocab_size"):
        case_of(ENCODER).build()(**inputs, token_type_ids=types)


@torch.no_grad()
def test_token_types_reach_the_encoder_of_an_encoder_decoder():
    model = case_of(SEQ2SEQ, "unequal_stacks").build()
    inputs = padded_inputs(SEQ2SEQ)
    types = (torch.arange(9) > 3).long().expand(3, 9)
    assert not torch.allclose(model(**inputs, token_type_ids=types).logits, model(**inputs).logits)


def test_sparse_prediction_scores_only_the_masked_rows_in_training_at_the_same_loss():
    model = case_of(ENCODER, "sparse_prediction").build()
    inputs = training_inputs(ENCODER)
    full, sparse = model(**inputs), model.train()(**inputs)
    masked = inputs["labels"] != -100
    close(sparse.logits, full.logits[masked])
    close(sparse.loss, full.loss)


@torch.no_grad()
def test_an_encoder_decoder_takes_the_encoders_output():
    model = case_of(SEQ2SEQ).build()
    inputs = padded_inputs(SEQ2SEQ)
    expected = model(**inputs)
    encoded = model.get_encoder()(inputs["input_ids"], inputs["attention_mask"])
    rest = {name: x for name, x in inputs.items() if name != "input_ids"}
    for form in (encoded, (encoded.last_hidden_state,)):
        close(model(encoder_outputs=form, **rest).logits, expected.logits)


@torch.no_grad()
def test_decoder_inputs_are_the_labels_behind_the_start_token():
    model = case_of(SEQ2SEQ).build(decoder_start_token_id=4)
    labels = torch.tensor([[11, 12, 13], [21, -100, -100]])
    shifted = torch.tensor([[4, 11, 12], [4, 21, 0]])
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), shifted)
    ids = documents()[0][None].expand(2, -1)
    real = labels != -100
    close(model(ids, labels=labels).logits[real], model(ids, decoder_input_ids=shifted).logits[real])


def test_decoder_inputs_from_labels_need_a_start_token():
    model = case_of(SEQ2SEQ).build(pad_token_id=None)
    with pytest.raises(ValueError, match="decoder_start_token_id=None"):
        model(**training_inputs(SEQ2SEQ))


@every_case_of_text
@torch.no_grad()
def test_later_tokens_do_not_change_earlier_outputs_of_a_decoder(case: Case):
    inputs = padded_inputs(case.sibling, rows=slice(0, 1))
    key = "decoder_input_ids" if case.sibling == SEQ2SEQ else "input_ids"
    model = case.build()
    before = model(**inputs).logits
    inputs[key] = inputs[key].clone()
    inputs[key][:, 3:] = 7
    after = model(**inputs).logits
    same = torch.allclose(before[:, :3], after[:, :3], atol=1e-6)
    assert same == (case.sibling != ENCODER)
    assert not torch.allclose(before[:, 3:], after[:, 3:], atol=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in cases(ENCODER, DECODER)
        if set(layer_types(case.config())) == {"full_attention"} and all(gives_weights(case.config()))
    ],
    ids=str,
)
@torch.no_grad()
def test_a_ready_mask_of_four_dimensions_equals_the_padding_mask_it_stands_for(case: Case):
    model = case.build()
    inputs = padded_inputs(case.sibling)
    mask = inputs["attention_mask"].bool()
    ready = mask[:, None, None, :].expand(3, 1, 9, 9)
    if case.sibling == DECODER:
        ready = ready & torch.ones(9, 9, dtype=torch.bool).tril()
    expected = model(**inputs).logits
    close(model(inputs["input_ids"], attention_mask=ready).logits[mask], expected[mask])


@pytest.mark.parametrize(
    "name", ["default", "llama", "no_positions", "linear", "alibi", "t5", "sliding", "sliding_full"]
)
@torch.no_grad()
def test_a_hole_in_the_mask_means_the_same_with_and_without_padding_taken_out(name: str):
    inputs = padded_inputs(DECODER)
    inputs["attention_mask"][0, 3:5] = 0
    mask = inputs["attention_mask"].bool()
    encoders = [case_of(ENCODER, name).build(unpad_inputs=unpad)(**inputs).logits for unpad in (True, False)]
    close(encoders[0][mask], encoders[1][mask])
    decoder = case_of(DECODER, name).build()
    decoders = [decoder(**inputs, use_cache=use_cache).logits for use_cache in (False, True)]
    close(decoders[0][mask], decoders[1][mask])


@every_sibling
def test_what_is_said_about_sharding_names_real_modules(sibling: str):
    model = case_of(sibling, "mixtral").build("base")
    classes = {type(module).__name__ for module in model.modules()}
    assert set(model._no_split_modules) <= classes
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    plans = [getattr(model.config, f"base_model_{kind}_plan", None) for kind in ("tp", "pp", "ep", "fsdp")]
    for pattern in (pattern for plan in plans for pattern in plan or ()):
        assert fnmatch.filter(names, pattern), pattern
