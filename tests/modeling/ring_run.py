"""One of several processes that attend in a ring; `test_ring.py` starts it.

Writes how far its part of outputs and gradients is from the plain formula over whole rows, by case.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fratrie.modeling.blockwise import Call, blockwise_attention
from fratrie.modeling.ring import RingMask, places_of

ROWS, HEADS, GROUPS, LENGTH, SIZE = 2, 4, 2, 24, 3
# Two and three documents, of which the last of each row is padding.
DOCUMENTS = torch.tensor([[0] * 10 + [1] * 9 + [-1] * 5, [0] * 5 + [1] * 11 + [2] * 5 + [-1] * 3])
CASES = {
    "causal": {"is_causal": True},
    "bidirectional": {"is_causal": False},
    "causal, packed and padded": {"is_causal": True, "documents": DOCUMENTS},
    "bidirectional, padded": {"is_causal": False, "documents": DOCUMENTS.clamp_max(0)},
    "causal window": {"is_causal": True, "window": 5},
    "window to both sides, packed": {"is_causal": False, "window": 3, "documents": DOCUMENTS},
}


def whole(is_causal, documents=None, window=None):
    """The plain formula: operands, mixed values, and gradients of a fixed direction."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = [draw(ROWS, heads, LENGTH, SIZE).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = (distance >= 0) | (not is_causal)
    if window is not None:
        seen = seen & (distance < window if is_causal else distance.abs() <= window)
    seen = seen.expand(ROWS, 1, LENGTH, LENGTH)
    if documents is not None:
        same = documents[:, None, :, None] == documents[:, None, None]
        seen = seen & same & (documents >= 0)[:, None, None]
    query, key, value = inputs[0], *(x.repeat_interleave(HEADS // GROUPS, 1) for x in inputs[1:])
    scores = (query @ key.mT * SIZE**-0.5).masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    mixed = weights.masked_fill(weights.isnan(), 0.0) @ value
    direction = draw(*mixed.shape)
    shown = seen.any(-1)[..., None]  # elsewhere the plain softmax has no gradient
    grads = torch.autograd.grad((mixed * direction).masked_fill(~shown, 0.0).sum(), inputs)
    return inputs, mixed.masked_fill(~shown, 0.0), direction, grads


def difference(here, name, dropout=0.0):
    """Of our part to the same part of the whole."""
    case = CASES[name]
    inputs, mixed, direction, grads = whole(**case)
    parts = [x.detach()[:, :, here].requires_grad_() for x in inputs]
    documents = case.get("documents")
    mask = RingMask(**case | ({} if documents is None else {"documents": documents[:, here]}))
    actual = blockwise_attention(*parts, mask, block_size=2)
    found = torch.autograd.grad((actual * direction[:, :, here]).sum(), parts)
    pairs = [(actual, mixed[:, :, here]), *((x, y[:, :, here]) for x, y in zip(found, grads, strict=True))]
    return [float((x - y).abs().max()) for x, y in pairs]


def blocks_computed(here):
    """How many blocks of pairs this process computes in a causal row."""
    count, blocks = [], Call.blocks

    def counted(self, *args):
        for block in blocks(self, *args):
            count.append(1)
            yield block

    Call.blocks = counted
    x = torch.randn(1, 1, len(here), SIZE)
    blockwise_attention(x, x, x, RingMask(is_causal=True), block_size=1)
    Call.blocks = blocks
    return len(count)


def dropped(here):
    """Whether the gradient of the values is that of the weights that were left: <output, 1> = <value, gradient>."""
    torch.manual_seed(dist.get_rank())
    query, key, value = (x.detach()[:, :, here].requires_grad_() for x in whole(is_causal=True)[0])
    mixed = blockwise_attention(query, key, value, RingMask(is_causal=True), dropout=0.5, block_size=2)
    (grad,) = torch.autograd.grad(mixed.sum(), value)
    plainly = blockwise_attention(query, key, value, RingMask(is_causal=True))
    sums = torch.stack([mixed.sum(), (grad * value).sum(), (mixed - plainly).abs().max()])
    dist.all_reduce(sums)
    return [float(sums[0] - sums[1]), float(sums[2])]


def main(folder):
    alone = {} if "WORLD_SIZE" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **alone)
    rank, processes = dist.get_rank(), dist.get_world_size()
    here = places_of(LENGTH, rank, processes)
    report = {"differences": {name: difference(here, name) for name in CASES}}
    report |= {"blocks": blocks_computed(here), "dropout": dropped(here)}
    Path(folder, f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
