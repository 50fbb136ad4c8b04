"""Hugging Face's Seq2SeqTrainer on the encoder-decoder, unmodified."""

import numpy as np
import torch
from combinations import SEQ2SEQ, case_of
from trainer_texts import TEXTS, sizes
from transformers import DataCollatorForSeq2Seq, EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments


def test_training_and_evaluation_by_generated_texts(tokenizers, tmp_path):
    """The model learns to repeat short texts; the metric reads what it generates."""
    tokenizer = tokenizers[SEQ2SEQ]
    torch.manual_seed(0)
    model = case_of(SEQ2SEQ).build(**sizes(tokenizer))
    texts = sorted(TEXTS, key=len)[:3]
    rows = [{"input_ids": tokenizer(text)["input_ids"], "labels": tokenizer(text)["input_ids"]} for text in texts]
    seen = []

    def share_of_equal_texts(found: EvalPrediction):
        assert found.predictions.dtype == found.label_ids.dtype == np.int64
        labels = np.where(found.label_ids < 0, tokenizer.pad_token_id, found.label_ids)
        predictions = np.where(found.predictions < 0, tokenizer.pad_token_id, found.predictions)
        seen.append(tokenizer.batch_decode(predictions, skip_special_tokens=True))
        wanted = tokenizer.batch_decode(labels, skip_special_tokens=True)
        return {"equal": float(np.mean([a == b for a, b in zip(seen[-1], wanted, strict=True)]))}

    options = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, save_strategy="no", learning_rate=5e-3,
        max_steps=60, predict_with_generate=True, generation_max_length=30, per_device_eval_batch_size=2,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        model, options, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model), compute_metrics=share_of_equal_texts,
    )  # fmt: skip
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert before["eval_equal"] < 1
    assert after["eval_equal"] == 1
    assert after["eval_loss"] < 0.5 * before["eval_loss"]
    assert seen[-1] == texts
    ids = tokenizer(texts, return_tensors="pt", padding=True)
    generated = model.eval().generate(**ids, max_length=30)
    assert tokenizer.batch_decode(generated, skip_special_tokens=True) == texts
