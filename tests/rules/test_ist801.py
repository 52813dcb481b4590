from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isotype.cli.main import main
from isotype.core.optimizers import learning_rate_of
from isotype.precision.devices.room import Room
from isotype.precision.ranges import ModuleRange, Ranges
from isotype.preflight.check import check
from isotype.records.request import Setup
from isotype.rules.ist801_lost_updates import find
from isotype.rules.kit.weight_sets import spacing
from tests.reality import real_step
from tests.rules.samples import BF16, FP16, FP32, LAYER, adapter, norm, trace, weight
from tests.rules.traces import batch, cast, llama
from tests.train.tiny import save_chat_model


def test_adapters_that_stand_still() -> None:
    (finding,) = find(trace([adapter(BF16, median_magnitude=0.06)], learning_rate=1e-5))
    assert finding.severity == "warning"
    assert finding.message == "updates of 1e-05 are lost in 1 of 1 trainable parameters"
    assert finding.notes == (
        "model.layers.0.self_attn.q_proj.lora_A.default.weight: values near 0.06, where two bfloat16 numbers differ by at least 2.4e-04",
    )


def test_the_learning_rate_of_each_parameter_decides() -> None:
    weights = [weight(name, BF16, trainable=True, median_magnitude=0.06) for name in "abc"]
    step = trace(weights, learning_rate=1.0, optimizer="AdamW and AdamW")
    rates = {"a": ("AdamW", 1e-5), "b": ("AdamW", 0.0), "c": ("AdamW", 1.0)}
    (finding,) = find(replace(step, setup=replace(step.setup, updates=rates)))
    assert finding.message == "updates of 1e-05 are lost in 1 of 3 trainable parameters"
    assert not list(find(step))


def test_parameters_that_a_real_step_has_not_changed() -> None:
    """pytorch/pytorch #191763: on a CPU, torch 2.13's fused SGD leaves 16-bit parameters as they are."""
    step = replace(
        trace([weight("w", BF16, trainable=True)], optimizer="fused SGD", device="cpu"), unmoved=("w",)
    )
    (finding,) = find(step)
    assert finding.message == (
        "the step of fused SGD changes no value of 1 of 1 trainable parameters, although their gradients are not zero"
    )
    assert finding.fixes[0].text == "create the optimizer with fused=False"


def test_norms_alone_get_a_border() -> None:
    weights = [
        norm(BF16, trainable=True, median_magnitude=1.0),
        weight(trainable=True, median_magnitude=1e-3),
    ]
    (finding,) = find(trace(weights, learning_rate=1e-4))
    assert [action.kind for action in finding.fixes[0].actions] == ["parameter", "boundary"]


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        (adapter(FP32, median_magnitude=1.0), 1e-6),
        (adapter(BF16, median_magnitude=0.06), 1e-3),
        (adapter(BF16), 1e-6),
    ],
)
def test_masters_and_larger_rates_are_silent(given: object, rate: float) -> None:
    assert not list(find(trace([given], learning_rate=rate)))  # type: ignore[list-item]


def test_unknown_rates_and_other_optimizers_are_silent() -> None:
    lost = adapter(BF16, median_magnitude=1.0)
    assert not list(find(trace([lost])))
    assert not list(find(trace([lost], learning_rate=1e-6, optimizer="sgd")))


def test_a_learning_rate_of_zero_says_nothing() -> None:
    """A schedule's warm-up begins with it: no update is lost that nobody asked for."""
    assert not list(find(trace([adapter(BF16, median_magnitude=1.0)], learning_rate=0.0)))


def test_in_warm_up_the_rate_it_leads_to_counts() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=3e-4)
    assert learning_rate_of(optimizer) == 3e-4
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    assert learning_rate_of(optimizer) == 3e-4


DORA = f"{LAYER}.lora_magnitude_vector.default.weight"


