"""What autocast does to which operator, per kind of device, measured into `contracts/tables/autocast.json`.

    python -m tools.autocast_lists

Every build of torch registers the autocast kernels of every device, whether it can run on one or not, and fake
tensors may claim any device. So each registered operator is called on fake tensors under that device's autocast, and
the casts that come before its first kernel tell its category:

- float32 operands become the lower dtype: `lower` (matmul, linear, convolutions);
- lower operands become float32: `float32` (norms, losses, exp, pow);
- operands of two dtypes become the wider one: `promote` (addcmul, cat, index_put);
- no operand is cast, and the result of lower operands is float32: `float32_opt`, the operators that have a `dtype`
  argument, which autocast fills in (softmax, sum, cumsum);
- the call is refused as unsafe: `banned` (binary_cross_entropy).

The arguments are made up from the schema. Many of them suit no kernel; autocast has cast them by then.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from isotype.contracts.contract import TABLE, AutocastLists
from isotype.contracts.measure import write_json

AUTOCAST_KINDS: tuple[str, ...] = ("cpu", "cuda", "xpu", "mps")
_LOWER = torch.bfloat16  # every device's autocast takes it; float16 has the same lists
_UNSAFE = "unsafe to autocast"


def registered(kind: str) -> list[str]:
    """The overloads with an autocast kernel for `kind`, as torch names them (`aten::softmax.int`), sorted."""
    key = f"Autocast{kind.upper()}"
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return sorted(name for name in torch._C._dispatch_get_all_op_names() if has_kernel(name, key))


class _Reached(Exception):  # noqa: N818 - ends an observation, reports no error
    """The first kernel after autocast, with its arguments."""


class _Casts(TorchDispatchMode):
    """Notes the casts that come before the first kernel, (from, to) in order, and stops there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts: list[tuple[torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten._to_copy.default and func.namespace != "prim":
            raise _Reached(func, args, kwargs)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.casts.append((args[0].dtype, result.dtype))
        return result


@dataclass(frozen=True)
class _Observation:
    """The casts of one call, whether autocast refused it, and whether its kernel was told float32."""

    casts: list[tuple[torch.dtype, torch.dtype]]
    unsafe: bool = False
    told_float32: bool = False


def category(name: str, kind: str) -> str | None:
    """The list an overload (`aten::softmax.int`) is on for `kind`; None where the observation fits none."""
    function = _overload(name)
    widening, narrowing = (_LOWER, torch.float32), (torch.float32, _LOWER)
    wide = _observe(function, kind, [torch.float32])
    if wide.unsafe:
        return "banned"
    if narrowing in wide.casts:
        return "lower"
    narrow = _observe(function, kind, [_LOWER])
    if widening in narrow.casts or narrow.told_float32:
        # A dtype that the caller gives tells the two apart: it is only obeyed where autocast fills in the argument.
        has_dtype = any(argument.name == "dtype" for argument in function._schema.arguments)
        obeyed = has_dtype and widening not in _observe(function, kind, [_LOWER], dtype=_LOWER).casts
        return "float32_opt" if obeyed or narrow.told_float32 else "float32"
    return "promote" if widening in _observe(function, kind, [_LOWER, torch.float32]).casts else None


def _overload(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition("::")[2].partition(".")
    found: torch._ops.OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found


def _observe(
    function: torch._ops.OpOverload, kind: str, dtypes: Sequence[torch.dtype], **given: Any
) -> _Observation:
    """Call `function` under autocast with made-up operands of `dtypes` in turn, up to its first kernel."""
    was = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    mode = _Casts()
    with FakeTensorMode():
        args, kwargs = _arguments(function._schema, _operands(kind, dtypes))
        torch.set_autocast_enabled(kind, True)
        torch.set_autocast_dtype(kind, _LOWER)
        try:
            with mode:
                function(*args, **kwargs, **given)
        except _Reached as reached:
            func, seen, named = reached.args
            computes = bool(seen) and isinstance(seen[0], torch.Tensor)
            halves = func.name() in ("aten::_softmax", "aten::_log_softmax") and seen[2]
            told = halves or torch.float32 in [*seen[1:], *(named or {}).values()]
            return _Observation(mode.casts, told_float32=computes and told)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return _Observation(mode.casts, unsafe=_UNSAFE in str(error))
        finally:
            torch.set_autocast_enabled(kind, was[0])
            torch.set_autocast_dtype(kind, was[1])
            torch.clear_autocast_cache()
    return _Observation(mode.casts)


def _operands(kind: str, dtypes: Sequence[torch.dtype]) -> Iterator[torch.Tensor]:
    count = 0
    while True:
        yield torch.empty(4, 4, dtype=dtypes[count % len(dtypes)], device=kind)
        count += 1


def _arguments(
    schema: torch._C.FunctionSchema, operands: Iterator[torch.Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """A value of the right type for each argument that needs one."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in schema.arguments:
        if argument.has_default_value():
            continue
        value = _value(str(argument.type), getattr(argument, "N", None), operands)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _value(kind: str, length: int | None, operands: Iterator[torch.Tensor]) -> Any:
    if kind == "Tensor":
        return next(operands)
    if kind == "List[Tensor]":
        return [next(operands), next(operands)]
    if kind.startswith("List[Optional[Tensor"):
        return [torch.zeros(4, dtype=torch.int64)]
    if kind.startswith("Optional"):
        return None
    if kind.startswith("List"):
        item = 0.5 if "float" in kind else False if "bool" in kind else 1
        return [item] * (length or 1)
    return {"int": 1, "SymInt": 1, "float": 0.5, "number": 2, "bool": False, "str": "fro"}.get(kind)


def measure_lists() -> dict[str, Any]:
    """What `tables/autocast.json` holds: the lists of each kind of device, and what fits no list."""
    lists: dict[str, dict[str, list[str]]] = {}
    unknown: dict[str, list[str]] = {}
    for kind in AUTOCAST_KINDS:
        found: dict[str, set[str]] = {field.name: set() for field in fields(AutocastLists)}
        for name in registered(kind):
            on = category(name, kind)
            if on is None:
                unknown.setdefault(kind, []).append(name)
            else:
                found[on].add(name.partition("::")[2].partition(".")[0])
        lists[kind] = {on: sorted(names) for on, names in found.items()}
    return {
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "lists": lists,
        "unknown": unknown,
    }


def main() -> None:
    """Measure every device's autocast lists, write them, print their sizes."""
    measured = measure_lists()
    write_json(TABLE, measured)
    for kind, lists in measured["lists"].items():
        sizes = ", ".join(f"{on} {len(names)}" for on, names in lists.items())
        print(f"{kind:5} {sizes}; unknown {measured['unknown'].get(kind, [])}")


if __name__ == "__main__":
    main()
