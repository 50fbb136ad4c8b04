"""What attention moves between slow and fast memory: by hand, and how it scales."""

import pytest

from fratrie.accounting import blockwise_traffic, standard_traffic


def total(traffic):
    return traffic.reads + traffic.writes


def test_small_cases_by_hand():
    # Q and K in, S out; S in, P out; P and V in, O out.
    assert standard_traffic(4, 2) == (8 + 8 + 16 + 16 + 8, 16 + 16 + 8)
    # Room for 2 queries with sums and two numbers each, so K and V are read twice; O and one number a query go out.
    assert blockwise_traffic(4, 2, 2 * 2 * 6) == (8 + 2 * 16, 8 + 4)
    assert blockwise_traffic(4, 2, 1000) == (3 * 8, 8 + 4), "all fits: each number moves once"


def test_standard_attention_grows_with_the_square_of_the_length_alone():
    long = 10**6
    assert total(standard_traffic(2 * long, 64)) / total(standard_traffic(long, 64)) == pytest.approx(4, rel=1e-3)
    assert total(standard_traffic(long, 128)) / total(standard_traffic(long, 64)) == pytest.approx(1, rel=1e-3)
    # Short rows are vectors rather than pairs.
    assert total(standard_traffic(8, 10**4)) / total(standard_traffic(4, 10**4)) == pytest.approx(2, rel=1e-2)


def test_blockwise_attention_grows_with_length_and_head_squared_over_the_memory():
    length, size, memory = 2**22, 64, 2**17
    base = total(blockwise_traffic(length, size, memory))
    assert total(blockwise_traffic(2 * length, size, memory)) / base == pytest.approx(4, rel=2e-2)
    assert total(blockwise_traffic(length, 2 * size, memory)) / base == pytest.approx(4, rel=4e-2)
    assert total(blockwise_traffic(length, size, 2 * memory)) / base == pytest.approx(1 / 2, rel=2e-2)
    assert base == pytest.approx(8 * length**2 * size**2 / memory, rel=4e-2)


def test_at_the_sizes_of_a_gpu_it_moves_a_fraction():
    # 100 KB of shared memory hold 2^15.6 numbers of 2 bytes.
    standard, blockwise = standard_traffic(4096, 64), blockwise_traffic(4096, 64, 50_000)
    assert total(standard) > 5 * total(blockwise)


@pytest.mark.parametrize("sizes", [(0, 2, 100), (2, 0, 100), (2, 2, 0)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ValueError, match=r"=0: give 1 or more"):
        blockwise_traffic(*sizes)


def test_a_memory_without_room_is_refused_by_name():
    with pytest.raises(ValueError, match=r"fast_memory=259 holds no block .* head_dim=64: give 260 or more"):
        blockwise_traffic(10, 64, 259)
    assert blockwise_traffic(10, 64, 260).reads == 640 + 10 * 1280