def test_a_dora_magnitude_that_no_update_moves() -> None:
    """Unloaded, it is the norm of a row of the layer's weight: far above what an update of 1e-4 moves."""
    given = [adapter(BF16, DORA, shape=(64,)), adapter(BF16, shape=(8, 4096))]
    (finding,) = find(trace(given, learning_rate=1e-4))
    assert finding.message == "updates of 0.0001 are lost in 1 of 2 trainable parameters"
    assert finding.notes == (
        f"{DORA}: not loaded; after initialization, its values are near 0.58, where two bfloat16 numbers differ by at least 3.9e-03",
    )
    assert not list(find(trace([adapter(FP32, DORA, shape=(64,)), given[1]], learning_rate=1e-4)))


@pytest.mark.real_cpu
@pytest.mark.parametrize("meta", [False, True])
def test_dora_in_bfloat16_does_not_move(meta: bool) -> None:
    """The judge is a real update: no value of any magnitude changes."""
    model = cast(llama(BF16, use_dora=True), BF16, ["magnitude"])
    names = [name for name, parameter in model.named_parameters() if "magnitude" in name]
    before = [model.get_parameter(name).detach().clone() for name in names]
    if not meta:
        assert real_step(model, batch(), learning_rate=1e-4).error is None
        moved = [
            (model.get_parameter(name) != old).float().mean() for name, old in zip(names, before, strict=True)
        ]
        assert max(moved) < 0.05
    on_meta = model.to("meta") if meta else model
    report = check(on_meta, batch(), device="cpu", learning_rate=1e-4, wiring=False, verify=False)
    (finding,) = [finding for finding in report.findings if finding.code == "IST801"]
    assert finding.message == "updates of 0.0001 are lost in 7 of 21 trainable parameters"


@given(st.floats(2**-14, 2**15), st.sampled_from([BF16, FP16]))
def test_spacing_is_the_distance_to_the_next_number(value: float, dtype: torch.dtype) -> None:
    held = torch.tensor(value, dtype=dtype)
    following = torch.nextafter(held, torch.tensor(float("inf"), dtype=dtype))
    assert spacing(float(held), dtype) == float(following) - float(held)


def ranges(name: str, **magnitudes: float) -> Ranges:
    module = ModuleRange(name, "linear", 0.0, 0.0, **magnitudes)
    return Ranges(
        "a model",
        "",
        "2026-01-01T00:00:00+00:00",
        "float32",
        "the batch given",
        64,
        1,
        1.0,
        (module,),
        (),
        (),
    )


def test_weights_that_are_not_loaded_are_as_large_as_was_measured() -> None:
    known = ranges("model.layers.0.input_layernorm", median_weight=0.9)
    (finding,) = find(trace([norm(BF16, trainable=True)], learning_rate=1e-4, ranges=known))
    assert finding.notes == (
        "model.layers.0.input_layernorm.weight: measured values near 0.9, where two bfloat16 numbers differ by at least 3.9e-03",
    )
    assert not list(find(trace([norm(BF16, trainable=True)], learning_rate=1e-2, ranges=known)))


@pytest.mark.parametrize(("median", "lost"), [(0.1, True), (1e-4, False)])
def test_magnitudes_of_dora_follow_from_the_measured_weights_of_their_layer(
    median: float, lost: bool
) -> None:
    """The norm of 64 values near 0.1 is near 1.2, where two bfloat16 numbers differ by at least 2^-7."""
    name = f"{LAYER}.lora_magnitude_vector.default.weight"
    magnitude = adapter(BF16, name=name, shape=(64,))
    weights = [magnitude, adapter(FP32, shape=(4, 64))]
    found = list(find(trace(weights, learning_rate=1e-5, ranges=ranges(LAYER, median_weight=median))))
    assert [finding.module for finding in found] == ([magnitude.module] if lost else [])


