"""Attention in strips against a reference in float64 that knows nothing of it, and against torch's own kernel.

Tolerances are relative errors in the Frobenius norm. Rounding a result once to a dtype of p bits gives about 2^-p * 0.8 (uniform in
the last place); operands that were computed are rounded once more, and partial sums of dk and dv per block of queries.
So: 2 * 2^-8 for bfloat16; float16 and float32 are computed in float32, where only the result is rounded, and sums of some
hundred terms lose another bit or two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from isotype.core.compiled import NotCompiledError
from isotype.core.dtypes import dtype_name
from isotype.lora.attention import strips
from isotype.lora.attention.plan import Plan, block_rows, plan_of, plan_of_mask
from isotype.lora.loops.loading import Loops
from tests.cpus import no_compiler
from tests.lora.watched import Watched
from tests.pairwise import pairwise

pytestmark = pytest.mark.lacking(no_compiler())

TOLERANCE = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
OUTPUT_TOLERANCE = {**TOLERANCE, torch.bfloat16: 3e-3}
Tensors = tuple[torch.Tensor, ...]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, **how: Any) -> torch.Tensor:
    return strips.attention(q, k, v, plan, **{"work": q.dtype, **how})


def tensors(
    shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, size: float = 1.0, seed: int = 0
) -> Tensors:
    """q, k, v and the gradient of the output, as models give them: transposed views. Shape: batch, Hq, Hkv, T, S, D."""
    batch, heads, key_heads, queries, keys, head = shape
    generator = torch.Generator().manual_seed(seed)

    def made(tokens: int, count: int, by: float) -> torch.Tensor:
        drawn = torch.randn(batch, tokens, count, head, generator=generator, dtype=torch.float64) * by
        return drawn.to(dtype).transpose(1, 2)

    return (
        made(queries, heads, size),
        made(keys, key_heads, size),
        made(keys, key_heads, 1),
        made(queries, heads, 1),
    )


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    d_out: torch.Tensor,
    added: torch.Tensor,
    scale: float | None = None,
) -> Tensors:
    """out, dq, dk, dv in float64; `added` to the scores, -inf where a query does not attend."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = scores + added.double()
    dead = (added == -math.inf).all(-1, keepdim=True)
    p = torch.where(dead, 0.0, scores.masked_fill(dead, 0.0).softmax(-1))
    out = p @ v.repeat_interleave(group, 1)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), d_out.double())


def ours(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, plan: Plan, **how: Any
) -> Tensors:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, plan, **how)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    difference = (found.double() - exact).norm() / exact.norm().clamp_min(1e-30)
    return float(difference)


def assert_close(found: Tensors, exact: Tensors, dtype: torch.dtype) -> None:
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, exact, strict=True):
        assert (one.dtype, one.shape) == (dtype, other.shape)
        limit = (OUTPUT_TOLERANCE if name == "out" else TOLERANCE)[dtype]
        assert error(one, other) <= limit, (name, error(one, other))


def bias(queries: int, keys: int, *, causal: bool = True, window: int | None = None) -> torch.Tensor:
    """`[queries, keys]`: 0 where a query attends, -inf elsewhere; by definition, one pair at a time."""
    added = torch.zeros(queries, keys, dtype=torch.float64)
    for row in range(queries):
        place = row + keys - queries
        for key in range(keys):
            if (causal and key > place) or (window is not None and key <= place - window):
                added[row, key] = -math.inf
    return added


def work_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype


