import errno
import logging
import os

import pytest
import torch
from accelerate.state import AcceleratorState
from short_runs import Killed, assert_equal_weights, every_step, killed_at, losses
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding

from fratrie import (
    FratrieDecoderConfig,
    FratrieDecoderForSequenceClassification,
    FratrieEncoderConfig,
    FratrieEncoderForSequenceClassification,
)
from fratrie.tokenization import train_byte_level_bpe
from fratrie.training.evaluation import evaluate_loss
from fratrie.training.frozen_states import frozen_depth, keep_states
from fratrie.training.layers import freeze_below
from fratrie.training.loop import TrainingOptions, create_accelerator, train
from fratrie.training.scoring import predict_logits

TEXTS = ["ma mère", "mon père m'aime", "ma sœur et mon frère", "nous", "ma mère", "elle ne parle pas", "oui", "tu"]
TOKENIZERS = {  # a decoder's pads on the left
    sibling: train_byte_level_bpe(TEXTS, vocab_size=300, sibling=sibling, show_progress=False)
    for sibling in ("encoder", "decoder")
}
SIZES = {
    **{"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24},
    **{"vocab_size": 300, "max_position_embeddings": 32, "pad_token_id": 1, "num_labels": 3},
    # The bias of keys has no gradient but noise, which Adam would turn into steps.
    "attention_bias": False,
}
MIXED = ["full_attention", "sliding_attention", "linear_attention"]
HIDDEN_DROPOUT = {"hidden_dropout": 0.1, "embedding_dropout": 0.1}


def classifier(trainable_layers=1, sibling="encoder", **fields):
    """A classifier whose upper layers are trained."""
    kinds = {
        "encoder": (FratrieEncoderForSequenceClassification, FratrieEncoderConfig),
        "decoder": (FratrieDecoderForSequenceClassification, FratrieDecoderConfig),
    }
    model_class, config_class = kinds[sibling]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, initializer_range=0.3, **fields))
    freeze_below(model, trainable_layers, set())
    return model


def rows(tokenizer):
    encoded = tokenizer(TEXTS)["input_ids"]
    return [{"input_ids": ids, "attention_mask": [1] * len(ids), "labels": len(ids) % 3} for ids in encoded]