@pytest.mark.parametrize(("gradient", "lost"), [(1e-3, True), (10.0, False), (0.0, False)])
def test_an_update_of_sgd_is_as_large_as_the_measured_gradient(gradient: float, lost: bool) -> None:
    """Compared with a real update of a weight of 1."""
    known = ranges(LAYER, median_weight=1.0, weight_gradient=gradient)
    trained = weight(trainable=True, median_magnitude=1.0)
    assert bool(list(find(trace([trained], learning_rate=0.1, optimizer="sgd", ranges=known)))) == lost
    one = torch.nn.Parameter(torch.ones(1, dtype=BF16))
    one.grad = torch.full_like(one, gradient)
    torch.optim.SGD([one], lr=0.1).step()
    assert (one.item() == 1.0) == (lost or not gradient)


@pytest.mark.parametrize("inputs", [64, 320, 2048])
def test_half_of_the_values_of_a_matrix_that_is_not_loaded_are_above_the_estimate(inputs: int) -> None:
    """Compared with real updates of matrices that torch and transformers initialise."""
    (finding,) = find(trace([weight(trainable=True, shape=(8, inputs))], learning_rate=1e-6))
    size = float(finding.notes[0].partition("half of its values are above ")[2].partition(",")[0])
    normal = torch.randn(512, inputs, generator=torch.Generator().manual_seed(0)) * 0.02
    with torch.random.fork_rng():
        torch.manual_seed(0)
        uniform = torch.nn.Linear(inputs, 512).weight.detach()
    for values in (normal, uniform):
        assert (values.abs() > 0.98 * size).float().mean() > 0.49
        moved = values.bfloat16() - 1e-6 != values.bfloat16()
        assert moved.float().mean() < 0.5
    assert not list(find(trace([weight(trainable=True, shape=(8, inputs))], learning_rate=1e-3)))
    assert not list(find(trace([weight("w", FP32, trainable=True, shape=(8, inputs))], learning_rate=1e-6)))