@pairwise(
    "dtype, length, heads, causal",
    list(TOLERANCE),
    [1, 2, 63, 65, 130],
    [(1, 1), (9, 3), (8, 1)],
    [True, False],
)
def test_lengths_and_heads(dtype: torch.dtype, length: int, heads: tuple[int, int], causal: bool) -> None:
    given = tensors((2, *heads, length, length, 16), dtype)
    plan = plan_of((2, length, length), block_rows(heads[0] // heads[1]), causal=causal)
    exact = reference(*given, bias(length, length, causal=causal))
    if length == 1:  # one probability, whose gradient is zero
        exact = (exact[0], exact[1] * 0, exact[2] * 0, exact[3])
        found = ours(*given, plan, work=work_of(dtype))
        assert all(grad.abs().max() < 1e-5 for grad in found[1:3])
        assert_close((found[0], exact[1].to(dtype), exact[2].to(dtype), found[3]), exact, dtype)
        return
    assert_close(ours(*given, plan, work=work_of(dtype)), exact, dtype)


@pairwise(
    "dtype, head",
    [torch.float32, torch.bfloat16, torch.float16],
    [64, 80, 96, 128, 256],
)
def test_head_dimensions(dtype: torch.dtype, head: int) -> None:
    given = tensors((1, 4, 2, 96, 96, head), dtype)
    plan = plan_of((1, 96, 96), 40, causal=True)
    assert_close(ours(*given, plan, work=work_of(dtype)), reference(*given, bias(96, 96)), dtype)


@pytest.mark.parametrize(("queries", "keys"), [(5, 70), (70, 5), (1, 33), (64, 128)])
@pytest.mark.parametrize("causal", [True, False])
def test_more_or_fewer_queries_than_keys(queries: int, keys: int, causal: bool) -> None:
    given = tensors((2, 4, 2, queries, keys, 16), torch.float32)
    plan = plan_of((2, queries, keys), 32, causal=causal)
    assert plan.whole == (not causal or keys >= queries)
    found, exact = ours(*given, plan), reference(*given, bias(queries, keys, causal=causal))
    assert_close(found, exact, torch.float32)


def test_values_of_another_size_than_keys() -> None:
    q, k, _, _ = tensors((2, 4, 2, 50, 50, 24), torch.float32)
    _, _, v, d_out = tensors((2, 4, 2, 50, 50, 16), torch.float32)
    found = ours(q, k, v, d_out, plan_of((2, 50, 50), 32, causal=True))
    assert_close(found, reference(q, k, v, d_out, bias(50, 50)), torch.float32)


@pytest.mark.parametrize("window", [1, 7, 40, 64, 200])
def test_window(window: int) -> None:
    given = tensors((2, 4, 2, 130, 130, 16), torch.float32)
    added = bias(130, 130, window=window)
    plan = plan_of_mask((added == 0)[None, None], 2, 32)
    exact, found = reference(*given, added), ours(*given, plan)
    if window == 1:  # one probability, whose gradient is zero
        assert all(grad.abs().max() < 1e-5 for grad in found[1:3])
        exact, found = (exact[0], exact[3], exact[3], exact[3]), (found[0], found[3], found[3], found[3])
    assert_close(found, exact, torch.float32)
    assert all(last - first < window + 32 for first, last in (block.keys for block in plan.blocks))


def packed_bias(position_ids: torch.Tensor) -> torch.Tensor:
    rows = []
    for positions in position_ids.tolist():
        sequence, added = 0, torch.full((len(positions), len(positions)), -math.inf, dtype=torch.float64)
        first = 0
        for row, position in enumerate(positions):
            if row and position != positions[row - 1] + 1:
                sequence, first = sequence + 1, row
            added[row, first : row + 1] = 0
        rows.append(added)
    return torch.stack(rows)[:, None]


POSITIONS = torch.stack(
    [torch.cat([torch.arange(n) for n in lengths]) for lengths in ([130], [1, 64, 65], [40, 2, 30, 58])]
)


def test_packed_sequences() -> None:
    given = tensors((3, 4, 2, 130, 130, 16), torch.float32)
    added = packed_bias(POSITIONS)
    assert_close(ours(*given, plan_of_mask(added == 0, 3, 32)), reference(*given, added), torch.float32)


def cost(plan: Plan) -> int:
    return sum(
        (block.batch[1] - block.batch[0]) * (block.rows[1] - block.rows[0]) * (block.keys[1] - block.keys[0])
        for block in plan.blocks
    )


def test_packed_sequences_are_not_computed_across() -> None:
    lengths = [512, 100, 300, 112]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    mask = packed_bias(positions) == 0
    alone = sum(cost(plan_of((1, n, n), 64, causal=True)) for n in lengths)
    assert cost(plan_of_mask(mask, 1, 64)) <= 1.05 * alone


def padding(lengths: Sequence[int], total: int, side: str) -> torch.Tensor:
    """`[rows, 1, total, total]` bool: causal, keys and queries of the padding out."""
    present = torch.stack([torch.arange(total) < n for n in lengths])
    present = present if side == "right" else present.flip(-1)
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    return (causal & present[:, None, :] & present[:, :, None])[:, None]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.bfloat16])
def test_padding_and_queries_that_attend_to_nothing(side: str, kind: torch.dtype) -> None:
    mask = padding([130, 77, 3, 0], 130, side)
    given = tensors((4, 4, 2, 130, 130, 16), torch.float32)
    exact = reference(*given, torch.zeros(mask.shape).masked_fill(~mask, -math.inf))
    if kind != torch.bool:
        mask = torch.zeros(mask.shape, dtype=kind).masked_fill(~mask, torch.finfo(kind).min)
    plan = plan_of_mask(mask, 4, 32)
    found = ours(*given, plan)
    assert_close(found, exact, torch.float32)
    assert not plan.whole
    assert plan.closed_finitely == (kind != torch.bool)
    assert found[0][3].abs().max() == found[1][3].abs().max() == found[3][3].abs().max() == 0
    causal = cost(plan_of((1, 77, 77), 32, causal=True)) + cost(plan_of((1, 3, 3), 32, causal=True))
    assert cost(plan) <= 1.1 * (cost(plan_of((1, 130, 130), 32, causal=True)) + causal)


