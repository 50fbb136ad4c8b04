"""The heads that label sentences and tokens: problem types, pooling, losses, and clear errors for wrong labels."""

import pytest
import torch
from combinations import (
    DECODER,
    ENCODER,
    Case,
    case_of,
    cases,
    documents,
    pad,
    padded_inputs,
    training_inputs,
    with_global_tokens,
)

HEAD = "sequence_classification"
sibling = pytest.mark.parametrize("sibling", [ENCODER, DECODER])
classifying_case = pytest.mark.parametrize("case", cases(ENCODER, DECODER), ids=str)
SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
INT_LABELS = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 0]])


@classifying_case
@pytest.mark.parametrize("head", [HEAD, "token_classification"])
def test_every_combination_classifies_and_trains_every_parameter(case: Case, head: str):
    if case.sibling == DECODER and head != HEAD:
        head = HEAD
    model = case.build(head, num_labels=5).train()
    inputs = padded_inputs(case.sibling)
    if model.config.to_dict().get("type_vocab_size"):
        inputs["token_type_ids"] = inputs["input_ids"] % 2
    labels = torch.tensor([4, 0, 2]) if head == HEAD else inputs["input_ids"] % 5
    # Classifiers of texts have a global token anyway.
    outputs = model(**(inputs if head == HEAD else with_global_tokens(model, inputs)), labels=labels)
    assert outputs.logits.shape == ((3, 5) if head == HEAD else (3, 9, 5))
    outputs.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if not name.endswith(("k_proj.bias", "k_global_proj.bias")):
            assert parameter.grad.abs().max() > 0, name


@sibling
@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
@torch.no_grad()
def test_poolings(sibling: str, pooling: str):
    model = case_of(sibling).build(HEAD, classifier_pooling=pooling)
    for side in ("right", "left"):
        inputs = padded_inputs(sibling, side)
        states = model.model(**inputs).last_hidden_state
        pooled = []
        for row, mask in zip(states, inputs["attention_mask"].bool(), strict=True):
            real = row[mask]
            pooled.append({"first": real[0], "mean": real.mean(0), "last": real[-1]}[pooling])
        expected = model.classifier.out_proj(torch.stack(pooled))
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=2e-5, atol=2e-5)


@sibling
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_without_a_mask_padding_is_found_by_its_id(sibling: str, side: str):
    """The states under the padding take part in the attention then, but are not pooled."""
    for pooling in ("first", "mean", "last"):
        model = case_of(sibling).build(HEAD, classifier_pooling=pooling)
        ids, mask = pad(documents(), side)
        states = model.model(ids).last_hidden_state
        real = [row[keep] for row, keep in zip(states, mask.bool(), strict=True)]
        pooled = torch.stack([{"first": x[0], "mean": x.mean(0), "last": x[-1]}[pooling] for x in real])
        expected = model.classifier.out_proj(pooled)
        torch.testing.assert_close(model(ids).logits, expected, rtol=2e-5, atol=2e-5)


@sibling
@torch.no_grad()
def test_without_mask_and_padding_id_all_tokens_are_real(sibling: str):
    model = case_of(sibling).build(HEAD, pad_token_id=None, classifier_pooling="mean")
    ids, _ = pad(documents())
    torch.testing.assert_close(model(ids).logits, model(ids, attention_mask=torch.ones_like(ids)).logits)


@sibling
def test_a_mask_of_four_dimensions_cannot_find_the_real_tokens(sibling: str):
    model = case_of(sibling).build(HEAD)
    ids, _ = pad(documents())
    with pytest.raises(ValueError, match=r"\(batch, length\).*\(3, 1, 9, 9\)"):
        model(ids, attention_mask=torch.ones(3, 1, 9, 9, dtype=torch.bool))


@sibling
def test_single_label_loss_is_the_cross_entropy(sibling: str):
    model = case_of(sibling).build(HEAD, num_labels=4, problem_type=SINGLE)
    labels = torch.tensor([3, 0, 1])
    for form in (labels, labels[:, None]):
        outputs = model(**padded_inputs(sibling), labels=form)
        torch.testing.assert_close(outputs.loss, torch.nn.functional.cross_entropy(outputs.logits, labels))


@sibling
def test_sentences_without_a_label_do_not_count(sibling: str):
    model = case_of(sibling).build(HEAD, num_labels=4, problem_type=SINGLE)
    outputs = model(**padded_inputs(sibling), labels=torch.tensor([3, -100, 1]))
    expected = torch.nn.functional.cross_entropy(outputs.logits[[0, 2]], torch.tensor([3, 1]))
    torch.testing.assert_close(outputs.loss, expected)


@sibling
def test_several_labels_may_be_integers_and_have_weights(sibling: str):
    weights = [1.0, 2.5, 0.5]
    for pos_weight in (None, weights):
        model = case_of(sibling).build(HEAD, num_labels=3, problem_type=MULTI, pos_weight=pos_weight)
        for labels in (INT_LABELS, INT_LABELS.float(), INT_LABELS.bool()):
            outputs = model(**padded_inputs(sibling), labels=labels)
            expected = torch.nn.functional.binary_cross_entropy_with_logits(
                outputs.logits,
                INT_LABELS.float(),
                pos_weight=None if pos_weight is None else torch.tensor(pos_weight),
            )
            torch.testing.assert_close(outputs.loss, expected)


