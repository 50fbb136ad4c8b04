"""Hugging Face's Trainer on our heads, unmodified."""

import copy

import numpy as np
import pytest
import torch
from combinations import DECODER, ENCODER, SEQ2SEQ, case_of
from trainer_texts import TEXTS, sizes
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import fratrie

MULTI = "multi_label_classification"


def arguments(folder, **changes):
    common = {"output_dir": str(folder), "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "seed": 3,
              "save_strategy": "no", "optim": "sgd", "learning_rate": 0.1, "max_steps": 2}  # fmt: skip
    return TrainingArguments(**{**common, **changes})


def ids_of(tokenizer):
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def masked(tokenizer):
    """Every third token is a target."""
    rows = []
    for ids in ids_of(tokenizer):
        labels = [token if place % 3 == 1 else -100 for place, token in enumerate(ids)]
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def labelled(tokenizer, labels):
    return [{"input_ids": ids, "labels": label} for ids, label in zip(ids_of(tokenizer), labels, strict=True)]


def causal(tokenizer):
    return [{"input_ids": ids, "labels": ids} for ids in ids_of(tokenizer)]


def answers(tokenizer):
    ids = ids_of(tokenizer)
    return [{"input_ids": ids[place], "labels": ids[place - 1]} for place in range(len(ids))]


def images(_):
    pixels = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return [{"pixel_values": image, "labels": place % 3} for place, image in enumerate(pixels)]


IMAGES = {"patch_size": 4, "image_size": 8, "num_labels": 3, "max_position_embeddings": 5}
SEVERAL = [[float((row >> label) & 1) for label in range(3)] for row in range(8)]
# Sibling, head, configuration, rows, collator.
HEADS = {
    "masked_lm": (ENCODER, "language_model", {}, masked, DataCollatorForTokenClassification),
    "sparse_masked_lm": (ENCODER, "language_model", {"sparse_prediction": True}, masked,
                         DataCollatorForTokenClassification),
    "several_labels": (ENCODER, "sequence_classification", {"num_labels": 3, "problem_type": MULTI},
                       lambda tokenizer: labelled(tokenizer, SEVERAL), DataCollatorWithPadding),
    "one_label": (ENCODER, "sequence_classification", {"num_labels": 3},
                  lambda tokenizer: labelled(tokenizer, [0, 1, 2, 0, 1, 2, 0, 1]), DataCollatorWithPadding),
    "regression": (ENCODER, "sequence_classification", {"num_labels": 1},
                   lambda tokenizer: labelled(tokenizer, [row / 4 for row in range(8)]), DataCollatorWithPadding),
    "tokens": (ENCODER, "token_classification", {"num_labels": 3},
               lambda tokenizer: labelled(tokenizer, [[i % 3 for i in ids] for ids in ids_of(tokenizer)]),
               DataCollatorForTokenClassification),
    "images": (ENCODER, "image_classification", IMAGES, images, None),
    "causal_lm": (DECODER, "language_model", {"position_type": "rotary"}, causal, DataCollatorForTokenClassification),
    "decoder_labels": (DECODER, "sequence_classification", {"num_labels": 3, "problem_type": MULTI},
                       lambda tokenizer: labelled(tokenizer, SEVERAL), DataCollatorWithPadding),
    "seq2seq": (SEQ2SEQ, "language_model", {}, answers, DataCollatorForSeq2Seq),
}  # fmt: skip


def build(sibling, head, tokenizer, **fields):
    case = case_of(sibling)
    if head == "image_classification":
        torch.manual_seed(0)
        return fratrie.FratrieEncoderForImageClassification(case.config(**fields))
    return case.build(head, **{**sizes(tokenizer), **fields})


def collate(collator, tokenizer):
    return default_data_collator if collator is None else collator(tokenizer)


def weights_and_log(trainer):
    trainer.train()
    weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    return weights, [entry for entry in trainer.state.log_history if "loss" in entry]


def assert_same_run(one, other):
    for entry, twin in zip(one[1], other[1], strict=True):
        assert entry["loss"] == pytest.approx(twin["loss"], rel=1e-5, abs=1e-5)
        assert entry["grad_norm"] == pytest.approx(twin["grad_norm"], rel=1e-4)
    assert one[0].keys() == other[0].keys()
    for name, weight in one[0].items():
        torch.testing.assert_close(weight, other[0][name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("head", HEADS)
def test_accumulated_micro_batches_train_as_one_batch(head, tokenizers, tmp_path):
    sibling, name, fields, rows, collator = HEADS[head]
    tokenizer = tokenizers[sibling]
    model = build(sibling, name, tokenizer, **fields)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    runs = []
    for size, micro_batches in ((8, 1), (2, 4)):
        options = arguments(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=micro_batches, max_grad_norm=0.0
        )
        trainer = Trainer(
            copy.deepcopy(model), options, train_dataset=rows(tokenizer), data_collator=collate(collator, tokenizer)
        )
        runs.append(weights_and_log(trainer))
    assert_same_run(*runs)
    assert sum(not torch.equal(weight, before[name]) for name, weight in runs[0][0].items()) > len(before) / 2


@pytest.mark.parametrize("position_type", ["rotary", "learned"])
def test_flattened_batches_train_as_padded_ones(position_type, tokenizers, tmp_path):
    tokenizer = tokenizers[DECODER]
    model = build(DECODER, "language_model", tokenizer, position_type=position_type)
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=position_type == "rotary")
    runs = []
    for collator, size in ((DataCollatorForTokenClassification(tokenizer), 4), (flat, 4), (flat, 2)):
        options = arguments(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=4 // size, max_grad_norm=0.0
        )
        runs.append(
            weights_and_log(
                Trainer(copy.deepcopy(model), options, train_dataset=causal(tokenizer), data_collator=collator)
            )
        )
    assert_same_run(runs[0], runs[1])
    assert_same_run(runs[0], runs[2])


@pytest.mark.parametrize(("sibling", "mlm"), [(ENCODER, True), (DECODER, False)])
def test_the_language_modelling_collator_trains_to_a_lower_loss(sibling, mlm, tokenizers, tmp_path):
    tokenizer = tokenizers[sibling]
    model = build(sibling, "language_model", tokenizer)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=mlm, mlm_probability=0.4 if mlm else None, seed=1)
    rows = [{"input_ids": ids} for ids in ids_of(tokenizer)]
    options = arguments(tmp_path, optim="adamw_torch", learning_rate=1e-2, max_steps=25)
    _, log = weights_and_log(Trainer(model, options, train_dataset=rows, data_collator=collator))
    losses = [entry["loss"] for entry in log]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5]), losses


