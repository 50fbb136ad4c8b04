import json
import math

import pytest
import torch
from datasets import Dataset
from short_runs import (
    ROWS,
    VOCAB,
    Killed,
    assert_equal_weights,
    bert_without_dropout,
    every_step,
    fixed_masks,
    killed_at,
    losses,
    multi_label,
    multi_label_bert,
    options,
    padded,
    random_masks,
    run,
    scripted,
    stream,
    tiny_bert,
    tiny_bert_of_other_seed,
    token_rows,
)
from transformers import BertForMaskedLM, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from fratrie import FratrieEncoderConfig, FratrieEncoderForMaskedLM
from fratrie.training import checkpoint
from fratrie.training.loop import NonFiniteLossError, create_accelerator, train


def causal(rows):
    ids = padded(rows)
    return {
        "input_ids": ids,
        "attention_mask": ids.ne(0).long(),
        "labels": ids.masked_fill(ids.eq(0), -100),
    }


def tiny_gpt2(dropout=0.0):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=16,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config)


def test_learns_and_saves_what_it_returns(tmp_path):
    model, result = run(tmp_path, num_train_epochs=30, warmup_steps=0.1)
    assert result.global_step == 30 * math.ceil(ROWS / 4)
    assert result.epoch == 30
    assert sum(losses(result)[-10:]) < 0.9 * sum(losses(result)[:10])
    assert_equal_weights(model, BertForMaskedLM.from_pretrained(tmp_path))


class ToldBert(BertForMaskedLM):
    """A head that divides by the count it is told, as the siblings' heads do."""

    def forward(self, labels=None, num_items_in_batch=None, **inputs):
        outputs = super().forward(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        outputs.loss = loss / num_items_in_batch
        return outputs


@pytest.mark.parametrize(
    ("build", "collator"),
    [
        (bert_without_dropout, fixed_masks),  # ignores num_items_in_batch without a word
        (lambda: tiny_bert(ToldBert, dropout=0.0), fixed_masks),  # needs it
        (tiny_gpt2, causal),  # shifts its labels
        (multi_label_bert, multi_label),  # every element is a target
    ],
)
def test_micro_batches_equal_one_batch(tmp_path, build, collator):
    common = {"collator": collator, "learning_rate": 1e-3}
    whole, one = run(tmp_path / "one", build(), per_device_train_batch_size=8, **common)
    split, many = run(
        tmp_path / "many", build(), per_device_train_batch_size=1, gradient_accumulation_steps=8, **common
    )
    assert losses(many) == pytest.approx(losses(one), rel=1e-5)
    assert_equal_weights(whole, split, rtol=0, atol=2e-5)


def test_loss_is_the_mean_over_all_targets(tmp_path):
    model, rows = bert_without_dropout().eval(), token_rows()
    batch = fixed_masks(rows)
    with torch.no_grad():
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    _, result = run(tmp_path, model, collator=fixed_masks, max_steps=1, gradient_accumulation_steps=8, max_grad_norm=0)
    assert losses(result) == [pytest.approx(float(expected), rel=1e-5)]


def test_every_row_once_an_epoch(tmp_path):
    seen = []

    def collator(rows):
        seen.extend(row["number"] for row in rows)
        return fixed_masks(rows)

    rows = Dataset.from_list([{**row, "number": number} for number, row in enumerate(token_rows())])
    run(tmp_path, rows=rows, collator=collator, num_train_epochs=2, gradient_accumulation_steps=2)
    first, second = seen[:ROWS], seen[ROWS:]
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_bit_identically_twice(tmp_path, workers):
    """Mid-epoch, with dropout and drawn masks, accumulation, and evaluations that draw numbers too."""
    common = {
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 4,
        "save_steps": 2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "dataloader_num_workers": workers,
    }
    unbroken, reference = run(tmp_path / "unbroken", evaluate=killed_at(0), **common)
    broken = tmp_path / "broken"
    with pytest.raises(Killed):
        run(broken, evaluate=killed_at(5), **common)
    with pytest.raises(Killed):
        run(broken, tiny_bert_of_other_seed(), evaluate=killed_at(5), resume_from_checkpoint="last", **common)
    assert [step for step, _ in checkpoint.list_checkpoints(broken)] == [6, 8]
    model, result = run(
        broken, tiny_bert_of_other_seed(), evaluate=killed_at(0), resume_from_checkpoint="last", **common
    )
    assert_equal_weights(unbroken, model)
    assert losses(result) == losses(reference)
    assert result.global_step == reference.global_step == 12


def test_evaluation_does_not_change_training(tmp_path):
    plain, _ = run(tmp_path / "plain")
    evaluated, _ = run(tmp_path / "evaluated", evaluate=killed_at(0), eval_strategy="steps", eval_steps=1)
    assert_equal_weights(plain, evaluated)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path, poison):
    calls = []

    def collator(rows):
        calls.append(rows)
        batch = multi_label(rows)
        return {**batch, "labels": batch["labels"].fill_(poison)} if len(calls) == 4 else batch

    with pytest.raises(NonFiniteLossError, match=r"step 4: the loss is .*checkpoint-3"):
        run(tmp_path, multi_label_bert(), collator=collator, save_steps=1)
    step, path = checkpoint.list_checkpoints(tmp_path)[-1]
    assert step == 3
    kept = BertForSequenceClassification.from_pretrained(path)
    assert all(weight.isfinite().all() for weight in kept.parameters())


