"""Where modules of two dtypes meet, the few are out of place, however large they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import isotype
from isotype.preflight.check import check
from isotype.preflight.setup import compute_dtype
from isotype.records.trace import Origin
from isotype.trace.sides import sides_of
from isotype.trace.weights import weights_of
from tests.reality import real_step
from tests.rules import samples
from tests.small import BF16, FP16, FP32, WIDTH

Batch = dict[str, torch.Tensor]
STEP = ("forward", "backward")
IDS: Batch = {"ids": torch.arange(6).reshape(2, 3)}
WAVE = torch.linspace(-1, 1, 128).reshape(2, 1, 64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())  # type: ignore[no-any-return]


class Model(nn.Module):
    """Its embedding has more elements than all of its layers."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(4096, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(ids)))  # type: ignore[no-any-return]


class Towered(nn.Module):
    """A tower that encodes pixels beside a model in another dtype, with a cast where they meet."""

    def __init__(self, norms: int = 0) -> None:
        super().__init__()
        first = (nn.LayerNorm(WIDTH) for _ in range(norms))
        self.tower = nn.Sequential(nn.Linear(12, WIDTH), *first, *(Block() for _ in range(2)))
        self.text = Model(5)

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        seen = self.tower(pixels).mean(1, keepdim=True)
        hidden = self.text.embed(ids)
        return self.text.head(self.text.blocks(hidden + seen.to(hidden.dtype)))  # type: ignore[no-any-return]


class Adversaries(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__(
            {
                "generator": nn.Sequential(
                    nn.ConvTranspose1d(4, 8, 4, 4),
                    nn.ReLU(),
                    nn.ConvTranspose1d(8, 8, 4, 4),
                    nn.Conv1d(8, 1, 3),
                ),
                "discriminator": nn.Sequential(
                    nn.Conv1d(1, 64, 16, 4), nn.ReLU(), nn.Conv1d(64, 64, 3), nn.Flatten()
                ),
            }
        )


class Autoencoder(nn.Module):
    """Convolutions around a codebook that is looked up in the dtype of what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv1d(1, 16, 4, 4), nn.ConvTranspose1d(16, 1, 4, 4)
        self.register_buffer("codes", torch.linspace(-1, 1, 128).reshape(8, 16))

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(wave).transpose(1, 2)
        codes: torch.Tensor = self.codes
        nearest = torch.cdist(encoded.float(), codes.float()).argmin(-1)
        found = nn.functional.embedding(nearest, codes)
        quantized = encoded + (found - encoded).detach()
        return nn.functional.l1_loss(self.decoder(quantized.transpose(1, 2)), wave)


def _deceived(model: Any) -> torch.Tensor:
    noise = torch.ones(2, 4, 8, dtype=next(model["generator"].parameters()).dtype)
    return nn.functional.softplus(-model["discriminator"](model["generator"](noise)).float()).mean()


def _cast(model: nn.Module, dtype: torch.dtype, *parts: tuple[str, torch.dtype]) -> Any:
    """Random weights: none is exact in a dtype that it is not in."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.to(dtype)
    for name, own in parts:
        model.get_submodule(name).to(own)
    return model


@dataclass(frozen=True)
class Case:
    """A model, and the weights that are to blame: one finding."""

    made: Callable[[], nn.Module]
    inputs: Any
    causes: tuple[str, ...]
    kept: str  # a part that is not out of place


_NORMS = ("1", "2", *(f"{block}.norm" for block in (3, 4)))
PIXELS = {**IDS, "pixels": torch.ones(2, 5, 12)}

CASES = {
    "a large bfloat16 embedding in a float32 model": Case(
        lambda: _cast(Model(), FP32, ("embed", BF16)), IDS, ("embed.weight is bfloat16",), "head"
    ),
    "a large float32 embedding in a bfloat16 model": Case(
        lambda: _cast(Model(), BF16, ("embed", FP32)), IDS, ("embed.weight is float32",), "head"
    ),
    "a bfloat16 layer in the float32 tower of a bfloat16 model": Case(
        lambda: _cast(Towered(), BF16, ("tower", FP32), ("tower.2.up", BF16)),
        PIXELS,
        ("tower.2.up.weight is bfloat16",),
        "tower.2.down",
    ),
    "bfloat16 norms in the float32 tower of a bfloat16 model": Case(
        lambda: _cast(Towered(2), BF16, ("tower", FP32), *((f"tower.{norm}", BF16) for norm in _NORMS)),
        PIXELS,
        ("tower.1.weight is bfloat16",),
        "tower.3.down",
    ),
    "a float32 block in a bfloat16 model": Case(
        lambda: _cast(Model(), BF16, ("blocks.1.up", FP32), ("blocks.1.down", FP32)),
        IDS,
        ("blocks.1.up.weight is float32",),
        "blocks.2.up",
    ),
    "a bfloat16 layer in a float32 model": Case(
        lambda: _cast(Model(), FP32, ("blocks.1.up", BF16)), IDS, ("blocks.1.up.weight is bfloat16",), "head"
    ),
    "a bfloat16 discriminator of fewer layers than its generator": Case(
        lambda: _cast(Adversaries(), FP32, ("discriminator", BF16)),
        _deceived,
        ("discriminator.0.weight is bfloat16",),
        "generator.3",
    ),
    "a float32 encoder, a float16 decoder and a float16 wave": Case(
        lambda: _cast(Autoencoder(), FP16, ("encoder", FP32)),
        {"wave": WAVE.half()},
        ("encoder.weight is float32",),
        "decoder",
    ),
}


_SLOW = (
    "a bfloat16 layer in the float32 tower of a bfloat16 model",
    "bfloat16 norms in the float32 tower of a bfloat16 model",
)


@pytest.mark.real_cpu
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in _SLOW else name for name in CASES]
)
def test_the_few_are_out_of_place(name: str) -> None:
    case = CASES[name]
    model = case.made()
    kept = model.get_submodule(case.kept).weight
    assert real_step(case.made(), case.inputs).error is not None
    report = check(model, case.inputs, device="cpu", phases=STEP)
    assert tuple(finding.cause for finding in report.errors) == case.causes
    assert all(fix.verified for finding in report.errors for fix in finding.fixes)
    before = kept.dtype
    repairs = isotype.repair(model, report, unsafe=True)
    assert {finding.key for finding in report.errors} <= {finding.key for finding in repairs.resolved}
    assert not repairs.to_do
    assert kept.dtype == before
    assert real_step(model, case.inputs).error is None


