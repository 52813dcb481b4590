"""Attention plans: blocks of queries, and the keys to which each block attends. Kernels compute only these scores."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from isotype.compat.torch import base_of, version_of

LOG2_E = math.log2(math.e)

Span = tuple[int, int]
"""(first, last + 1)"""

_AT_ONCE = 1 << 20
"""A comparison of a mask reads about this number of values at once."""


@dataclass(frozen=True)
class Block:
    """The queries with the indices `rows` in the rows `batch` of the batch, and the keys to which they attend.

    Attributes:
        masked: the keys that need a mask, because some queries do not attend to them, or because their scores have a bias.
        tile: log2(e) times the mask of the keys in `masked`, as float32 `[1 or heads, rows, masked]`. Kernels multiply scores
            by log2(e), add the tile, and compute powers of 2.
    """

    batch: Span
    rows: Span
    keys: Span
    masked: Span = (0, 0)
    tile: torch.Tensor | None = None


@dataclass(frozen=True)
class Plan:
    """The keys to which each query of a batch attends. The result is zero for a query that is in no block.

    Attributes:
        closed_finitely: True if the mask adds large negative, finite numbers (not -inf) to all scores of some query. In torch's
            kernels, such a query attends to all keys about equally. Blocks cannot compute this.
    """

    batch: int
    queries: int
    keys: int
    blocks: tuple[Block, ...]
    closed_finitely: bool = False

    @cached_property
    def _sizes(self) -> list[tuple[int, int]]:
        """For each block: (number of its queries, summed over the batch; number of its keys)."""
        spans = ((block.batch, block.rows, block.keys) for block in self.blocks)
        return [((b[1] - b[0]) * (rows[1] - rows[0]), keys[1] - keys[0]) for b, rows, keys in spans]

    @cached_property
    def whole(self) -> bool:
        """True if every query of every row of the batch is in a block."""
        return sum(queries for queries, _ in self._sizes) == self.batch * self.queries

    @cached_property
    def area(self) -> int:
        """Number of scores that a kernel computes for the whole batch, per head."""
        return sum(queries * keys for queries, keys in self._sizes)


def block_rows(group: int) -> int:
    """Return the number of queries in a block. `group` is the number of query heads per key head.

    A matrix product uses a core fully if it has at least about 200 rows (queries × `group`). With more rows, more
    masked scores are computed.
    """
    return max(32, min(128, 192 // group))


@lru_cache(maxsize=32)
def plan_of(size: tuple[int, int, int], rows: int, *, causal: bool) -> Plan:
    """Return the plan of full or causal attention. The plan is cached, and all layers and steps share it.

    Args:
        size: (batch, queries, keys).
        rows: number of queries in a block (see `block_rows`).
        causal: True if no query attends to later keys. The last query and the last key have the same position.
    """
    batch, queries, keys = size
    with torch.inference_mode(False):  # a training step may read the plan's tiles next
        return Plan(batch, queries, keys, tuple(_blocks((0, batch), queries, keys, rows, causal)))


def _blocks(batch: Span, queries: int, keys: int, rows: int, causal: bool) -> Iterator[Block]:
    later = keys - queries  # the key at the position of query 0
    tiles: dict[int, torch.Tensor] = {}
    for first in range(0, queries if keys else 0, rows):
        last = min(first + rows, queries)
        if not causal:
            yield Block(batch, (first, last), (0, keys))
            continue
        first = max(first, -later)  # queries before the first key attend to no key
        if last <= first:
            continue
        begin, high, count = first + later + 1, last + later, last - first
        if count not in tiles:
            tiles[count] = _tile(count)
        yield Block(batch, (first, last), (0, high), (begin, high), tiles[count] if count > 1 else None)


def _tile(count: int) -> torch.Tensor:
    """Return a tile `[1, count, count - 1]` with -inf where a key is after the query. Key k is at query k + 1."""
    after = torch.arange(count)[:, None] <= torch.arange(count - 1)
    return torch.zeros(1, *after.shape, dtype=torch.float32).masked_fill_(after, -math.inf)


@dataclass(frozen=True)
class _Cached:
    """A mask's cached plan. The plan is valid until the mask's memory, version or (without a version) values change."""

    plan: Plan
    view: tuple[object, ...]
    version: int | None
    values: torch.Tensor | None

    def is_of(self, mask: torch.Tensor, view: tuple[object, ...]) -> bool:
        if self.view != view or self.version != version_of(mask):
            return False
        return self.values is None or torch.equal(self.values, _one_of_each(mask))


_plans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def plan_of_mask(mask: torch.Tensor, batch: int, rows: int) -> Plan:
    """Return the plan of a mask. The plan is cached, and all layers with this mask share it.

    A block reads all keys from the first to the last key to which any of its queries attends.

    Args:
        mask: `[1 or batch, 1 or heads, queries, keys]`. A bool mask is True where the query attends to the key. Numbers are
            added to the scores. A number that is at most half of the dtype's lowest number hides its key.
        rows: number of queries in a block (see `block_rows`).
    """
    owner = base_of(mask)
    view = (mask.storage_offset(), *mask.shape, *mask.stride(), batch, rows)
    cached: _Cached | None = _plans.get(owner)  # type: ignore[no-untyped-call]
    if cached is None or not cached.is_of(mask, view):
        version = version_of(mask)
        with torch.inference_mode(False):  # a training step may read the plan's tiles next
            values = _one_of_each(mask).clone() if version is None else None
            cached = _Cached(_read(mask, batch, rows), view, version, values)
        _plans[owner] = cached
    return cached.plan


def _one_of_each(mask: torch.Tensor) -> torch.Tensor:
    """Return the mask of one batch row if the batch dimension is expanded, else the whole mask."""
    return mask[:1] if mask.stride(0) == 0 else mask


def _is_open(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _tile_of(mask: torch.Tensor) -> torch.Tensor:
    opened = _is_open(mask)
    bias = torch.zeros_like(mask, dtype=torch.float32) if mask.dtype == torch.bool else mask.float() * LOG2_E
    return bias.masked_fill_(~opened, -math.inf)


def _pieces(mask: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield pieces of a mask `[…, queries, keys]`, because comparing the whole mask would create a large tensor."""
    rows = max(1, _AT_ONCE // max(1, mask[..., :1, :].numel()))
    return (mask[..., first : first + rows, :] for first in range(0, mask.shape[-2], rows))


def _read(mask: torch.Tensor, batch: int, rows: int) -> Plan:
    _, _, queries, keys = mask.shape
    mask = _one_of_each(mask.detach())
    finitely = biased = False
    for piece in _pieces(mask) if mask.dtype != torch.bool else ():
        opened = _is_open(piece)
        finitely = finitely or bool((~opened.any(-1, keepdim=True) & (piece > -math.inf)).any())
        biased = biased or bool((opened & (piece != 0)).any())
    # Rows of the batch with equal masks have the same blocks.
    starts = [row for row in range(len(mask)) if not row or not torch.equal(mask[row], mask[row - 1])]
    spans = pairwise((*starts, batch))
    blocks = (block for span in spans for block in _blocks_of(mask[span[0]], span, rows, biased))
    return Plan(batch, queries, keys, tuple(blocks), finitely)


def _blocks_of(mask: torch.Tensor, batch: Span, rows: int, biased: bool) -> Iterator[Block]:
    """Yield the blocks of one row's mask `[1 or heads, queries, keys]`. `biased` is True if the mask has biases."""
    if not mask.numel():
        return
    firsts, ends, live = list[int](), list[int](), list[bool]()
    for piece in _pieces(mask):
        anywhere = _is_open(piece).any(0).to(torch.uint8)
        firsts += anywhere.argmax(-1).tolist()
        ends += (anywhere.shape[1] - anywhere.flip(-1).argmax(-1)).tolist()
        live += anywhere.any(-1).tolist()
    for first, last in _row_blocks(firsts, live, rows):
        low = min(firsts[row] for row in range(first, last) if live[row])
        high = max(ends[row] for row in range(first, last) if live[row])
        block_mask = mask[:, first:last, low:high]
        if biased:
            yield Block(batch, (first, last), (low, high), (low, high), _tile_of(block_mask))
            continue
        closed = (~_is_open(block_mask)).flatten(0, 1).any(0).nonzero().flatten()
        if not len(closed):
            yield Block(batch, (first, last), (low, high))
            continue
        begin, end = int(closed[0]), int(closed[-1]) + 1
        tile = _tile_of(block_mask[..., begin:end])
        yield Block(batch, (first, last), (low, high), (low + begin, low + end), tile)


def _row_blocks(firsts: Sequence[int], live: Sequence[bool], rows: int) -> Iterator[Span]:
    """Yield spans of at most `rows` queries that attend to some key."""
    first, least = 0, rows // 2
    for row in range(1, len(live) + 1):
        ended = row == len(live)
        begins = not ended and live[row] and abs(firsts[row] - firsts[row - 1]) > 1
        dead = not ended and live[row] != live[row - 1]
        if ended or row - first >= rows or dead or (begins and row - first >= least):
            if live[first]:
                yield first, row
            first = row


def attention_to_nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return zeros `[batch, query heads, queries, value head]` with zero gradients, for queries that attend to no key."""
    batch, heads, queries, _ = q.shape
    nothing = sum(x[..., :0].sum() for x in (q, k, v))  # sums of no elements: zero, with zero gradients
    return (q.new_zeros(batch, queries, heads, v.shape[3]) + nothing).transpose(1, 2)