def options(folder, **changes):
    given = {"per_device_train_batch_size": 3, "num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 1}
    return TrainingOptions(
        output_dir=str(folder), report_to="none", disable_progress=True, **{"save_steps": 0, **given, **changes}
    )


def run(folder, model, keep=True, sibling="encoder", evaluate=None, **changes):
    """Train with states that are kept or not; give the loss records, and the evaluation of the trained model."""
    AcceleratorState._reset_state(True)
    chosen, tokenizer = options(folder, **changes), TOKENIZERS[sibling]
    accelerator, texts = create_accelerator(chosen), rows(tokenizer)
    collator = DataCollatorWithPadding(tokenizer)
    if keep:
        collator = keep_states(model, accelerator, texts, collator, 3, folder)
    result = train(model, chosen, accelerator, texts, collator, evaluate=evaluate)
    logits = predict_logits(model, accelerator, texts, tokenizer, 3, collator=collator)
    return result, [evaluate_loss(model, accelerator, texts, collator, 3)["eval_loss"], *logits.flatten().tolist()]


@pytest.mark.parametrize(
    ("trainable_layers", "fields", "depth"),
    [
        *((-1, {}, 0), (0, {}, 3), (1, {}, 2), (3, {}, 0)),
        (1, {"mlp_layer_types": ["dense", "sparse", "dense"], "num_experts": 4}, 0),
        (1, {"mlp_layer_types": ["dense", "dense", "sparse"], "num_experts": 4}, 2),
    ],
)
def test_how_many_layers_are_frozen(trainable_layers, fields, depth):
    if trainable_layers == 3:  # the embeddings may be frozen alone: their states are those of no layer
        assert not any(weight.requires_grad for weight in classifier(3).model.embed_tokens.parameters())
    assert frozen_depth(classifier(trainable_layers, **fields)) == depth


def test_what_lower_layers_read_must_be_frozen_too():
    model = classifier(position_type="relative")
    assert frozen_depth(model) == 2
    model.model.position_bias.requires_grad_(True)
    assert frozen_depth(model) == 0


def test_tokens_stay_where_no_states_can_be_kept(tmp_path):
    accelerator, texts = create_accelerator(options(tmp_path)), rows(TOKENIZERS["encoder"])
    pad = DataCollatorWithPadding(TOKENIZERS["encoder"])
    theirs = BertForSequenceClassification(BertConfig(**SIZES)).requires_grad_(False)
    for model in (theirs, classifier(-1)):
        assert keep_states(model, accelerator, texts, pad, 3, tmp_path) is pad
    without_mask = [{"input_ids": row["input_ids"]} for row in texts]

    def pad_ids(batch):
        return {"input_ids": pad(batch)["input_ids"]}

    assert keep_states(classifier(), accelerator, without_mask, pad_ids, 3, tmp_path) is pad_ids


@pytest.mark.parametrize(
    ("sibling", "fields"),
    [
        ("encoder", {"position_type": "learned", "unpad_inputs": False}),
        ("encoder", {"position_type": "rotary", "sliding_window": 3, "layer_types": MIXED}),
        ("decoder", {"position_type": "relative"}),
    ],
    ids=["padded", "mixers", "decoder"],
)
def test_training_on_kept_states_is_training_on_tokens(tmp_path, sibling, fields):
    kept, plain = classifier(sibling=sibling, **fields), classifier(sibling=sibling, **fields)
    before = {name: weight.clone() for name, weight in plain.state_dict().items()}
    result, evaluation = run(tmp_path / "kept", kept, True, sibling)
    _, expected = run(tmp_path / "plain", plain, False, sibling)
    assert_equal_weights(kept, plain, atol=1e-5, rtol=1e-5)
    assert evaluation == pytest.approx(expected, abs=1e-5)
    changed = {name for name, weight in kept.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed and all("layers.2." in name or "classifier." in name for name in changed)
    assert {"samples_per_second", "tokens_per_second"} <= result.history[0].keys()


def test_dropout_above_the_kept_states_alone(tmp_path):
    """Kept states change nothing where only the frozen layers had dropout; each epoch has the same."""
    model = classifier(trainable_layers=0, **HIDDEN_DROPOUT)
    plain = classifier(trainable_layers=0)
    run(tmp_path / "kept", model)
    run(tmp_path / "plain", plain, keep=False)
    assert_equal_weights(model, plain, atol=1e-5, rtol=1e-5)


def test_states_lie_in_the_place_of_tokens(tmp_path, caplog):
    caplog.set_level(logging.INFO, "fratrie")
    accelerator, tokenizer = create_accelerator(options(tmp_path)), TOKENIZERS["decoder"]
    texts, pad = rows(tokenizer), DataCollatorWithPadding(tokenizer)
    model = classifier(sibling="decoder", return_dict=False, **HIDDEN_DROPOUT).train()
    collator = keep_states(model, accelerator, texts, pad, 3, tmp_path)
    assert model.training and model.model.layers[0].training
    number = sum(len(row["input_ids"]) for row in texts) - len(texts[4]["input_ids"])  # it is the first one again
    assert collator.states_ND.shape == (number, 16)
    assert f"frozen layers: 2; their states of 7 texts are kept in a temporary file of {number * 64 / 1e6:.1f}" in (
        caplog.text
    )
    assert not any(path.is_file() for path in tmp_path.rglob("*"))  # the file has no name
    batch, padded = collator(texts[:3]), pad(texts[:3])
    assert batch.keys() == {"inputs_embeds", "first_layer", "attention_mask", "labels"} and batch["first_layer"] == 2
    with torch.no_grad():
        states = (
            model.eval()
            .model(**{**padded, "labels": None}, use_cache=False, output_hidden_states=True, return_dict=True)
            .hidden_states[2]
        )
    torch.testing.assert_close(batch["inputs_embeds"], states)
    assert padded["attention_mask"].min() == 0


def test_a_file_without_room_is_refused(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"has no room .*: choose another output_dir, or .*--recompute_frozen_states"):
        run(tmp_path, classifier())


def test_a_resumed_run_computes_the_states_again(tmp_path):
    changes = {"save_steps": 1, "num_train_epochs": 1, **every_step()}
    whole, resumed, other = (classifier(**HIDDEN_DROPOUT) for _ in range(3))
    result, _ = run(tmp_path / "whole", whole, evaluate=killed_at(-1), **changes)
    with pytest.raises(Killed):
        run(tmp_path / "run", classifier(**HIDDEN_DROPOUT), evaluate=killed_at(2), **changes)
    changes["resume_from_checkpoint"] = "last"
    with torch.no_grad():
        other.model.embed_tokens.weight[5] += 1
    # The rows are those of before; what made their states, or that they were kept, is not.
    with pytest.raises(ValueError, match=r"(?s)collator.weights: '\w+' then, '\w+' now(?!.*\n  data)"):
        run(tmp_path / "run", other, evaluate=killed_at(-1), **changes)
    with pytest.raises(ValueError, match=r"(?s)collator.first_layer: 2 then, None now(?!.*\n  data)"):
        run(tmp_path / "run", resumed, keep=False, evaluate=killed_at(-1), **changes)
    continued, _ = run(tmp_path / "run", resumed, evaluate=killed_at(-1), **changes)
    assert losses(continued) == losses(result) and len(losses(result)) == 3
    assert_equal_weights(resumed, whole)