def test_single_queries_that_attend_to_nothing_within_a_block() -> None:
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    mask[:, :, 7] = False
    mask[:, :, 20:22] = False
    given = tensors((2, 2, 2, 40, 40, 16), torch.bfloat16)
    found = ours(*given, plan_of_mask(mask.expand(2, -1, -1, -1), 2, 32))
    assert all(bool(x.isfinite().all()) for x in found)
    assert found[0][:, :, 7].abs().max() == found[1][:, :, 20:22].abs().max() == 0
    added = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    assert_close(found, reference(*given, added), torch.bfloat16)


def test_biases_of_each_head_are_added() -> None:
    given = tensors((2, 6, 2, 70, 70, 16), torch.float32)
    generator = torch.Generator().manual_seed(3)
    added = torch.randn(1, 6, 70, 70, generator=generator)
    added = added.masked_fill(torch.ones(70, 70, dtype=torch.bool).triu(1), torch.finfo(torch.float32).min)
    exact = reference(*given, added.masked_fill(added < -1e30, -math.inf))
    assert_close(ours(*given, plan_of_mask(added, 2, 32)), exact, torch.float32)


def test_a_mask_that_was_written_to_is_read_again() -> None:
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    first = plan_of_mask(mask, 1, 32)
    assert plan_of_mask(mask, 1, 32) is first
    mask[..., 0] = False
    assert plan_of_mask(mask, 1, 32).blocks[0].keys == (1, 8)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    ("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 0), (2, 0, 3), (2, 5, 0), (0, 0, 0)]
)
def test_no_rows_no_queries_no_keys(batch: int, queries: int, keys: int, masked: bool) -> None:
    given = tensors((batch, 4, 2, queries, keys, 16), torch.float32)
    if masked:
        plan = plan_of_mask(torch.ones(batch, 1, queries, keys, dtype=torch.bool), batch, 32)
    else:
        plan = plan_of((batch, queries, keys), 32, causal=False)
    found = ours(*given, plan)
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    out = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for one, other in zip(found, (out, *torch.autograd.grad(out, (q, k, v), given[3])), strict=True):
        assert torch.equal(one, other)
    assert plan.area == 0


