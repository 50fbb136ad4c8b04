"""Losses are sums over real targets ÷ their number, whatever the micro-batches, the padding or the packing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fratrie import (
    FratrieDecoderConfig,
    FratrieDecoderForCausalLM,
    FratrieDecoderForSequenceClassification,
    FratrieEncoderConfig,
    FratrieEncoderForMaskedLM,
    FratrieEncoderForSequenceClassification,
    FratrieEncoderForTokenClassification,
    FratrieSeq2SeqForConditionalGeneration,
)
from fratrie.modeling.losses import (
    guess_problem_type,
    sequence_classification_loss,
    share_of_batch,
    shift_labels,
    token_cross_entropy,
)

VOCAB = 30


def build(model_class, **fields):
    shared = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
        "initializer_range": 0.4,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    return model_class(model_class.config_class(**{**shared, **fields})).double().eval()


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# --- functions -----------------------------------------------------------------------------------------------------


def test_cross_entropy_by_its_definition():
    logits, labels = torch.randn(2, 3, 5).double(), torch.tensor([[1, -100, 4], [0, 2, -100]])
    total = sum(
        -logits[row, place].log_softmax(-1)[labels[row, place]]
        for row in range(2)
        for place in range(3)
        if labels[row, place] != -100
    )
    close(token_cross_entropy(logits, labels), total / 4)
    close(token_cross_entropy(logits, labels, 10), total / 10)
    close(token_cross_entropy(logits, labels, torch.tensor(10)), total / 10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_cross_entropy_is_computed_in_float32(dtype):
    logits, labels = torch.randn(4, 50).to(dtype) * 30, torch.arange(4)
    loss = token_cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    close(loss, token_cross_entropy(logits.float(), labels), 0)


@pytest.mark.parametrize("count", [None, 7, 0, torch.tensor(0), torch.tensor(0.0)], ids=str)
def test_no_target_costs_nothing(count):
    """Zero with a gradient of zero, not NaN: also where no process of a global batch has a target."""
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = token_cross_entropy(logits, torch.full((2, 3), -100), count)
    loss.backward()
    assert loss.item() == 0 and not logits.grad.any()
    empty = token_cross_entropy(torch.randn(0, 5, requires_grad=True), torch.empty(0, dtype=torch.long), count)
    assert empty.item() == 0


def test_labels_are_shifted_within_documents():
    labels = torch.tensor([[1, 2, 3, 4, 5], [6, -100, 8, 9, 10]])
    assert shift_labels(labels).tolist() == [[2, 3, 4, 5, -100], [-100, 8, 9, 10, -100]]
    places = torch.tensor([[0, 1, 0, 1, 2]])
    assert shift_labels(labels, places).tolist() == [[2, -100, 4, 5, -100], [-100, -100, 9, 10, -100]]
    assert labels[0].tolist() == [1, 2, 3, 4, 5]  # the caller's labels stay as they are


def test_labels_are_shifted_within_documents_that_do_not_begin_at_zero():
    """The attention takes any position that is not above the last one for the start of a document."""
    labels, places = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[3, 4, 2, 3, 4]])
    assert shift_labels(labels, places).tolist() == [[2, -100, 4, 5, -100]]


def test_share_of_batch():
    labels = torch.tensor([[1, -100], [2, 3]])
    assert share_of_batch(labels, None) == 1
    assert float(share_of_batch(labels, 12)) == float(share_of_batch(labels, torch.tensor(12))) == 0.25


# --- sequence classification ---------------------------------------------------------------------------------------


def config(problem_type=None, **fields):
    return FratrieEncoderConfig(problem_type=problem_type, num_labels=fields.pop("num_labels", 3), **fields)


def test_single_label():
    logits, labels = torch.randn(4, 3).double(), torch.tensor([0, 2, 1, -100])
    expected = nn.functional.cross_entropy(logits, labels)
    close(sequence_classification_loss(logits, labels, config("single_label_classification")), expected)
    close(sequence_classification_loss(logits, labels, config("single_label_classification"), 6), expected * 3 / 6)


def multi_label_by_hand(logits, targets, weights):
    probabilities = logits.sigmoid()
    return -(weights * targets * probabilities.log() + (1 - targets) * (1 - probabilities).log())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("pos_weight", [None, [1.0, 2.5, 0.5]])
def test_multi_label_with_targets_of_any_type(dtype, pos_weight):
    logits = torch.randn(2, 3).double()
    targets = torch.tensor([[1, 0, 1], [0, 0, 1]]).to(dtype)
    settings_ = config("multi_label_classification", pos_weight=pos_weight)
    weights = torch.tensor(pos_weight or [1.0] * 3).double()
    expected = multi_label_by_hand(logits, targets.double(), weights)
    close(sequence_classification_loss(logits, targets, settings_), expected.mean())
    close(sequence_classification_loss(logits, targets, settings_, 12), expected.sum() / 12)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_regression(shape):
    logits, labels = torch.randn(4, 1).double(), torch.randn(shape).double()
    expected = (logits.flatten() - labels.flatten()).square().mean()
    close(sequence_classification_loss(logits, labels, config("regression", num_labels=1)), expected)
    close(sequence_classification_loss(logits, labels, config("regression", num_labels=1), 8), expected / 2)


def test_regression_of_several_numbers():
    logits, labels = torch.randn(4, 3).double(), torch.randint(0, 5, (4, 3))
    expected = (logits - labels).square().mean()
    close(sequence_classification_loss(logits, labels, config("regression")), expected)


@pytest.mark.parametrize(
    "num_labels, labels, expected",
    [
        (1, torch.randn(2), "regression"),
        (1, torch.randn(2, 1), "regression"),
        (3, torch.tensor([0, 2]), "single_label_classification"),
        (3, torch.tensor([[0], [2]]), "single_label_classification"),
        (3, torch.zeros(2, 3), "multi_label_classification"),
        (3, torch.zeros(2, 3, dtype=torch.long), "multi_label_classification"),
    ],
)
def test_a_problem_type_that_is_not_given_is_guessed_from_the_shapes_and_not_kept(num_labels, labels, expected):
    settings_, logits = config(num_labels=num_labels), torch.randn(2, num_labels)
    loss = sequence_classification_loss(logits, labels, settings_)
    assert guess_problem_type(logits, labels) == expected
    assert loss == sequence_classification_loss(logits, labels, config(expected, num_labels=num_labels))
    assert settings_.problem_type is None


@pytest.mark.parametrize(
    "problem_type, labels, message",
    [
        ("single_label_classification", torch.zeros(2, 3), r"\(2, 3\).*2 sentences.*multi_label_classification"),
        ("single_label_classification", torch.tensor([0, 3]), r"Label 3 lies outside the 3 labels.*num_labels"),
        ("multi_label_classification", torch.tensor([0, 1]), r"\(2,\).*\(2, 3\).*multi_label.*3 numbers"),
        ("regression", torch.zeros(2, 2), r"\(2, 2\).*\(2, 3\).*regression.*3 numbers"),
    ],
)
def test_labels_that_do_not_fit_are_named(problem_type, labels, message):
    with pytest.raises(ValueError, match=message):
        sequence_classification_loss(torch.randn(2, 3), labels, config(problem_type))


def test_labels_below_zero_are_named():
    with pytest.raises(ValueError, match="-1"):
        sequence_classification_loss(torch.randn(2, 3), torch.tensor([0, -1]), config("single_label_classification"))


# --- models: micro-batches -----------------------------------------------------------------------------------------

IDS = torch.randint(1, VOCAB, (6, 7), generator=torch.Generator().manual_seed(3))
LENGTHS = torch.tensor([7, 3, 5, 7, 1, 2])
MASK = (torch.arange(7) < LENGTHS[:, None]).long()
MASKED_LABELS = torch.where(MASK.bool() & (IDS % 3 == 0), IDS, -100)
TEXT_LABELS = torch.where(MASK.bool(), IDS, -100)
HEADS = {
    "masked": (FratrieEncoderForMaskedLM, MASKED_LABELS, {}),
    "masked sparse": (FratrieEncoderForMaskedLM, MASKED_LABELS, {"sparse_prediction": True}),
    "tokens": (FratrieEncoderForTokenClassification, torch.where(MASK.bool(), IDS % 3, -100), {"num_labels": 3}),
    "single": (FratrieEncoderForSequenceClassification, torch.arange(6) % 3, {"num_labels": 3}),
    "multi": (
        FratrieEncoderForSequenceClassification,
        torch.randint(0, 2, (6, 3)),
        {"num_labels": 3, "problem_type": "multi_label_classification", "pos_weight": [1.0, 2.0, 3.0]},
    ),
    "regression": (FratrieEncoderForSequenceClassification, torch.randn(6).double(), {"num_labels": 1}),
    "texts": (FratrieDecoderForSequenceClassification, torch.arange(6) % 3, {"num_labels": 3}),
    "causal": (FratrieDecoderForCausalLM, TEXT_LABELS, {}),
    "seq2seq": (FratrieSeq2SeqForConditionalGeneration, TEXT_LABELS, {"eos_token_id": 1}),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("sizes", [[1] * 6, [2, 4], [5, 1]], ids=str)
def test_micro_batches_equal_one_batch(head, sizes):
    """Loss and gradients, although the micro-batches hold unequal numbers of targets, or none at all."""
    model_class, labels, fields = HEADS[head]
    counted = labels[:, 1:] if head == "causal" else labels
    count = counted.numel() if labels.is_floating_point() else int(counted.ne(-100).sum())
    results = []
    for parts, arguments in (([6], {}), ([6], {"num_items_in_batch": count}), (sizes, {"num_items_in_batch": count})):
        model, total = build(model_class, **fields).train(), 0.0
        for ids, mask, targets in zip(IDS.split(parts), MASK.split(parts), labels.split(parts), strict=True):
            loss = model(ids, attention_mask=mask, labels=targets, **arguments).loss
            loss.backward()
            total += loss.item()
        results.append((total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    for total, gradients in results[1:]:
        assert total == pytest.approx(results[0][0], rel=1e-10)
        assert gradients.keys() == results[0][1].keys()
        for name, gradient in gradients.items():
            close(gradient, results[0][1][name])


@pytest.mark.parametrize("head", ["masked", "masked sparse", "tokens", "causal", "seq2seq"])
def test_a_batch_without_targets_costs_nothing(head):
    model_class, labels, fields = HEADS[head]
    model = build(model_class, **fields).train()
    decoder = {"decoder_input_ids": IDS} if head == "seq2seq" else {}
    loss = model(IDS, attention_mask=MASK, labels=torch.full_like(labels, -100), **decoder).loss
    loss.backward()
    assert loss.item() == 0
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


# --- models: forms of a batch --------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4), unpad=st.booleans())
def test_next_token_loss_of_every_form(lengths, unpad):
    """One by one, padded right, padded left, packed by positions: the same texts have the same loss."""
    model = build(FratrieDecoderForCausalLM, position_type="rotary", unpad_inputs=unpad).train()
    texts = [IDS[row, :length] for row, length in enumerate(lengths)]
    targets = sum(length - 1 for length in lengths)
    expected = sum(model(text[None], labels=text[None], num_items_in_batch=max(targets, 1)).loss for text in texts)
    width = max(lengths) + 1
    for side in ("right", "left"):
        ids, mask = torch.zeros(len(texts), width, dtype=torch.long), torch.zeros(len(texts), width, dtype=torch.long)
        for row, text in enumerate(texts):
            start = 0 if side == "right" else width - len(text)
            ids[row, start : start + len(text)] = text
            mask[row, start : start + len(text)] = 1
        labels = torch.where(mask.bool(), ids, -100)
        close(model(ids, attention_mask=mask, labels=labels).loss, expected)
    flat = torch.cat(texts)[None]
    place = torch.cat([torch.arange(length) for length in lengths])[None]
    close(model(flat, position_ids=place, labels=flat).loss, expected)


PACKED = {
    "positions": {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]])},
    "positions that begin elsewhere": {"position_ids": torch.tensor([[2, 3, 4, 5, 2, 3, 4]])},
    "cumulative lengths": {"cu_seq_lens_q": torch.tensor([0, 4, 7])},
}


@pytest.mark.parametrize("form", PACKED)
def test_nothing_is_predicted_across_packed_documents(form):
    """Where the attention sees a border between documents the loss must see it too."""
    model = build(FratrieDecoderForCausalLM, position_type="rotary").train()
    texts = [IDS[0, :4], IDS[0, 4:]]
    expected = sum(model(text[None], labels=text[None], num_items_in_batch=5).loss for text in texts)
    loss = model(IDS[:1], labels=IDS[:1], **PACKED[form]).loss
    close(loss, expected, 1e-6 if "elsewhere" in form else 1e-10)


def test_shifted_labels_are_taken_as_they_are():
    """What collators for packed rows give; the plain labels may be anything then."""
    model, shifted = build(FratrieDecoderForCausalLM), torch.randint(0, VOCAB, (6, 7))
    outputs = model(IDS, labels=IDS, shift_labels=shifted)
    close(outputs.loss, nn.functional.cross_entropy(outputs.logits.flatten(0, 1), shifted.flatten()))


def test_untrained_model_scores_like_a_guess():
    model = build(FratrieDecoderForCausalLM, initializer_range=1e-4)
    assert model(IDS, labels=IDS).loss.item() == pytest.approx(math.log(VOCAB), abs=1e-2)


def test_seq2seq_labels_are_not_shifted_but_its_inputs():
    model = build(FratrieSeq2SeqForConditionalGeneration)
    labels = torch.tensor([[5, 6, 1, -100], [7, 8, 9, 1]])
    inputs = model.prepare_decoder_input_ids_from_labels(labels)
    assert inputs.tolist() == [[0, 5, 6, 1], [0, 7, 8, 9]]
    outputs = model(IDS[:2], labels=labels)
    logits, real = model(IDS[:2], decoder_input_ids=inputs).logits, labels != -100
    close(outputs.logits[real], logits[real])
    close(outputs.loss, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_seq2seq_without_a_start_token_says_so():
    model = build(FratrieSeq2SeqForConditionalGeneration, pad_token_id=None)
    with pytest.raises(ValueError, match=r"decoder_start_token_id=None and pad_token_id=None"):
        model(IDS, labels=IDS)


# --- models: sparse prediction -------------------------------------------------------------------------------------


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize("count", [None, 40])
def test_sparse_prediction_equals_the_full_head(unpad, count):
    results = []
    for sparse in (True, False):
        model = build(FratrieEncoderForMaskedLM, sparse_prediction=sparse, unpad_inputs=unpad).train()
        outputs = model(IDS, attention_mask=MASK, labels=MASKED_LABELS, num_items_in_batch=count)
        outputs.loss.backward()
        results.append((outputs, {name: p.grad for name, p in model.named_parameters()}))
    (sparse, gradients), (full, expected) = results
    close(sparse.loss, full.loss)
    for name, gradient in gradients.items():
        close(gradient, expected[name])
    targets = MASKED_LABELS != -100
    assert sparse.logits.shape == (int(targets.sum()), VOCAB) and full.logits.shape == (6, 7, VOCAB)
    close(sparse.logits, full.logits[targets])


def test_sparse_prediction_acts_in_training_with_labels_alone():
    model = build(FratrieEncoderForMaskedLM, sparse_prediction=True)
    assert model(IDS, labels=MASKED_LABELS).logits.shape == (6, 7, VOCAB)
    assert model.train()(IDS).logits.shape == (6, 7, VOCAB)


def test_decoder_configuration_keeps_its_problem_type():
    assert FratrieDecoderConfig(problem_type="regression", num_labels=1).problem_type == "regression"