@pytest.mark.parametrize("more", [["--use_peft", "False"], ["--use_dora", "True"]])
def test_masters_that_were_requested_in_bfloat16_are_changed_by_the_request(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_chat_model(tmp_path / "model")
    line = ["check", "sft", "--model_name_or_path", str(tmp_path / "model"), "--device", "a100", *more]
    line += ["--dtype", "bfloat16", "--learning_rate", "1e-6", "--master_dtype"]
    assert main([*line, "bfloat16"]) == 0
    text = capsys.readouterr().out
    assert "warning[IST801]" in text
    assert "safe; verified" in text
    (command,) = (row for row in text.splitlines() if row.startswith("    isotype sft"))
    assert "--master_dtype float32" in command
    assert main([*line, "float32"]) == 0
    assert "IST801" not in capsys.readouterr().out


def test_masters_in_float32_that_do_not_fit_are_named_with_this_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixes that change no memory stay fixes."""
    save_chat_model(tmp_path / "model")
    line = ["check", "sft", "--model_name_or_path", str(tmp_path / "model"), "--device", "a100", "--use_peft"]
    line += [
        "False",
        "--dtype",
        "bfloat16",
        "--learning_rate",
        "1e-6",
        "--master_dtype",
        "bfloat16",
        "--json",
    ]

    def checked() -> tuple[int, list[str], list[str]]:
        assert main(line) == 0
        report = json.loads(capsys.readouterr().out)
        (finding,) = (found for found in report["findings"] if found["code"] == "IST801")
        return report["memory"]["peak_bytes"], finding["notes"], [f["description"] for f in finding["fixes"]]

    peak, before, fixes = checked()
    assert any(text.startswith("train float32 weights") for text in fixes)
    assert not any(note.startswith("not a fix here") for note in before)
    small = Room(peak + 1000, "a small device's memory")
    monkeypatch.setattr(Setup, "limit", property(lambda setup: small))
    _, (note, *others), fixes = checked()
    assert others == before
    assert fixes == []
    assert note.startswith(
        "not a fix here: train float32 weights, which take twice the memory, because the step does not fit: "
    )


class RoundingAdam(torch.optim.Adam):
    """Adam that rounds its float32 result by `rounds`: "nearest", "stochastic", or "carried" (in the next step)."""

    def __init__(self, params: Any, lr: float = 1e-3, rounds: str = "nearest") -> None:
        super().__init__(params, lr=lr)
        self.rounds = rounds

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            wide = parameter.float() - self.param_groups[0]["lr"] * parameter.grad.float().sign()
            if self.rounds == "stochastic":
                bits = torch.randint_like(wide, 1 << 16, dtype=torch.int32).add_(wide.view(torch.int32))
                wide = bits.bitwise_and_(-65536).view(torch.float32)
            elif self.rounds == "carried":
                wide += self.state[parameter].setdefault("compensation", torch.zeros_like(wide))
                self.state[parameter]["compensation"] = wide - wide.to(parameter.dtype).float()
            parameter.copy_(wide.to(parameter.dtype))


@pytest.mark.parametrize(("rounds", "lost"), [("nearest", True), ("stochastic", False), ("carried", False)])
def test_an_optimizer_that_keeps_the_lost_digits_loses_no_updates(rounds: str, lost: bool) -> None:
    model = torch.nn.Linear(8, 8, dtype=BF16)
    with torch.no_grad():
        model.weight.fill_(0.5)
    optimizer = RoundingAdam(model.parameters(), 1e-5, rounds)
    inputs = {"input": torch.ones(2, 8, dtype=BF16)}
    report = check(model, inputs, device="a100", optimizer=optimizer, wiring=False, verify=False)
    assert ("IST801" in {finding.code for finding in report.findings}) == lost
    model(**inputs).sum().backward()
    before, old = 0.5, model.weight.detach().clone()
    for _ in range(400):
        optimizer.step()
    moved = before - model.weight.detach().float().mean()
    assert torch.equal(model.weight, old) if lost else 0.002 < moved < 0.006


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("factor", [0.95, 0.9975, 0.999, 0.9999])
def test_a_factor_near_one_changes_no_16_bit_number(dtype: torch.dtype, factor: float) -> None:
    """Nerogar/OneTrainer #996: weight decay in bfloat16, before an update that is rounded stochastically."""

    class Decayed(RoundingAdam):
        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(factor)
            super().step()

    model = torch.nn.Linear(8, 8, dtype=dtype)
    inputs = {"input": torch.ones(2, 8, dtype=dtype)}
    optimizer = Decayed(model.parameters(), 1e-5, "carried")
    report = check(model, inputs, device="a100", optimizer=optimizer, wiring=False, verify=False)
    messages = [finding.message for finding in report.findings if finding.code == "IST801"]
    numbers = torch.arange(2**15).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite() & (numbers > 1e-3)]
    same = torch.equal(numbers * factor, numbers)
    expected = f"{factor} times a {str(dtype)[6:]} number is the number itself: weight decay has no effect"
    assert messages == [expected] * same


def test_the_second_moment_of_bfloat16_weights_never_falls() -> None:
    """With lost updates, it is a note of their finding; with float32 weights, a finding."""
    model = torch.nn.Linear(8, 8, dtype=BF16)
    torch.nn.init.ones_(model.weight)
    inputs = {"input": torch.ones(2, 8, dtype=BF16)}
    for name in ("adamw", "adamw_fused"):
        report = check(
            model, inputs, device="a100", optimizer=name, learning_rate=1e-5, wiring=False, verify=False
        )
        (finding,) = (finding for finding in report.findings if finding.code == "IST801")
        never = "0.999 times a bfloat16 number is the number itself: a moving average of the optimizer never falls"
        assert never in finding.notes
        report = check(
            model.float(),
            {"input": torch.ones(2, 8)},
            device="a100",
            optimizer=name,
            wiring=False,
            verify=False,
        )
        assert "IST801" not in {finding.code for finding in report.findings}
        model.bfloat16()