def test_one_layer_is_named_not_all_of_its_siblings() -> None:
    case = CASES["a bfloat16 layer in a float32 model"]
    (finding,) = check(case.made(), case.inputs, device="cpu", phases=STEP).errors
    assert [(fix.description, fix.safety) for fix in finding.fixes] == [
        ("let blocks.1.up compute in float32 and cast its inputs and outputs", "safe"),
        (f"cast the operands to float32 at {finding.source.rpartition('/')[2]}", "safe"),
        ("cast blocks.1.up.weight, blocks.1.up.bias to float32", "unsafe"),
    ]
    every = _cast(Model(), FP32, *((f"blocks.{number}.up", BF16) for number in range(4)))
    (finding,) = check(every, case.inputs, device="cpu", phases=STEP).errors
    assert (
        finding.fixes[0].description
        == "let each Linear of blocks.*.up compute in float32 and cast its inputs and outputs"
    )


@pytest.mark.parametrize("name", CASES)
def test_one_cause_is_one_error_without_a_trial_too(name: str) -> None:
    case = CASES[name]
    report = check(case.made(), case.inputs, device="cpu", phases=STEP, verify=False)
    assert tuple(finding.cause for finding in report.errors) == case.causes


def test_norms_and_adapters_have_no_vote() -> None:
    model = _cast(Model(), BF16)
    for block in model.blocks:
        block.norm = nn.Sequential(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH))
        block.lora_A, block.lora_B = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        block.attn_lora = nn.Linear(WIDTH, WIDTH)
    assert compute_dtype(model) == BF16


@pytest.mark.parametrize(("given", "side"), [(FP16, FP16), (FP32, FP32)])
def test_a_16_bit_input_breaks_a_tie(given: torch.dtype, side: torch.dtype) -> None:
    """Then elements do, and the encoder has more."""
    model = _cast(Autoencoder(), FP16, ("encoder", FP32))
    report = check(model, {"wave": WAVE.to(given)}, device="cpu", phases=STEP, verify=False)
    blamed = "encoder.weight is float32" if side == FP16 else "decoder.weight is float16"
    assert blamed in [finding.cause for finding in report.errors]


def test_a_policy_or_autocast_decides_before_any_vote() -> None:
    weights = weights_of(_cast(Model(), FP32, ("embed", BF16)))
    causes = [Origin("parameter", BF16, "embed.weight"), Origin("parameter", FP32, "blocks.0.up.weight")]
    assert sides_of(samples.setup(compute=BF16), weights).at("blocks.0.up", causes) == FP32
    assert sides_of(samples.setup(compute=BF16, autocast=BF16), weights).at("blocks.0.up", causes) == BF16
    policy = samples.POLICY
    assert sides_of(samples.setup(compute=BF16, policy=policy), weights).at("blocks.0.up", causes) == BF16


def test_a_part_with_as_many_of_each_asks_the_part_around_it() -> None:
    model = _cast(Model(), BF16, ("blocks.1.up", FP32))
    (finding,) = check(model, IDS, device="cpu", phases=STEP, verify=False).errors
    assert finding.cause == "blocks.1.up.weight is float32"
