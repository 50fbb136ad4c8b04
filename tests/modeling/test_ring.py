"""Ring attention: one, two and four processes give what one softmax over whole rows gives, gradients too."""

import json
from pathlib import Path

import pytest
import torch
from processes import run_forked

from fratrie.modeling.blockwise import Call, blockwise_attention
from fratrie.modeling.ring import RingMask, chunks_of, places_of

RUN = Path(__file__).with_name("ring_run.py")


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_ring_equals_the_whole(processes, tmp_path):
    done = run_forked(RUN, tmp_path, processes=processes, seconds=120)
    assert done.returncode == 0, done.stderr
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(processes)]
    for report in reports:
        for name, (mixed, *grads) in report["differences"].items():
            assert mixed < 1e-12, name
            assert max(grads) < 1e-10, name
        lost, dropped = report["dropout"]
        assert abs(lost) < 1e-10 and dropped > 0.1
    assert {report["blocks"] for report in reports} == {24 * 25 // 2 // processes}, "all have the same to do"


def test_places_are_dealt_out_once_and_in_pairs_from_both_ends():
    places = [places_of(24, rank, 3) for rank in range(3)]
    assert torch.cat(places).sort().values.tolist() == list(range(24))
    assert places[1].tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    # Chunk n of the queries meets n + 1 chunks of keys.
    assert {sum(number + 1 for number in chunks_of(rank, 3)) for rank in range(3)} == {7}


def test_what_cannot_be_split_is_refused_by_name():
    with pytest.raises(ValueError, match=r"Rows of 25 tokens .* over 3 processes: pad them to a multiple of 6"):
        places_of(25, 0, 3)
    x, mask = torch.randn(1, 1, 4, 2), RingMask(is_causal=True)
    with pytest.raises(ValueError, match=r"adds nothing to the scores: use position_type='rotary'"):
        blockwise_attention(x, x, x, mask, bias=torch.zeros(1, 1, 4, 4))
    with pytest.raises(ValueError, match=r"2 queries and 4 keys: .*use_cache=False"):
        blockwise_attention(x[:, :, :2], x, x, mask)
    with pytest.raises(ValueError, match=r"3 queries and 3 keys: ring attention takes two chunks"):
        blockwise_attention(x[:, :, :3], x[:, :, :3], x[:, :, :3], mask)
    with pytest.raises(ValueError, match=r"cannot be part of a compiled graph: leave out torch.compile"):
        list(Call(scale=1.0, mask=mask).blocks(2, 2, torch.device("cpu")))