def test_keeps_the_best_and_stops_early(tmp_path):
    evaluate = scripted([0.2, 0.5, 0.4, 0.5, 0.9])
    model, result = run(
        tmp_path,
        evaluate=evaluate,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=1,
        metric_for_best_model="f1",
        early_stopping_patience=2,
    )
    assert result.stopped_early and result.global_step == 8
    assert (result.best_metric, result.best_step) == (0.5, 4)
    assert result.metrics == {"f1": 0.5, "other": 0.0}
    assert [step for step, _ in checkpoint.list_checkpoints(tmp_path)] == [4, 7, 8]
    assert_equal_weights(model, BertForMaskedLM.from_pretrained(tmp_path / "checkpoint-4"))
    assert_equal_weights(model, BertForMaskedLM.from_pretrained(tmp_path))


def test_smaller_can_be_better_and_alone_be_kept(tmp_path):
    _, result = run(
        tmp_path,
        evaluate=scripted([0.5, 0.2, 0.4]),
        eval_strategy="epoch",
        metric_for_best_model="f1",
        greater_is_better=False,
    )
    assert (result.best_metric, result.best_step) == (0.2, 12)
    assert [step for step, _ in checkpoint.list_checkpoints(tmp_path)] == [12]


def test_watched_metric_must_exist(tmp_path):
    with pytest.raises(ValueError, match=r"'f2' is none of the metrics \['f1', 'other'\]"):
        run(tmp_path, evaluate=scripted([1.0] * 9), metric_for_best_model="f2")


def test_cache_is_off_in_training_and_restored_on_save(tmp_path):
    seen = []

    def evaluate(model, accelerator):
        seen.append(model.config.use_cache)
        return {"nothing": 0.0}

    model, _ = run(tmp_path, tiny_gpt2(), collator=causal, evaluate=evaluate, max_steps=2, save_steps=1, eval_steps=1)
    assert seen and not any(seen)
    assert model.config.use_cache is True
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        assert json.loads((folder / "config.json").read_text())["use_cache"] is True


def test_frozen_weights_stay_and_resume(tmp_path):
    def frozen():
        model = tiny_bert()
        model.bert.embeddings.requires_grad_(False)
        return model

    before = frozen().bert.embeddings.position_embeddings.weight
    reference, _ = run(tmp_path / "whole", frozen(), max_steps=4)
    assert torch.equal(reference.bert.embeddings.position_embeddings.weight, before)
    with pytest.raises(Killed):
        run(tmp_path / "half", frozen(), max_steps=4, save_steps=2, evaluate=killed_at(3), **every_step())
    resumed, _ = run(tmp_path / "half", frozen(), max_steps=4, save_steps=2, resume_from_checkpoint="last")
    assert_equal_weights(reference, resumed)


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_resumes_bit_identically(tmp_path, workers):
    common = {"max_steps": 11, "save_steps": 2, "dataloader_num_workers": workers, **every_step()}
    unbroken, reference = run(tmp_path / "unbroken", rows=stream(), evaluate=killed_at(0), **common)
    broken = tmp_path / "broken"
    with pytest.raises(Killed):
        run(broken, rows=stream(), evaluate=killed_at(3), **common)
    with pytest.raises(Killed):
        run(broken, rows=stream(), evaluate=killed_at(7), resume_from_checkpoint="last", **common)
    model, result = run(broken, rows=stream(), evaluate=killed_at(0), resume_from_checkpoint="last", **common)
    assert losses(result) == losses(reference)
    assert_equal_weights(unbroken, model)


