"""Models that plain float16 cannot run train under the float16 policy that their measured ranges ask for."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import isotype
from isotype.precision.policy import PrecisionPolicy
from tests.models import quiet
from tests.pairwise import covering, few
from tests.ranges.architectures import SPOTS, WeakSpot, weak_model

STEPS = 10
LOSS = 5e-3
"""float16 rounds to 11 bits, 5e-4 an operation; bfloat16 to 8, 4e-3 an operation."""
LOSS_INT8 = 1e-2
"""int8 layers round their inputs to 127 steps, and a hair decides which: two runs differ by more than float16 rounds."""
LOSS_ROUTED = 1e-2
"""A hair also decides which expert computes a token: one token at another expert changes the loss by up to 0.9%."""
DIRECTION = 0.9
"""Cosine of what ten steps of Adam change: the sign of a gradient near zero is its rounding's."""

STORAGES, METHODS, DEVICES = ("none", "nf4", "fp4", "int8"), ("lora", "dora"), ("t4", "cpu-avx2")


OFTEN = {"llama-stream", "gpt2-stream", "t5-wo", "gpt-oss-experts"}


def cases() -> list[Any]:
    """Rows that hold every storage, method and device, each with an architecture of `OFTEN`; the others `exhaustive`."""
    rows = covering([len(STORAGES), len(METHODS), len(DEVICES)], strength=1)
    first = sorted(SPOTS, key=lambda name: name not in OFTEN)
    taken = {name: rows[at % len(rows)] for at, name in enumerate(first)}
    return [
        pytest.param(
            name,
            STORAGES[row[0]],
            METHODS[row[1]],
            DEVICES[row[2]],
            id="-".join((name, STORAGES[row[0]], METHODS[row[1]], DEVICES[row[2]])),
            marks=() if name in OFTEN and row == taken[name] else pytest.mark.exhaustive,
        )
        for name in SPOTS
        for row in product(*map(range, (len(STORAGES), len(METHODS), len(DEVICES))))
    ]


@dataclass(frozen=True)
class Trained:
    """Ten steps: losses, how the adapters changed, steps that the GradScaler skipped, the loss in evaluation."""

    model: Any
    losses: torch.Tensor
    change: torch.Tensor
    skipped: int
    evaluated: torch.Tensor


def trained(path: Path, policy: PrecisionPolicy, spot: WeakSpot, dora: bool) -> Trained:
    torch.manual_seed(0)
    with quiet():
        loaded = isotype.load(path, policy, device_map={"": "cpu"})
    model = isotype.add_lora(loaded, policy, r=4, use_dora=dora, target_modules="all-linear").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    batch = spot.batch()
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = torch.cat([each.detach().flatten() for each in adapters])
    optimizer = torch.optim.AdamW(adapters, lr=spot.rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=policy.loss_scale, enabled=policy.loss_scaling)
    losses, skipped = [], 0
    for _ in range(STEPS):
        with torch.autocast("cpu", policy.autocast or torch.bfloat16, enabled=policy.autocast is not None):
            loss = model(**batch).loss
        losses.append(loss.detach().float())
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale
        optimizer.zero_grad()
    change = torch.cat([each.detach().flatten() for each in adapters]) - before
    return Trained(model.eval(), torch.stack(losses), change, skipped, loss_of(model, batch))


@torch.no_grad()
def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """In evaluation, outside of autocast: the boundaries are enough."""
    return model(**batch).loss.float()  # type: ignore[no-any-return]


def overflows(model: Any, batch: dict[str, torch.Tensor]) -> bool:
    low = {name: each.half() if each.is_floating_point() else each for name, each in batch.items()}
    return not torch.isfinite(loss_of(copy.deepcopy(model).half(), low))


def generates(model: Any, batch: dict[str, torch.Tensor]) -> None:
    given = {name: each for name, each in batch.items() if name != "labels"}
    made = model.generate(
        **given,
        max_new_tokens=2,
        min_new_tokens=2,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert len(made.logits) == 2
    assert all(torch.isfinite(logits).all() for logits in made.logits)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # PEFT, of GPT-2's Conv1D
@pytest.mark.filterwarnings("ignore:adapters are on:UserWarning")  # not on stacked experts
@pytest.mark.parametrize(("name", "storage", "method", "device"), cases())
def test_float16_trains_as_float32(name: str, storage: str, method: str, device: str, tmp_path: Path) -> None:
    spot, model = SPOTS[name], weak_model(name)
    batch, quantization = spot.batch(), None if storage == "none" else storage
    assert torch.isfinite(loss_of(model, batch))
    assert overflows(model, batch)
    ranges = isotype.measure_ranges(model, batch, progress=False)
    with quiet():
        model.save_pretrained(tmp_path / "base")
    policy = isotype.resolve_precision(
        tmp_path / "base", "float16", quantization, device=device, ranges=ranges
    )
    assert policy.wide_residual
    wide = isotype.resolve_precision(tmp_path / "base", "float32", quantization, device="cpu")
    if quantization is not None:
        # Experts whose values exceed float16's range are not quantized: neither may those of the reference be.
        experts = tuple(exception for exception in policy.exceptions if exception.module.endswith(".experts"))
        wide = replace(wide, exceptions=experts)
    dora = method == "dora"
    expected = trained(tmp_path / "base", wide, spot, dora)
    low = trained(tmp_path / "base", policy, spot, dora)
    assert low.skipped == 0
    tolerance = LOSS_INT8 if storage == "int8" else LOSS
    routed = LOSS_ROUTED if name.endswith("-experts") else LOSS
    torch.testing.assert_close(low.losses, expected.losses, rtol=routed, atol=0)
    torch.testing.assert_close(low.evaluated, expected.evaluated, rtol=tolerance, atol=0)
    changes = low.change.double(), expected.change.double()
    assert torch.nn.functional.cosine_similarity(*changes, dim=0) > DIRECTION
    generates(low.model, batch)
    if quantization is None:
        low.model.save_pretrained(tmp_path / "adapter")
        for dtype, rounded in ((torch.float32, LOSS), (torch.bfloat16, 4e-2)):
            with quiet():
                base = type(model).from_pretrained(tmp_path / "base", dtype=dtype)
                plain = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
            given = {k: each.to(dtype) if each.is_floating_point() else each for k, each in batch.items()}
            torch.testing.assert_close(loss_of(plain, given), low.evaluated, rtol=rounded, atol=0)


@few("name", list(SPOTS), "gemma3-embedding")
def test_float32_weights_under_autocast_to_float16(name: str, tmp_path: Path) -> None:
    """Outside of norms, the residual stream has the dtype of the weights; a norm returns the float16 of its input."""
    batch, model = SPOTS[name].batch(), weak_model(name)
    ranges = isotype.measure_ranges(model, batch, progress=False)
    with quiet():
        model.save_pretrained(tmp_path)
    policy = isotype.resolve_precision(tmp_path, "float16", device="cpu", trainable="full", ranges=ranges)
    assert policy.plain == torch.float32
    with torch.autocast("cpu", torch.float16):
        low = loss_of(isotype.load(tmp_path, policy), batch)
    torch.testing.assert_close(low, loss_of(model.eval(), batch), rtol=LOSS, atol=0)
