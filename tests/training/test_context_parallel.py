"""Rows that are split over processes: loss, gradients and whole runs are those of one process; what is refused."""

import json
from pathlib import Path

import pytest
import torch
from processes import run_forked

from fratrie import (
    FratrieDecoderConfig,
    FratrieDecoderForCausalLM,
    FratrieDecoderForSequenceClassification,
    FratrieEncoderConfig,
    FratrieEncoderForMaskedLM,
)
from fratrie.modeling.mixers import MIXERS
from fratrie.tokenization import train_byte_level_bpe
from fratrie.training.context_parallel import Context, documents_of, open_context

RUN = Path(__file__).with_name("context_run.py")
SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain.py"
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 24, "pad_token_id": 0}
TEXTS = [f"ma {who} est {how}" for who in ("sœur", "mère", "tante") for how in ("gentille", "absente", "drôle", "là")]


@pytest.mark.distributed
def test_loss_and_gradients_are_those_of_whole_rows(tmp_path):
    done = run_forked(RUN, tmp_path, processes=2, seconds=120)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "0.json").read_text())
    assert len(report) == 8
    for name, (loss, *gradients) in report.items():
        assert loss < 1e-12, name
        assert max(gradients) < 1e-12, name


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "texts.txt").write_text("\n".join(TEXTS * 2) + "\n", encoding="utf-8")
    train_byte_level_bpe(TEXTS * 3, vocab_size=330, sibling="decoder", show_progress=False).save_pretrained(folder)
    return folder


def pretrain(corpus, output, processes, *extra, objective="clm"):
    sizes = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
    named = {"objective": objective, "tokenizer": corpus, "files": corpus / "texts.txt", "output_dir": output}
    named |= {"config_overrides": sizes, "block_size": 30, "per_device_train_batch_size": 3, "max_steps": 4}
    named |= {"save_steps": 2, "save_total_limit": 9, "logging_steps": 1, "report_to": "none", "eval_steps": 2}
    named |= {"eval_strategy": "steps", "learning_rate": 1e-2}
    given = [part for name, value in named.items() for part in (f"--{name}", value)]
    done = run_forked(SCRIPT, *given, "--disable_progress", *extra, processes=processes)
    states = [json.loads((path / "trainer_state.json").read_text()) for path in sorted(output.glob("checkpoint-*"))]
    return done, states[-1]["run"]["history"] if states else None


def column(history, name):
    return [record[name] for record in history if name in record]