def test_a_mask_that_closes_everything() -> None:
    given = tensors((2, 4, 2, 5, 5, 16), torch.float32)
    for mask in (torch.zeros(2, 1, 5, 5, dtype=torch.bool), torch.full((1, 1, 5, 5), -math.inf)):
        plan = plan_of_mask(mask, 2, 32)
        assert not plan.closed_finitely
        assert all(not x.any() for x in ours(*given, plan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale(dtype: torch.dtype) -> None:
    given = tensors((2, 4, 2, 70, 70, 16), dtype, 2.0)
    plan = plan_of((2, 70, 70), 32, causal=True)
    assert_close(ours(*given, plan, scale=0.5), reference(*given, bias(70, 70), 0.5), dtype)


@pairwise(
    "dtype, size",
    [torch.bfloat16, torch.float16],
    [2.5, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (0.5, 1.0, 5.0))],
    strength=1,
)  # of q and k: the largest scores are about 30, 1, 4 and 100
def test_at_least_as_close_as_torch(dtype: torch.dtype, size: float) -> None:
    operands = tensors((1, 3, 1, 513, 513, 64), dtype, size)
    exact = reference(*operands, torch.full((513, 513), -math.inf).triu(1))
    result = ours(*operands, plan_of((1, 513, 513), 64, causal=True), work=work_of(dtype))
    q, k, v = (x.detach().requires_grad_() for x in operands[:3])
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    theirs = (out.detach(), *torch.autograd.grad(out, (q, k, v), operands[3]))
    for one, other, right in zip(result, theirs, exact, strict=True):
        # Both end in the same rounding of the result; in float32 there is nothing but the order of sums.
        assert error(one, right) <= (1.5 if dtype == torch.float32 else 1.1) * error(other, right)


@pytest.mark.parametrize(
    "needed", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_only_the_gradients_that_are_needed(needed: tuple[bool, bool, bool]) -> None:
    given = tensors((2, 4, 2, 70, 70, 16), torch.bfloat16)
    plan = plan_of((2, 70, 70), 32, causal=True)
    all_of_them = ours(*given, plan)[1:]
    inputs = [x.detach().requires_grad_(need) for x, need in zip(given[:3], needed, strict=True)]
    attention(*inputs, plan).backward(given[3])  # type: ignore[no-untyped-call]
    for x, need, grad in zip(inputs, needed, all_of_them, strict=True):
        assert (x.grad is not None) == need
        assert x.grad is None or torch.equal(x.grad, grad)


def test_nothing_is_kept_without_a_gradient() -> None:
    q, k, v, _ = tensors((2, 4, 2, 70, 70, 16), torch.bfloat16)
    plan = plan_of((2, 70, 70), 32, causal=True)
    assert attention(q, k, v, plan).grad_fn is None
    with torch.no_grad():
        assert attention(q.requires_grad_(), k, v, plan).grad_fn is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_name)
def test_the_backward_is_left_nothing_as_large_as_an_input_but_the_inputs(dtype: torch.dtype) -> None:
    """A step takes the memory that is foreseen of torch's kernel."""
    inputs = [x.requires_grad_() for x in tensors((2, 4, 2, 70, 70, 16), dtype)[:3]]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        attention(*inputs, plan_of((2, 70, 70), 32, causal=True))
    large = [x for x in kept if x.untyped_storage().nbytes() >= inputs[1].untyped_storage().nbytes()]
    assert {x.data_ptr() for x in large} == {x.data_ptr() for x in inputs}


def test_backward_twice_and_inputs_used_twice() -> None:
    q, _, _, d_out = tensors((2, 4, 4, 70, 70, 16), torch.float32)
    plan = plan_of((2, 70, 70), 32, causal=True)
    x = q.detach().requires_grad_()
    out = attention(x, x, x, plan)
    (first,) = torch.autograd.grad(out, x, d_out, retain_graph=True)
    (second,) = torch.autograd.grad(out, x, d_out)
    assert torch.equal(first, second)
    exact = reference(q, q, q, d_out, bias(70, 70))
    assert error(first, exact[1] + exact[2] + exact[3]) < TOLERANCE[torch.float32]


def test_checkpointing_gives_the_same_bits() -> None:
    given = tensors((2, 4, 2, 70, 70, 16), torch.bfloat16)
    plan = plan_of((2, 70, 70), 32, causal=True)
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    out = torch.utils.checkpoint.checkpoint(attention, q, k, v, plan, use_reentrant=False)
    grads = torch.autograd.grad(out, (q, k, v), given[3])
    for one, other in zip((out, *grads), ours(*given, plan), strict=True):
        assert torch.equal(one, other)


def test_autocast_changes_nothing_inside() -> None:
    given = tensors((2, 4, 2, 70, 70, 16), torch.float32)
    plan = plan_of((2, 70, 70), 32, causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = ours(*given, plan)
    for one, other in zip(under, ours(*given, plan), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k[:, :, :-1], v), "do not match"),
        (lambda q, k, v: (q[:, :3], k, v), "do not match"),
        (lambda q, k, v: (q, k, v.float()), "one dtype of at most 32 bits"),
        (lambda q, k, v: (q[:, :, 1:], k, v), "the plan is for 2 x 8 queries and 8 keys"),
    ],
)
def test_inputs_that_do_not_go_together(change: Callable[..., Tensors], message: str) -> None:
    q, k, v, _ = tensors((2, 4, 2, 8, 8, 16), torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        attention(*change(q, k, v), plan_of((2, 8, 8), 32, causal=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_more_threads_than_matrices_share_them(dtype: torch.dtype, threads: int) -> None:
    given = tensors((1, 6, 2, 130, 130, 24), dtype)
    plan = plan_of((1, 130, 130), 32, causal=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found, again = ours(*given, plan), ours(*given, plan)
    finally:
        torch.set_num_threads(before)
    assert_close(found, reference(*given, bias(130, 130)), dtype)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_layouts_are_read_as_they_lie() -> None:
    q, k, v, d_out = tensors((2, 4, 2, 40, 40, 16), torch.bfloat16)
    plan = plan_of((2, 40, 40), 32, causal=True)
    exact = ours(q, k, v, d_out, plan)
    wide = torch.randn(2, 4, 40, 40).bfloat16()
    wide[..., 8:24] = (
        q  # a slice of something wider, beside one whose values do not lie together, beside a repeated one
    )
    apart = k.mT.contiguous().mT
    for one, other in zip(ours(wide[..., 8:24], apart, v, d_out, plan), exact, strict=True):
        assert torch.equal(one, other)
    flat = torch.ones(()).bfloat16().expand_as(d_out)
    for one, other in zip(ours(q, k, v, flat, plan), ours(q, k, v, flat.contiguous(), plan), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(0, 4, 2, 8, 8, 16), (2, 4, 2, 0, 0, 16), (2, 4, 2, 3, 0, 16)])
def test_nothing_to_attend_to(shape: tuple[int, ...]) -> None:
    given = tensors(shape, torch.float32)
    found = ours(*given, plan_of((shape[0], shape[3], shape[4]), 32, causal=shape[3] == shape[4]))
    assert [x.shape for x in found] == [given[0].shape, *(x.shape for x in given[:3])]
    assert not found[0].any()


def test_what_the_loops_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = tensors((2, 4, 2, 8, 8, 16), torch.float64)
    plan = plan_of((2, 8, 8), 32, causal=True)
    with pytest.raises(ValueError, match=r"they need one dtype of at most 32 bits"):
        attention(q, k, v, plan)
    none = Loops("there is no C++ compiler")
    monkeypatch.setattr(strips, "compiled_strips", lambda: none)
    with pytest.raises(NotCompiledError, match="there is no C"):
        attention(q.float(), k.float(), v.float(), plan)


def test_whatever_watches_operators_sees_the_loops() -> None:
    given = tensors((2, 4, 2, 8, 8, 16), torch.float32)
    with Watched() as seen:
        ours(*given, plan_of((2, 8, 8), 32, causal=True))
    assert seen.own == [
        "isotype::attention_forward",
        "isotype::attention_backward",
    ]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(default: torch.dtype) -> None:
    given = tensors((2, 4, 2, 70, 70, 16), torch.float32)
    mask = padding([70, 33], 70, "left")
    plans: list[Callable[[], Plan]] = [
        lambda: plan_of((2, 70, 70), 32, causal=True),
        lambda: plan_of_mask(mask.clone(), 2, 32),
    ]
    expected = [ours(*given, plan()) for plan in plans]
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = [ours(*given, plan()) for plan in plans]
    finally:
        torch.set_default_dtype(before)
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_was_not_finite_in_one_call_is_gone_in_the_next() -> None:
    given = tensors((1, 1, 1, 70, 70, 16), torch.float32)
    plan = plan_of((1, 70, 70), 128, causal=True)
    expected = ours(*given, plan)
    ours(*given[:3], torch.full_like(given[3], math.nan), plan)
    ours(given[0] * math.inf, *given[1:], plan)
    for one, other in zip(ours(*given, plan), expected, strict=True):
        assert torch.equal(one, other)
