"""What attention reads from slow memory and writes to it, a fast memory of limited size between (Dao et al. 2022)."""

from typing import NamedTuple


class Traffic(NamedTuple):
    """Numbers read from slow memory and written to it."""

    reads: int
    writes: int


def standard_traffic(length: int, head_dim: int) -> Traffic:
    """One head's attention that writes its scores and its weights out, Θ(T·d + T²).

    Scores are made of queries and keys, weights of scores, and mixed values of weights and values; each product is
    counted as if the fast memory read its factors just once, as it would at best.

    Args:
        length: T tokens, queries as keys.
        head_dim: d numbers of a query, a key or a value.

    Returns:
        What one forward pass moves.

    Raises:
        ValueError: for sizes below 1.
    """
    _check(length=length, head_dim=head_dim)
    vectors, pairs = length * head_dim, length**2
    return Traffic(reads=3 * vectors + 2 * pairs, writes=vectors + 2 * pairs)


def blockwise_traffic(length: int, head_dim: int, fast_memory: int) -> Traffic:
    """One head's attention by blocks, Θ(T²·d²/M) as long as the fast memory is smaller than the sequence.

    A block of queries stays, with its sums and two numbers of each, while all keys and values pass by, as in
    `fratrie.modeling.blockwise`: the more queries fit, the fewer times that is. Scores never leave.

    Args:
        length: T tokens, queries as keys.
        head_dim: d numbers of a query, a key or a value.
        fast_memory: M numbers that the fast memory holds.

    Returns:
        What one forward pass moves.

    Raises:
        ValueError: for sizes below 1, and for a memory that has no room for one query and one key.
    """
    _check(length=length, head_dim=head_dim, fast_memory=fast_memory)
    # Half of it for queries and their sums, half for a few keys with their values and scores.
    queries = fast_memory // 2 // (2 * head_dim + 2)
    if queries < 1:
        raise ValueError(
            f"fast_memory={fast_memory} holds no block of queries of head_dim={head_dim}: give {4 * head_dim + 4} or "
            "more."
        )
    rounds = -(-length // queries)
    vectors = length * head_dim
    return Traffic(reads=vectors + rounds * 2 * vectors, writes=vectors + length)


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size}: give 1 or more.")
