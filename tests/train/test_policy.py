"""Value ranges and damages: measured on the device of the training, and by one process of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isotype.core.errors import PrecisionError
from isotype.core.formats import MIXED
from isotype.precision.decide import PrecisionRequest
from isotype.precision.devices.profile import DeviceProfile, device_profile
from isotype.precision.policy import ModuleException
from isotype.precision.ranges import ModuleRange
from isotype.train import launched, policy
from isotype.train.policy import moments_of_run, policy_by_ranges, policy_of_run
from tests.train.test_recompute import Processes

REQUEST = PrecisionRequest("float16", None)
MODEL: Any = SimpleNamespace(name="model", facts=None)  # what is measured is stood in for


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the devices of measurements; the policy is what `measure` returns, or None if it is not called."""
    devices: list[Any] = []

    def measure(checkpoint: Any, *, device: torch.device | None = None) -> SimpleNamespace:
        devices.append(device)
        return SimpleNamespace(source=checkpoint.name, number=len(devices), notes=())

    def resolve(
        facts: Any,
        request: PrecisionRequest,
        *_: Any,
        measure: Callable[[], Any] | None,
        measure_damages: Callable[[], Any] | None = None,
        **__: Any,
    ) -> tuple[Any, Any]:
        if request.quantization == MIXED and measure_damages is not None:
            return measure_damages(), None
        found = measure() if measure is not None else None
        return found, found

    monkeypatch.setattr(policy, "measure_ranges", measure)
    monkeypatch.setattr(policy, "measure_quality", measure)
    monkeypatch.setattr(policy, "resolve_request", resolve)
    monkeypatch.setattr(policy, "_require_float16_range", lambda *_: None)
    return devices


def on(monkeypatch: pytest.MonkeyPatch, profile: DeviceProfile) -> None:
    monkeypatch.setattr(policy, "device_profile", lambda _: profile)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(empty_cache=lambda: None))


@pytest.mark.parametrize(
    ("name", "present", "device"),
    [
        ("t4", True, torch.device("cuda", 0)),
        ("t4", False, None),  # a profile: there is no such card here
        ("mi300x", True, torch.device("cuda", 0)),
        ("cpu", True, None),
    ],
)
@pytest.mark.parametrize("asked", [REQUEST, PrecisionRequest("bfloat16", MIXED)], ids=["ranges", "damages"])
def test_it_is_measured_where_it_is_trained(
    measurements: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    asked: PrecisionRequest,
    name: str,
    present: bool,
    device: torch.device | None,
) -> None:
    profile = device_profile(name)
    on(
        monkeypatch,
        replace(profile, present=present, name="cuda:0") if present and name != "cpu" else profile,
    )
    policy_by_ranges(MODEL, asked, name)
    assert measurements == [device]


def test_where_the_gpu_has_no_room_the_cpu_measures_and_a_note_says_so(
    measurements: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, replace(device_profile("t4"), present=True, name="cuda:0"))
    measure = policy.measure_ranges

    def full(checkpoint: Any, *, device: torch.device | None = None) -> Any:
        if device is not None:
            measurements.append(device)
            raise torch.OutOfMemoryError("none left")
        return measure(checkpoint)

    monkeypatch.setattr(policy, "measure_ranges", full)
    monkeypatch.setattr(policy, "replace", lambda found, notes: SimpleNamespace(notes=notes))
    _, found = policy_by_ranges(MODEL, REQUEST, "t4")
    assert measurements == [torch.device("cuda", 0), None]
    assert found is not None
    assert found.notes == ("measured on the CPU, because the memory of NVIDIA T4 was too small",)


def test_moments_of_a_start_from_the_error_are_measured_where_it_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices: list[Any] = []
    layer = SimpleNamespace(module="layer", moments="_")

    def measure(checkpoint: Any, *, device: torch.device | None = None) -> SimpleNamespace:
        devices.append(device)
        return SimpleNamespace(layers=(layer,))

    on(monkeypatch, replace(device_profile("t4"), present=True, name="cuda:0"))
    monkeypatch.setattr(MODEL, "downloaded", lambda: SimpleNamespace(fingerprint=None), raising=False)
    monkeypatch.setattr(policy, "measure_quality", measure)
    assert list(moments_of_run(MODEL, "cuda")) == ["layer"]
    assert devices == [torch.device("cuda", 0)]


def test_one_process_of_a_run_measures_and_all_decide_by_it(
    measurements: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Processes()
    monkeypatch.setattr(launched, "distributed", two)
    monkeypatch.setattr(policy, "processes", lambda: 2)
    results = two.both(lambda _: policy_of_run(MODEL, REQUEST, "cpu"))
    assert measurements == [None]
    assert [found.number for _, found in results] == [1, 1]


def test_a_run_of_one_process_asks_nobody(measurements: list[Any]) -> None:
    decided, ranges = policy_of_run(MODEL, REQUEST, "cpu", when="known")
    assert decided is ranges is None
    assert measurements == []


@pytest.mark.parametrize(
    ("kind", "weight", "exceptions", "refused"),
    [
        ("norm", 65536.0, (), True),
        ("other", 70000.0, (), True),
        ("norm", 65504.0, (), False),
        ("linear", 1e6, (ModuleException("layers.0", "float32"),), False),
        ("linear", 1e6, (ModuleException("layers.0", "adapters"),), True),
    ],
)
def test_parameters_beyond_float16_are_refused_where_nothing_runs_them_in_float32(
    monkeypatch: pytest.MonkeyPatch, kind: str, weight: float, exceptions: Any, refused: bool
) -> None:
    made = SimpleNamespace(compute=torch.float16, exceptions=exceptions)
    ranges = SimpleNamespace(modules=(ModuleRange("layers.0", kind, 1.0, 1.0, weight=weight),))
    monkeypatch.setattr(policy, "resolve_request", lambda *_, **__: (made, ranges))
    if not refused:
        assert policy_by_ranges(MODEL, REQUEST, "cpu") == (made, ranges)
        return
    with pytest.raises(PrecisionError) as error:
        policy_by_ranges(MODEL, REQUEST, "cpu")
    (problem,) = error.value.problems
    expected = (
        f"layers.0: values up to {weight:,.0f}",
        "at most 65,504",
        "--dtype bfloat16 or --dtype float32",
    )
    assert (problem.given, problem.expected, problem.fix) == expected
