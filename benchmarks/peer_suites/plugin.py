"""A pytest plugin: other people's tests with `isotype.fuse` in every PEFT model, or without, and how each of them ended.

`PEERS_FUSE=1` fuses whatever PEFT or transformers has put adapters into, as soon as it has: built, loaded, given another adapter.
`PEERS_OUTCOMES` names the file that gets a JSON line for each test, `PEERS_EVERY=n` leaves every nth of them, from number `PEERS_FIRST` on,
and with `PEERS_ROUNDING=1` float32 results that a test compares may differ by `RTOL` and `ATOL`, where it allows less. Tests of other methods than LoRA are left out, since
fusing changes nothing of them; data sets that are read from the hub are a few rows made here.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

RTOL, ATOL = 1e-5, 1e-6
"""What sums in another order change in float32 (eps 1.2e-7) in a model of a few layers; torch.allclose allows 1e-5 and 1e-8, and
some tests ask for a result to the bit because PEFT's adapters add zeros. `ATOL` is of the largest value, from 1 on."""
_DEPTH = 0
_ROUNDINGS: list[float] = []
"""The differences that were let through in the running test."""
_QUOTES = (
    "Be yourself; everyone else is already taken.",
    "So many books, so little time.",
    "A room without books is like a body without a soul.",
    "You only live once, but if you do it right, once is enough.",
)


class _AllKnown(dict[str, int]):
    """PEFT's tests ask the hub for each model once, and not again for those in a dictionary: all of them are here already."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> int:
        return 1


def pytest_configure(config: pytest.Config) -> None:
    """Before a test module is imported and takes hold of what is wrapped here."""
    import datasets

    datasets.load_dataset = _rows
    if os.environ.get("PEERS_ROUNDING") == "1":
        _allow_roundings()
    if os.environ.get("PEERS_FUSE") == "1":
        _fuse_everything()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """LoRA only, and no model is looked for on the hub."""
    modules: list[tuple[str, Any]] = list(sys.modules.items())
    for name, module in modules:
        if name.rpartition(".")[2] == "testing_utils" and hasattr(module, "_HUB_MODEL_ACCESSES"):
            module._HUB_MODEL_ACCESSES = _AllKnown()
    other = [item for item in items if not _is_about_lora(item)]
    config.hook.pytest_deselected(items=other)
    kept = set(items) - set(other)
    first, every = int(os.environ.get("PEERS_FIRST", "0")), int(os.environ.get("PEERS_EVERY", "1"))
    items[:] = [item for item in items if item in kept][first::every]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """No difference is let through yet."""
    _ROUNDINGS.clear()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One line for each test: what its last phase was that did not pass."""
    if report.when == "call" or report.outcome != "passed":
        where = report.longrepr
        reason = str(getattr(getattr(where, "reprcrash", None), "message", where or "")).partition("\n")[0]
        if report.outcome == "passed" and _ROUNDINGS:
            reason = f"{max(_ROUNDINGS):.1e}"
        with Path(os.environ["PEERS_OUTCOMES"]).open("a") as file:
            file.write(json.dumps([report.nodeid, report.outcome, reason[:300]]) + "\n")


def _is_about_lora(item: pytest.Item) -> bool:
    """Whether a test has a LoRA configuration among its parameters, or none of any method."""
    from peft import AdaLoraConfig, LoraConfig, PeftConfig

    callspec = getattr(item, "callspec", None)
    kinds = [
        value if isinstance(value, type) else type(value)
        for value in (callspec.params.values() if callspec else ())
        if isinstance(value, PeftConfig) or (isinstance(value, type) and issubclass(value, PeftConfig))
    ]
    return not kinds or any(issubclass(kind, LoraConfig) and kind is not AdaLoraConfig for kind in kinds)


def _rows(name: str, *args: Any, **kwargs: Any) -> Any:
    from datasets import Dataset, DatasetDict

    if "quotes" not in name:
        raise FileNotFoundError(f"no data set {name!r}: nothing is fetched")
    rows = {"quote": [*_QUOTES] * 4, "author": ["someone"] * 16, "tags": [["books"]] * 16}
    return DatasetDict({"train": Dataset.from_dict(rows)})


def _allow_roundings() -> None:
    """Comparisons of float32 tensors let roundings through, where they would refuse."""
    strict, strict_assertion = torch.allclose, torch.testing.assert_close

    @functools.wraps(strict)
    def allclose(
        one: torch.Tensor,
        other: torch.Tensor,
        rtol: float = 1e-5,
        atol: float = 1e-8,
        equal_nan: bool = False,
    ) -> bool:
        if strict(one, other, rtol, atol, equal_nan):
            return True
        # A sum rounds by its largest terms, whatever is left of them in one entry.
        largest = max(1.0, float(other.abs().nan_to_num(0.0, 0.0, 0.0).max())) if other.numel() else 1.0
        if one.dtype != torch.float32 or not strict(
            one, other, max(rtol, RTOL), max(atol, ATOL * largest), equal_nan
        ):
            return False
        _ROUNDINGS.append(float((one - other).abs().max()))
        return True

    @functools.wraps(strict_assertion)
    def assert_close(actual: Any, expected: Any, **options: Any) -> None:
        try:
            strict_assertion(actual, expected, **options)
        except AssertionError:
            rtol, atol = options.get("rtol") or 0.0, options.get("atol") or 1e-5
            if not (
                isinstance(actual, torch.Tensor)
                and isinstance(expected, torch.Tensor)
                and actual.shape == expected.shape
                and allclose(actual, expected, rtol, atol, options.get("equal_nan", False))
            ):
                raise

    torch.allclose = torch.Tensor.allclose = allclose  # type: ignore[assignment]
    torch.testing.assert_close = assert_close


def _fuse_everything() -> None:
    import peft
    from peft.tuners.tuners_utils import BaseTuner
    from transformers.integrations.peft import PeftAdapterMixin

    constructors = [cls for base in (peft.PeftModel, peft.PeftMixedModel, BaseTuner) for cls in _family(base)]
    for cls in constructors:
        for method in ("__init__", "add_adapter", "load_adapter"):
            if method in vars(cls):
                setattr(cls, method, _then_fuse(vars(cls)[method]))
    for method in ("add_adapter", "load_adapter"):
        setattr(PeftAdapterMixin, method, _then_fuse(getattr(PeftAdapterMixin, method)))
    inject = _then_fuse(peft.inject_adapter_in_model, model_at=1)
    modules: list[tuple[str, Any]] = list(sys.modules.items())
    for name, module in modules:
        if name.partition(".")[0] == "peft" and hasattr(module, "inject_adapter_in_model"):
            module.inject_adapter_in_model = inject


def _family(cls: type) -> Iterator[type]:
    yield cls
    subclasses: list[type] = cls.__subclasses__()
    for each in subclasses:
        yield from _family(each)


def _then_fuse(method: Callable[..., Any], model_at: int = 0) -> Callable[..., Any]:
    """`method`, after which its model is fused: by the outermost call only, when all of PEFT is done."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        global _DEPTH
        _DEPTH += 1
        try:
            result = method(*args, **kwargs)
        finally:
            _DEPTH -= 1
        if not _DEPTH:
            _fuse(args[model_at] if len(args) > model_at else kwargs["model"])
        return result

    return wrapped


def _fuse(model: Any) -> None:
    import isotype
    from isotype.model.walk import is_tuner_layer

    if any(is_tuner_layer(module) and hasattr(module, "lora_A") for module in model.modules()):
        isotype.fuse(model)
