"""Remembered fake kernels return what the kernel itself would, and are looked up without torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from isotype.contracts.example import decode
from isotype.contracts.measure import read_examples
from isotype.preflight.check import check
from isotype.trace.fake import kernels
from isotype.trace.fake.kernels import Kernels
from isotype.trace.fake.twin import fake_mode
from tests.small import BF16, ids, net

aten = torch.ops.aten


def _made() -> tuple[torch.Tensor, ...]:
    return torch.empty(4, 6), torch.empty(6, 4, dtype=BF16).t(), torch.empty(3, 8)[:, 1:5]


OPERATORS: dict[str, Callable[..., Any]] = {
    "elementwise": lambda run, a, b, c: run(aten.add.Tensor, (a, b), {}),
    "a cast": lambda run, a, b, c: run(aten._to_copy.default, (a,), {"dtype": BF16}),
    "a view": lambda run, a, b, c: run(aten.t.default, (c,), {}),
    "a view that its schema hides": lambda run, a, b, c: run(aten._unsafe_view.default, (a, [24]), {}),
    "views of one": lambda run, a, b, c: run(aten.split_with_sizes.default, (a, [1, 3]), {}),
    "in place": lambda run, a, b, c: run(aten.mul_.Tensor, (a, b), {}),
    "two results": lambda run, a, b, c: run(aten.native_layer_norm.default, (a, [6], None, None, 1e-5), {}),
    "a list of operands": lambda run, a, b, c: run(aten.cat.default, ([a, a], 1), {}),
    "a reduction": lambda run, a, b, c: run(aten.sum.dim_IntList, (c, [0], True), {}),
}


def _facts(result: Any, operands: tuple[torch.Tensor, ...]) -> list[Any]:
    """Type, shape, strides, dtype, device, offset, memory and dispatch keys of each part; and what it aliases."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return [
        type(result),
        *(
            (
                type(part),
                part.shape,
                part.stride(),
                part.dtype,
                part.device,
                part.storage_offset(),
                part.untyped_storage().nbytes(),
                part.requires_grad,
                torch._C._dispatch_key_set(part),
                [part is operand for operand in operands],
                [part.untyped_storage()._cdata == operand.untyped_storage()._cdata for operand in operands],
                part.fake_mode is operands[0].fake_mode,
            )
            for part in parts
        ),
    ]


@pytest.mark.parametrize("name", OPERATORS)
def test_the_second_result_is_like_the_first_and_like_the_kernels(name: str) -> None:
    found = []
    for remembered in (False, True, True):
        mode = fake_mode()
        with mode:
            operands = _made()
            kernels = Kernels(mode)
            run = kernels.run if remembered else lambda func, args, kwargs: func(*args, **kwargs)
            found.append(_facts(OPERATORS[name](run, *operands), operands))
    assert found[0] == found[1] == found[2]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "contiguous": lambda x: x,
    "part of a larger tensor": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]] if x.dim() else x,
    "expanded": lambda x: x[..., :1].expand(x.shape) if x.dim() and x.shape[-1] else x,
}
_REST = [pytest.param(name, marks=pytest.mark.exhaustive) for name in list(LAYOUTS)[1:]]


def _calls_of_meta_kernels(layout: str) -> Iterator[tuple[Any, list[Any], dict[str, Any]]]:
    """A call of each operator whose result comes from its meta kernel, as a step of an architecture has called it."""
    examples = {name: calls[0] for name, calls in read_examples("cpu").items() if name.startswith("aten.")}
    assert {name.removeprefix("aten.") for name in examples} >= kernels._BY_META_KERNEL
    for name, example in examples.items():
        _, packet, overload = name.split(".")
        func = getattr(getattr(aten, packet), overload)
        if kernels.has_meta_kernel(func):
            real = decode(example, [BF16] * 9, torch.device("cpu"))
            yield (func, *tree_map_only(torch.Tensor, LAYOUTS[layout], real))


@pytest.mark.parametrize("layout", ["transposed", *_REST])
def test_meta_kernels_return_what_fake_tensor_mode_returns(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = fake_mode()
    run = Kernels(mode).run
    for func, *real in _calls_of_meta_kernels(layout):
        results = []
        for call in (lambda func, args, kwargs: func(*args, **kwargs), run):
            args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, real)
            operands = tuple(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            monkeypatch.setattr(kernels, "_KNOWN", {})
            with mode:
                results.append(_facts(call(func, args, kwargs), operands))
        assert (
            next(iter(kernels._KNOWN.values()))
            == Kernels(mode)._of_meta_kernel(func, args, kwargs, list(operands))
            != ()
        ), func
        assert results[0] == results[1], func


def test_what_a_value_decides_is_not_remembered() -> None:
    mode = fake_mode()
    with mode:
        kernels = Kernels(mode)
        first = kernels.run(aten.lift_fresh.default, (torch.tensor(1.0),), {})
        second = kernels.run(aten.lift_fresh.default, (torch.tensor(2.0),), {})
        assert (float(first), float(second)) == (1.0, 2.0)
        doubled = kernels.run(aten.mul.Tensor, (second, 2), {})
    assert float(doubled.constant) == 4.0


def test_a_shape_that_an_operator_changes_is_not_remembered() -> None:
    mode = fake_mode()
    with mode:
        kernels = Kernels(mode)
        for _ in range(2):
            tensor = torch.empty(2, 3)
            kernels.run(aten.t_.default, (tensor,), {})
            assert tensor.shape == (3, 2)


def test_a_step_traced_again_runs_next_to_no_fake_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatched: list[Any] = []
    dispatch = FakeTensorMode.dispatch

    def counting(self: FakeTensorMode, func: Any, *rest: Any) -> Any:
        dispatched.append(func)
        return dispatch(self, func, *rest)

    arguments: dict[str, Any] = {"device": "cpu", "optimizer": "sgd", "verify": False}
    first = check(net(), ids(), **arguments)
    monkeypatch.setattr(FakeTensorMode, "dispatch", counting)
    again = check(net(), ids(), **arguments)
    assert [call.op for call in again.trace.calls] == [call.op for call in first.trace.calls]
    ops = [call.op for call in again.trace.calls]
    assert {str(func) for func in dispatched}.isdisjoint(
        {"aten.mm.default", "aten.add.Tensor", "aten.t.default"}
    )
    assert ops.count("aten.mm.default") > 2