@pytest.mark.distributed
@pytest.mark.parametrize(("objective", "processes"), [("clm", 2), ("mlm", 4)])
def test_a_run_of_split_rows_is_that_of_one_process_and_resumes(corpus, tmp_path, objective, processes):
    """With four processes, as two contexts, each of which has half of the rows of one that accumulates two."""
    accumulate = ["--gradient_accumulation_steps", processes // 2]
    done, single = pretrain(corpus, tmp_path / "one", 1, *accumulate, objective=objective)
    assert done.returncode == 0, done.stderr
    folder, split = tmp_path / "split", ["--context_parallel_size", 2]
    done, double = pretrain(corpus, folder, processes, *split, objective=objective)
    assert done.returncode == 0, done.stderr
    for name in ("loss", "grad_norm", "eval_loss"):
        assert column(double, name) == pytest.approx(column(single, name), rel=1e-5), name
    assert len(column(double, "loss")) == 4
    if objective == "mlm":
        return
    (folder / "checkpoint-4").rename(tmp_path / "checkpoint-4")
    done, resumed = pretrain(corpus, folder, processes, *split, "--resume_from_checkpoint", "last")
    assert done.returncode == 0, done.stderr
    assert column(resumed, "loss") == column(double, "loss")
    state = json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["fingerprint"]["processes of a context"] == 2, "which a resumed run must have as well"


# --- what is refused -----------------------------------------------------------------------------------------------


def decoder(**fields):
    return FratrieDecoderForCausalLM(FratrieDecoderConfig(**SIZES | fields))


def encoder(**fields):
    return FratrieEncoderForMaskedLM(FratrieEncoderConfig(**SIZES | fields))


def test_models_that_need_whole_rows_are_refused_by_name():
    for kind in ("relative", "alibi"):
        with pytest.raises(ValueError, match=f"position_type='{kind}' adds a bias .* use rotary positions"):
            open_context(decoder(position_type=kind), 2)
    others = {name: mixer for name, mixer in MIXERS.items() if name not in ("softmax", "latent")}
    for name, mixer in others.items():
        model = decoder(mixer_types=[name]) if mixer.runs_causal else encoder(mixer_types=[name])
        with pytest.raises(
            ValueError, match=rf"for softmax attention, not for mixer_types=\['{name}'\]: leave it out"
        ):
            open_context(model, 2)
    classifier = FratrieDecoderForSequenceClassification(FratrieDecoderConfig(**SIZES))
    with pytest.raises(ValueError, match=r"reads whole rows at its head: leave out context_parallel_size"):
        open_context(classifier, 2)
    with pytest.raises(ValueError, match=r"not for a Linear: leave it out"):
        linear = torch.nn.Linear(2, 2)
        linear.config = object()
        open_context(linear, 2)


@pytest.mark.parametrize("size", [0, 2])
def test_a_size_that_does_not_divide_the_processes_is_refused_by_name(size):
    model = decoder()
    with pytest.raises(ValueError, match=f"context_parallel_size={size} does not divide the 1 processes"):
        open_context(model, size)
    assert model.config._attn_implementation != "blockwise"


def test_one_process_leaves_batches_and_model_as_they_are():
    model, batch = decoder(), {"input_ids": torch.ones(1, 3)}
    assert open_context(model, 1).split(batch) is batch
    assert model.config._attn_implementation != "blockwise"


def test_what_cannot_be_split_is_refused_by_name():
    context, ids = Context(2, 0, None, FratrieDecoderConfig(**SIZES)), torch.ones(1, 6, dtype=torch.long)
    with pytest.raises(ValueError, match=r"cannot split \['inputs_embeds'\]: leave them out"):
        context.split({"input_ids": ids, "inputs_embeds": ids})
    with pytest.raises(ValueError, match=r"attention_mask of shape \(1, 1, 6, 6\) cannot be split .* \(1, 6\)"):
        context.split({"input_ids": ids, "attention_mask": torch.ones(1, 1, 6, 6)})


# --- what a part holds ---------------------------------------------------------------------------------------------


def test_the_parts_hold_each_token_once_with_its_place_and_its_next_token():
    config = FratrieDecoderConfig(**SIZES)
    ids = torch.arange(1, 7)[None]
    parts = [Context(2, place, None, config).split({"input_ids": ids, "labels": ids}) for place in (0, 1)]
    assert [part["input_ids"].tolist() for part in parts] == [[[1, 2, 0, 0]], [[3, 4, 5, 6]]]
    assert [part["position_ids"].tolist() for part in parts] == [[[0, 1, 0, 0]], [[2, 3, 4, 5]]]
    assert [part["labels"].tolist() for part in parts] == [[[2, 3, -100, -100]], [[4, 5, 6, -100]]]
    masks = [part["attention_mask"]["full_attention"] for part in parts]
    assert [mask.documents.tolist() for mask in masks] == [[[0, 0, -1, -1]], [[0, 0, 0, 0]]]
    assert all(part["use_cache"] is False and part["shift_labels"] is part["labels"] for part in parts)
    encoder = FratrieEncoderForMaskedLM(FratrieEncoderConfig(**SIZES))
    part = Context(2, 1, None, encoder.config).split({"input_ids": ids[:, :4], "labels": ids[:, :4]})
    assert part["labels"].tolist() == [[2, 3]] and set(part) == {
        *("input_ids", "labels", "position_ids", "attention_mask")
    }
    assert part["attention_mask"]["full_attention"].documents is None, "nothing to send"


def test_documents_begin_where_real_positions_start_anew():
    ids = torch.ones(2, 6, dtype=torch.long)
    assert documents_of(ids, None, torch.arange(6)[None]) is None
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 0, 1, 9, 2, 3]])
    padding = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 1, 1, 0, 1, 1]])
    assert documents_of(ids, padding, positions).tolist() == [[1, 1, 1, 2, 2, -1], [-1, 3, 3, -1, 3, 3]]
    assert documents_of(ids, torch.ones_like(ids), None) is None