def test_stream_needs_steps_and_rows(tmp_path):
    with pytest.raises(ValueError, match="a stream has no length: give max_steps, the number of optimizer steps"):
        run(tmp_path, rows=stream())
    with pytest.raises(ValueError, match="fewer rows than the 4 of one step"):
        run(tmp_path, rows=stream(3), max_steps=2)


def test_no_rows(tmp_path):
    with pytest.raises(ValueError, match="the training data has no rows; give files that hold text"):
        run(tmp_path, rows=Dataset.from_list([]))


def test_whole_configuration_is_kept(tmp_path):
    chosen = options(tmp_path, max_steps=1)
    rows = Dataset.from_list(token_rows())
    extra = {"files": ["corpus.txt"]}
    train(tiny_bert(), chosen, create_accelerator(chosen), rows, random_masks, run_config=extra)
    written = json.loads((tmp_path / "run_config.json").read_text())
    assert written["run"] == extra
    assert written["options"]["learning_rate"] == 1e-2 and written["processes"] == 1


def tiny_encoder(model_class=FratrieEncoderForMaskedLM):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return model_class(FratrieEncoderConfig(vocab_size=VOCAB, pad_token_id=0, **sizes))


def test_the_code_goes_with_a_model_that_is_to_have_it(tmp_path):
    """By the option, or because the model was loaded with it."""
    run(tmp_path / "without", tiny_encoder(), max_steps=1)
    assert not list((tmp_path / "without").glob("*.py"))
    run(tmp_path / "with", tiny_encoder(), max_steps=1, export_code=True)
    run(tmp_path / "again", FratrieEncoderForMaskedLM.from_pretrained(tmp_path / "with"), max_steps=1)
    for folder in (tmp_path / "with", tmp_path / "again"):
        references = json.loads((folder / "config.json").read_text())["auto_map"]
        assert references["AutoModelForMaskedLM"] == "encoder.FratrieEncoderForMaskedLM"
        assert {"encoder.py", "configuration.py"} < {path.name for path in folder.glob("*.py")}


def test_code_that_cannot_go_with_a_model_is_said_before_the_first_step(tmp_path):
    class Own(FratrieEncoderForMaskedLM):
        pass

    for model in (tiny_bert(), tiny_encoder(Own)):
        with pytest.raises(ValueError, match=f"{type(model).__name__} is none of the models of fratrie"):
            run(tmp_path, model, max_steps=1, export_code=True)
    assert not (tmp_path / "run_config.json").exists()
    run(tmp_path / "with", tiny_encoder(), max_steps=1, export_code=True)
    run(tmp_path / "own", Own.from_pretrained(tmp_path / "with"), max_steps=1)  # its code is the user's to bring
    assert not list((tmp_path / "own").glob("*.py"))


def test_logs_to_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, result = run(tmp_path, max_steps=3, report_to="tensorboard")
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert {"loss", "grad_norm", "learning_rate", "samples_per_second", "tokens_per_second"} <= set(
        events.Tags()["scalars"]
    )
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses(result))


def test_bf16_is_near_float32(tmp_path):
    _, exact = run(tmp_path / "fp32", bert_without_dropout(), max_steps=5)
    model, half = run(tmp_path / "bf16", bert_without_dropout(), max_steps=5, mixed_precision="bf16")
    assert losses(half) == pytest.approx(losses(exact), rel=2e-2)
    assert losses(half) != losses(exact)
    assert model.dtype == torch.float32


def test_clips_the_gradient(tmp_path):
    _, free = run(tmp_path / "free", max_steps=1, max_grad_norm=0)
    _, clipped = run(tmp_path / "clipped", max_steps=2, max_grad_norm=1e-9, weight_decay=0)
    assert clipped.history[0]["grad_norm"] == free.history[0]["grad_norm"] > 0.1


def test_a_run_that_saves_nothing_trains_as_any_other(tmp_path):
    saved, result = run(tmp_path / "saved")
    model, unsaved = run(tmp_path / "unsaved", save=False)
    assert list((tmp_path / "unsaved").iterdir()) == []
    assert losses(unsaved) == losses(result)
    assert_equal_weights(model, saved)
    with pytest.raises(ValueError, match="save_steps=0"):
        run(tmp_path / "checkpoints", save=False, save_steps=1)
