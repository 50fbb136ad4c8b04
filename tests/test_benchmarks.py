"""The table of speeds: its modules are found, a small one of each kind runs, and a saved table is complete."""

import importlib
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks import all as table
from benchmarks import few_labels, mixers
from benchmarks.limits import _Products, products_alone, profile
from benchmarks.rows import decoder_training, masked_language_modelling, optimizer
from benchmarks.timing import Row, times
from benchmarks.training_steps import Case, Documents
from fratrie.inference import pack

TINY = Documents(count=6, batch_size=3, longest=9)


def test_every_module_of_rows_measures_and_says_what():
    assert {"encoder_training", "optimizer"} <= set(table.names())
    for name in table.names():
        module = importlib.import_module(f"benchmarks.rows.{name}")
        assert callable(module.measure) and module.__doc__, name


def test_candidates_take_turns_after_a_round_to_warm_up():
    called = []
    measured = times({name: lambda name=name: called.append(name) for name in "ab"}, rounds=2)
    assert "".join(called) == "ababab"
    assert set(measured) == {"a", "b"} and min(measured.values()) > 0


def test_a_row_in_markdown():
    line = table.table([Row("a step", 2.0, None, 1.5, "3 ms", "of BERT", 1.8)]).splitlines()[-1]
    assert line == "| a step | 2.00 | – | 1.50 | 1.80 | 3 ms | of BERT |"


def test_the_optimizer_at_its_smallest():
    (row,) = optimizer.measure(rounds=1, layers=1, width=8, vocabulary=10)
    assert row.against_default > 0 and row.hf_best > 0 and row.limit > 0


def test_products_alone_are_those_of_both_passes():
    """In the dtype of autocast, with attention as one, and nothing between them."""

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            states = layer(torch.ones(3, 1, 2, 4)).relu()
            nn.functional.scaled_dot_product_attention(states, states, states).sum().backward()

    layer, seen = nn.Linear(4, 8), _Products()
    alone = products_alone(step)
    with seen:
        alone()
    names = [call.func._schema.name.removeprefix("aten::") for call in seen.calls]
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert names == ["addmm", attention, f"{attention}_backward", "mm"]
    assert seen.calls[0].args[1].dtype == torch.bfloat16


def test_products_alone_take_packed_weights():
    layer = pack(nn.Sequential(nn.Linear(4, 8)), "int8")
    alone = products_alone(partial(layer, torch.ones(32, 4)))
    assert [call.func._schema.name for call in alone.args[0]] == ["aten::_int_mm"]


def test_a_profile_names_operators():
    assert "aten::mm" in profile(lambda: torch.ones(2, 2) @ torch.ones(2, 2))


@pytest.mark.parametrize(
    ("module", "dtype"), [(decoder_training, torch.float32), (masked_language_modelling, torch.bfloat16)]
)
def test_steps_of_training_at_their_smallest(module, dtype):
    rows = module.measure(rounds=1, cases=[Case(1, 64, 20, dtype, TINY, goal=2.0)])
    assert rows[-1].goal == 2.0 and all(min(row.against_default, row.hf_best, row.limit) > 0 for row in rows)


def test_other_weights_are_not_timed(monkeypatch):
    def broken(model):
        ours = from_hf(model)
        with torch.no_grad():
            next(ours.parameters()).mul_(1.1)
        return ours

    from_hf = decoder_training.from_hf
    monkeypatch.setattr(decoder_training, "from_hf", broken)
    with pytest.raises(AssertionError, match="not close"):
        decoder_training.measure(rounds=1, cases=[Case(1, 64, 20, torch.float32, TINY, goal=2.0)])


@pytest.mark.skipif(not table.RESULTS.exists(), reason="no table is saved")
def test_the_saved_table_has_every_module():
    saved = table.RESULTS.read_text(encoding="utf-8")
    assert [name for name in table.names() if f"\n## {name}\n" not in saved] == []


def test_mixers_beside_softmax_at_their_smallest(tmp_path):
    threads = torch.get_num_threads()
    options = mixers.Options(mixers=["linear", "linformer"], lengths=[8, 16], rounds=1, threads=threads)
    causal, bidirectional = (mixers.measure(options, is_causal, True) for is_causal in (True, False))
    assert [found.name for found in causal] == ["softmax", "linear"]
    assert [found.name for found in bidirectional] == ["softmax", "linear", "linformer"]
    assert all(found.seconds.keys() == found.memory.keys() == {8, 16} for found in causal + bidirectional)
    assert all(found.mixing[n] < found.seconds[n] for found in causal + bidirectional for n in (8, 16))
    assert causal[0].ratio(16) == 1 and mixers.table(causal, options.lengths).count("\n") == 4
    mixers.draw({"Causal": causal, "Bidirectional": bidirectional}, tmp_path / "plot.svg")
    assert "linformer" in (tmp_path / "plot.svg").read_text()


def test_the_ratio_of_the_mixing_alone_where_there_is_one():
    softmax = mixers.Measured("softmax", seconds={8: 3.0}, mixing={8: 2.0})
    other = mixers.Measured("other", seconds={8: 2.0}, mixing={8: 1.0}, softmax=softmax)
    assert (softmax.mixing_ratio(8), other.mixing_ratio(8)) == ("1.0", "2.0")
    for little in (0.1, -0.01):
        assert mixers.Measured("maps", seconds={8: 1.0}, mixing={8: little}, softmax=softmax).mixing_ratio(8) == "–"


def test_the_slope_of_a_cost_in_the_length():
    squared = mixers.Measured("softmax", seconds={1024: 9.0, 2048: 1.0, 4096: 4.0, 8192: 16.0})
    assert squared.slope() == pytest.approx(2.0)


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(0, 99), st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1))
def test_a_few_sentences_of_each_label_are_drawn(number, seed, truth):
    """At least so many, or all that there are, in no more sentences than that takes."""
    truth_NL = np.array(truth)
    rows = few_labels.draw(truth_NL, number, seed)
    assert len(rows) == len(set(rows)) <= 3 * number and truth_NL[rows].any(1).all()
    assert (truth_NL[rows].sum(0) >= np.minimum(truth_NL.sum(0), number)).all()


def test_few_labels_in_a_table():
    results = {f"fratrie 8 {seed}": {"sentences": 80 + seed, "macro_f1": seed / 4, "seconds": 9.0} for seed in (1, 2)}
    assert few_labels.table(results).splitlines()[-1] == "| 8 | 82 | fratrie | 0.375 | 0.250 to 0.500 | 9 |"
