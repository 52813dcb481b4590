"""Tensors that a loss passes to the model are its inputs, by the names of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import isotype
from isotype.records.trace import Call, Trace
from isotype.trace.fake.code import named_tensors
from tests.models import tiny_model
from tests.pairwise import pairwise
from tests.rules.traces import traced
from tests.small import BF16, WIDTH

X = torch.ones(2, WIDTH, dtype=BF16)
MASK = torch.ones(2, WIDTH)


@dataclass
class Batch:
    x: torch.Tensor
    masks: list[torch.Tensor]


class Masked(nn.Module):
    """A bfloat16 layer whose output is multiplied by what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH).to(BF16)
        self.other = nn.Linear(WIDTH, WIDTH).to(BF16)

    def forward(self, x: Any, mask: Any = None) -> torch.Tensor:
        if isinstance(x, Batch):
            x, mask = x.x, x.masks[0]
        if isinstance(x, dict):
            x, mask = x["x"], x["mask"]
        if isinstance(mask, (list, tuple)):
            mask = mask[0]
        return torch.mm(self.proj(x), mask.T)

    def encode(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.proj(x) @ mask.T


def causes(trace: Trace) -> set[tuple[str, str]]:
    calls: list[Call] = [call for call in trace.calls if call.breach is not None]
    found = [o.origin.cause for call in calls for o in call.operands if o.dtype == torch.float32]
    return {(cause.kind, cause.name) for cause in found if cause.kind != "conversion"}


LOSSES: dict[str, tuple[Any, tuple[str, str]]] = {
    "keyword": (lambda m: m(X, mask=MASK).mean(), ("input", "mask")),
    "positional": (lambda m: m(X, MASK).mean(), ("input", "mask")),
    "nested dict": (lambda m: m({"x": X, "mask": MASK}).mean(), ("input", "x['mask']")),
    "list": (lambda m: m(X, mask=[MASK]).mean(), ("input", "mask[0]")),
    "dataclass": (lambda m: m(Batch(X, [MASK])).mean(), ("input", "x.masks[0]")),
    "a method": (lambda m: m.encode(X, MASK).mean(), ("data", "MASK")),
    "a submodule": (lambda m: (m.proj(X) @ MASK.T).mean(), ("data", "MASK")),
}


@pytest.mark.parametrize("case", LOSSES)
def test_what_a_loss_passes_is_named(case: str) -> None:
    loss, expected = LOSSES[case]
    assert causes(traced(Masked(), loss)) == {expected}
    report = isotype.check(Masked(), loss, device="cpu", verify=False)
    assert {finding.code for finding in report.errors} == {"IST101"}


def test_the_wrapped_models_argument() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Masked()

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    assert causes(traced(Wrapper(), lambda m: m(X, MASK).mean())) == {("input", "mask")}


def test_a_model_that_is_its_own_base_model() -> None:
    """As transformers' decoder wrappers: `base_model` of a model without one is the model itself."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = Masked()

        @property
        def base_model(self) -> nn.Module:
            return self

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.decoder(*args, **kwargs)

    trace = traced(Wrapper(), lambda m: m(X, MASK).mean())
    assert trace.failure is None
    assert causes(trace) == {("input", "args[1]")}


def test_nested_inputs_are_named_and_their_values_known() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(WIDTH, WIDTH).to(BF16)

        def forward(self, batch: Any) -> torch.Tensor:
            assert int(batch["rows"][0]) == 2
            return torch.mm(self.proj(batch["x"]), batch["mask"].T)

    batch = {"x": X, "mask": MASK, "rows": [torch.tensor(2)]}
    trace = traced(Nested(), {"batch": batch})
    assert trace.failure is None
    assert causes(trace) == {("input", "batch['mask']")}


class Reading(nn.Module):
    """Reads a weight of another module, by a function that closes over it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH).to(BF16)
        embed = self.embed
        self.weight_of = lambda: embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(self.proj(x), self.weight_of())


def test_a_weight_read_through_a_closure_is_that_parameter() -> None:
    model = Reading()
    trace = traced(model, {"x": X})
    assert causes(trace) == {("parameter", "embed.weight")}
    (finding,) = isotype.check(model, {"x": X}, device="cpu", verify=False).errors
    assert finding.cause == "embed.weight is float32"


def test_a_weight_that_the_loss_reads_off_the_real_model() -> None:
    model = Masked()
    model.other.float()
    trace = traced(model, lambda m: torch.mm(m.proj(X), model.other.weight).mean())
    assert causes(trace) == {("parameter", "other.weight")}


class Slots:
    __slots__ = ("mask", "unset")

    def __init__(self, mask: Any) -> None:
        self.mask = mask


class Unpacking(Masked):
    def forward(self, x: Any, mask: Any = None) -> torch.Tensor:
        while not isinstance(mask, torch.Tensor):
            mask = mask["of"] if isinstance(mask, dict) else mask.mask if hasattr(mask, "mask") else mask[0]
        return super().forward(x, mask)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (SimpleNamespace(mask=MASK), "mask.mask"),
        ((MASK,), "mask[0]"),
        (Slots(MASK), "mask.mask"),
        (Slots({"of": (SimpleNamespace(mask=MASK),)}), "mask.mask['of'][0].mask"),
    ],
    ids=["a namespace", "a tuple", "slots", "all of it"],
)
def test_what_an_object_holds_is_an_input(given: Any, name: str) -> None:
    assert causes(traced(Unpacking(), lambda m: m(X, mask=given).mean())) == {("input", name)}


def test_a_dataclass_with_slots_is_looked_into() -> None:
    @dataclass(slots=True)
    class Slotted:
        x: torch.Tensor
        count: int

    assert [name for name, _ in named_tensors({"batch": Slotted(X, 1)}, "given")] == ["given['batch'].x"]


@pairwise(
    ["kind", "rows, length", "phase"],
    ["padded", "packed"],
    [pytest.param(4, 128, id="few tokens"), pytest.param(20, 900, id="many tokens")],
    ["forward", "evaluate"],
)
def test_the_masks_of_padding_and_of_documents_are_counted(
    kind: str, rows: int, length: int, phase: str
) -> None:
    """transformers makes them only if a row has padding or documents: three bytes for each pair of a row's tokens."""
    model = tiny_model("llama").to("meta").requires_grad_(phase != "evaluate")
    places = torch.arange(length)
    batch = {"input_ids": torch.ones(rows, length, dtype=torch.long), "use_cache": False}
    mask = torch.ones_like(batch["input_ids"])
    plain = {**batch, "attention_mask": mask}
    if kind == "padded":
        masked = {
            **batch,
            "attention_mask": mask.where(places < length // 2, 0),
        }
    else:
        masked = {**batch, "position_ids": (places % (length // 2)).repeat(rows, 1)}

    def activations(inputs: dict[str, Any]) -> int:
        only = {"evaluation": inputs} if phase == "evaluate" else {}
        trained = {"input_ids": inputs["input_ids"][:1, :4]} if phase == "evaluate" else inputs
        report = isotype.check(model, trained, device="cpu", phases=("forward",), **only)
        return report.trace.memory.phases[phase]["activations"]

    assert activations(masked) - activations(plain) >= rows * length**2