def f1(predictions):
    logits, labels = predictions
    assert isinstance(logits, np.ndarray)
    assert logits.shape == labels.shape == (len(TEXTS), 3)
    hits = ((logits > 0) * labels).sum()
    return {"f1": 2 * hits / ((logits > 0).sum() + labels.sum()), "rows": len(logits)}


def test_evaluation_best_model_and_resuming(tokenizers, tmp_path):
    """A sparse model that returns all it can: metrics see logits, the best is loaded, a resumed run is the same."""
    tokenizer = tokenizers[ENCODER]
    rows = labelled(tokenizer, SEVERAL)
    fields = {"num_labels": 3, "problem_type": MULTI, "num_experts": 4, "output_router_logits": True,
              "hidden_dropout": 0.1, "output_hidden_states": True}  # fmt: skip
    model = build(ENCODER, "sequence_classification", tokenizer, **fields)

    def trainer(folder):
        options = arguments(
            folder, optim="adamw_torch", learning_rate=5e-3, max_steps=6, eval_strategy="steps", eval_steps=2,
            save_strategy="steps", save_steps=2, load_best_model_at_end=True, metric_for_best_model="f1",
            per_device_eval_batch_size=3,
        )  # fmt: skip
        return Trainer(
            copy.deepcopy(model), options, train_dataset=rows, eval_dataset=rows, compute_metrics=f1,
            data_collator=DataCollatorWithPadding(tokenizer), processing_class=tokenizer,
        )  # fmt: skip

    whole = trainer(tmp_path / "whole")
    weights, log = weights_and_log(whole)
    scores = {entry["step"]: entry["eval_f1"] for entry in whole.state.log_history if "eval_f1" in entry}
    assert len(scores) == 3
    assert all(entry["eval_rows"] == len(TEXTS) for entry in whole.state.log_history if "eval_rows" in entry)
    best = max(scores, key=scores.get)
    assert whole.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    loaded = type(model).from_pretrained(whole.state.best_model_checkpoint)
    assert all(torch.equal(weights[name], weight) for name, weight in loaded.named_parameters())
    assert whole.evaluate()["eval_f1"] == pytest.approx(scores[best])
    resumed = trainer(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    again = {entry["step"]: entry["loss"] for entry in resumed.state.log_history if "loss" in entry}
    assert again == {entry["step"]: entry["loss"] for entry in log}
    assert all(torch.equal(weights[name], weight) for name, weight in resumed.model.named_parameters())


@pytest.mark.parametrize(("sibling", "rows", "collator"), [
    (DECODER, causal, DataCollatorForTokenClassification), (SEQ2SEQ, answers, DataCollatorForSeq2Seq),
])  # fmt: skip
def test_predictions_are_logits_alone(sibling, rows, collator, tokenizers, tmp_path):
    tokenizer = tokenizers[sibling]
    fields = {"num_experts": 4, "output_router_logits": True}
    model = build(sibling, "language_model", tokenizer, **fields)
    options = arguments(tmp_path, per_device_eval_batch_size=3, batch_eval_metrics=False)
    found = Trainer(model, options, data_collator=collator(tokenizer)).predict(rows(tokenizer))
    longest = max(len(row["labels"]) for row in rows(tokenizer))
    assert isinstance(found.predictions, np.ndarray)
    assert found.predictions.shape == (len(TEXTS), longest, len(tokenizer))
    assert found.label_ids.shape == (len(TEXTS), longest)


def test_smoothed_labels_are_those_of_the_next_tokens(tokenizers, tmp_path):
    """Trainer shifts them for the classes whose names it knows."""
    tokenizer = tokenizers[DECODER]
    model = build(DECODER, "language_model", tokenizer)
    trainer = Trainer(model, arguments(tmp_path, label_smoothing_factor=0.1))
    batch = DataCollatorForTokenClassification(tokenizer)(causal(tokenizer))
    with torch.no_grad():
        smoothed = trainer.compute_loss(model, dict(batch))
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    targets = batch["labels"][:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, label_smoothing=0.1)
    torch.testing.assert_close(smoothed, expected, atol=1e-5, rtol=1e-5)
