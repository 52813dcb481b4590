"""Mixed storage in a plan: memory that nf4 leaves goes to the layers that 4 bits damage most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import isotype
from isotype.checkpoint.checkpoint import open_checkpoint
from isotype.checkpoint.resolve import save_measurement
from isotype.core.formats import FITTED, MEASURED
from isotype.planning.from_request import Plan, resolve_auto
from isotype.precision.damages import Damages, LayerDamage, base_bytes
from isotype.records.memory import Memory
from isotype.records.request import StepRequest
from isotype.records.trace import Trace
from isotype.train.command.parse import parse_command
from isotype.train.preflight.step import check_plan
from isotype.train.preflight.step_plan import parse_options, plan_of
from tests.checkpoint.test_damage import linear
from tests.models import tiny_model
from tests.planning.conftest import by_formula, step_of

ACTIVATIONS = 2**20
_NATS = {"nf4": 1.0, "fp4": 2.0, "nf4-fitted": 0.6, "nf4-32-fitted": 0.5, "int8": 0.01}


@pytest.fixture
def path(saved: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "cache"))
    path, model = saved("llama"), tiny_model("llama")
    layers = tuple(
        LayerDamage(
            name,
            *module.weight.shape,
            {form: _NATS.get(form, 0.0) / (1 + at) for form in MEASURED},
            moments="_" * module.weight.shape[1],
        )
        for at, (name, module) in enumerate(linear(model).items())
    )
    save_measurement(Damages("llama", open_checkpoint(path).fingerprint or "", "", "float32", "", 1, layers))
    parameters = sum(parameter.numel() for parameter in model.parameters())

    def trace_of(request: StepRequest) -> Trace:
        """Return the bytes of stored weights, a hundred bytes per layer in another format, and activations."""
        assert request.policy is not None
        damages = Damages("", "", "", "", "", 1, layers)
        stored = base_bytes(damages, request.policy, parameters) + 100 * len(request.policy.layers)
        sizes: Any = {"forward": {"weights": stored, "activations": ACTIVATIONS}}
        return replace(step_of(request), memory=Memory(sizes))

    by_formula(monkeypatch)
    monkeypatch.setattr("isotype.train.preflight.step.trace_of", trace_of)
    return str(path)


def planned(path: str, memory: int | str, **more: object) -> Plan:
    settings = {"rows": 1, "length": 64, "lora_r": 4, "dtype": "bfloat16", "gradient_checkpointing": "False"}
    return isotype.plan(path, "rtx4090", max_memory=memory, **settings, **more)


def test_what_is_left_goes_to_the_layers_that_4_bits_cost_most(path: str) -> None:
    rows = {row.storage: row for row in planned(path, 2**30).rows}
    assert set(rows) == {"bfloat16", "int8", "nf4"}  # in a gigabyte no layer is quantized
    room = (rows["nf4"].peak + rows["int8"].peak) // 2
    rows = {row.storage: row for row in planned(path, room).rows}
    mixed = rows["mixed"]
    assert mixed.fits
    assert rows["nf4"].peak < mixed.peak <= room
    assert mixed.damage is not None
    assert rows["nf4"].damage is not None
    assert 0 < mixed.damage < rows["nf4"].damage
    stored = [mixed.policy.storage_of(layer) for layer in linear(tiny_model("llama"))]
    assert stored[0] == "int8"
    assert stored[-1] in FITTED
    at = mixed.command.tokens().index("--quantization")
    assert mixed.command.tokens()[at + 1] == "mixed"
    assert mixed.command.tokens()[mixed.command.tokens().index("--base_memory") + 1] == str(mixed.base_memory)


def test_mixed_alone_takes_what_the_device_leaves(path: str) -> None:
    plan = planned(path, 2**30, quantization="mixed")
    assert [row.storage for row in plan.rows] == ["bfloat16"]
    assert "--base_memory" in str(plan.command)
    (row, *_) = planned(path, "1KiB", quantization="mixed").rows
    assert (row.storage, row.fits) == ("nf4", False)
    (row,) = planned(path, 2**30, quantization="mixed", base_memory="150KiB").rows
    assert (row.storage, row.base_memory) == ("mixed", 150 * 2**10)
    assert row.command["base_memory"] == "150KiB"
    assert "mixed" not in {row.storage for row in planned(path, 2**21, quantization="nf4").rows}


def test_auto_takes_the_mixture(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(path, 2**30, quantization="mixed", base_memory="150KiB")
    monkeypatch.setattr("isotype.planning.from_request.plan_of_request", lambda request: plan)
    argv = ["--model_name_or_path", path, "--dataset_name", "x", "--quantization", "auto"]
    command, _ = resolve_auto(parse_command("sft", argv)[0])
    assert (command["quantization"], command["base_memory"]) == ("mixed", "153600")


@pytest.mark.exhaustive
def test_a_check_of_the_command_foresees_the_same(
    saved: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "cache"))
    isotype.measure_quality(saved("llama"), tokens=256, progress=False)
    peaks = {row.storage: row.peak for row in planned(str(saved("llama")), 2**30).rows}
    room = (peaks["nf4"] + 9 * peaks["int8"]) // 10
    mixed = {row.storage: row for row in planned(str(saved("llama")), room).rows}["mixed"]
    step = plan_of(*parse_options([*mixed.command.tokens()[1:], "--device", "rtx4090"]))
    report = check_plan(step, ("forward", "backward", "unscale", "optimizer"))
    assert report.trace.memory.peak == mixed.peak
    assert report.trace.setup.policy.layers == mixed.policy.layers