@sibling
def test_regression_loss_is_the_mean_squared_error(sibling: str):
    for size in (1, 3):
        model = case_of(sibling).build(HEAD, num_labels=size, problem_type=REGRESSION)
        targets = torch.randn(3, size)
        for labels in (targets, targets.flatten()) if size == 1 else (targets,):
            outputs = model(**padded_inputs(sibling), labels=labels)
            torch.testing.assert_close(outputs.loss, torch.nn.functional.mse_loss(outputs.logits, targets))


@pytest.mark.parametrize(
    ("labels", "size", "problem"),
    [
        (torch.tensor([2, 0, 1]), 3, SINGLE),
        (INT_LABELS, 3, MULTI),
        (INT_LABELS.float(), 3, MULTI),
        (torch.tensor([0.5, 1.0, -2.0]), 1, REGRESSION),
    ],
    ids=["single", "integers", "floats", "regression"],
)
@sibling
def test_the_problem_is_read_from_the_first_labels_and_kept(sibling, labels, size, problem, tmp_path):
    model = case_of(sibling).build(HEAD, num_labels=size)
    assert model.config.problem_type is None
    loss = model(**padded_inputs(sibling), labels=labels).loss
    assert loss.isfinite() and model.config.problem_type == problem
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).config.problem_type == problem


@pytest.mark.parametrize(
    ("problem", "labels", "message"),
    [
        (SINGLE, INT_LABELS, r"\(3, 3\) do not fit one label .*multi_label_classification"),
        (SINGLE, torch.tensor([0, 1, 3]), r"Label 3 lies outside the 3 labels .*num_labels"),
        (SINGLE, torch.tensor([0, 1, -1]), r"Label -1"),
        (SINGLE, torch.tensor([0, 1]), r"\(2,\) do not fit one label for each of 3 sentences"),
        (MULTI, torch.tensor([0, 1, 2]), r"\(3,\) do not fit logits of shape \(3, 3\) .* 3 numbers"),
        (MULTI, torch.ones(3, 4), r"\(3, 4\) do not fit logits"),
        (MULTI, 2 * INT_LABELS, r"between 0 and 1|0 or 1|\[0, 1\]"),
        (REGRESSION, torch.ones(3), r"\(3,\) do not fit logits of shape \(3, 3\)"),
    ],
    ids=["many for one", "too large", "negative", "too few", "one for many", "too many", "above one", "numbers"],
)
@sibling
def test_labels_that_do_not_fit_are_named_with_the_way_out(sibling: str, problem: str, labels, message: str):
    model = case_of(sibling).build(HEAD, num_labels=3, problem_type=problem)
    with pytest.raises(ValueError, match=message):
        model(**padded_inputs(sibling), labels=labels)


def test_an_unknown_problem_type_is_refused():
    with pytest.raises(
        ValueError, match=r"^problem_type='multi_label' is unknown: use regression, single_label_class"
    ):
        case_of(ENCODER).config(problem_type="multi_label")


@sibling
@torch.no_grad()
def test_dense_layers_of_the_head_with_their_activation_and_dropout(sibling: str):
    fields = {"classifier_hidden_sizes": [16, 24], "classifier_activation": "relu", "num_labels": 5}
    model = case_of(sibling).build(HEAD, classifier_dropout=0.5, classifier_pooling="mean", **fields)
    assert [(layer.in_features, layer.out_features) for layer in model.classifier.dense] == [(32, 16), (16, 24)]
    inputs = padded_inputs(sibling)
    mask = inputs["attention_mask"][..., None]
    x = (model.model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)
    for layer in model.classifier.dense:
        x = layer(x).relu()
    logits = model(**inputs).logits
    torch.testing.assert_close(logits, model.classifier.out_proj(x), rtol=2e-5, atol=2e-5)
    assert not torch.allclose(model.train()(**inputs).logits, logits)


@torch.no_grad()
def test_token_labels_of_padding_do_not_count():
    model = case_of(ENCODER).build("token_classification", num_labels=3)
    inputs = padded_inputs(ENCODER)
    real = inputs["attention_mask"].bool()
    labels = (inputs["input_ids"] % 3).masked_fill(~real, -100)
    outputs = model(**inputs, labels=labels)
    expected = torch.nn.functional.cross_entropy(outputs.logits[real], labels[real])
    torch.testing.assert_close(outputs.loss, expected)


@sibling
@pytest.mark.parametrize(("problem", "labels"), [(SINGLE, torch.tensor([2, 0, 1])), (MULTI, INT_LABELS)])
def test_micro_batches_add_up_to_the_loss_of_the_whole_batch(sibling: str, problem: str, labels: torch.Tensor):
    model = case_of(sibling).build(HEAD, num_labels=3, problem_type=problem)
    whole = model(**padded_inputs(sibling), labels=labels).loss
    parts = [
        model(
            **padded_inputs(sibling, rows=slice(start, end)),
            labels=labels[start:end],
            num_items_in_batch=torch.tensor(labels.numel()),
        ).loss
        for start, end in ((0, 1), (1, 3))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_micro_batches_of_language_modelling_add_up_whatever_their_sizes():
    for name in (ENCODER, DECODER):
        model = case_of(name).build()
        inputs = training_inputs(name)
        labels = inputs["labels"] if name == ENCODER else inputs["labels"][:, 1:]
        count = (labels != -100).sum()
        parts = [
            model(**{key: x[start:end] for key, x in inputs.items()}, num_items_in_batch=count).loss
            for start, end in ((0, 2), (2, 3))
        ]
        torch.testing.assert_close(sum(parts), model(**inputs).loss)
