"""Which rule a broken contract belongs to: each says in its own file what it claims, and is asked in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Literal, get_args

import torch

from isotype.records.trace import FLOATS, Call, Operand, Trace, Weight

Stage = Literal[
    "tensor",  # whose tensor it is
    "step",  # what no operand could change: a phase of its own, a function that is refused by name
    "value",  # which number it is
    "dtype",  # that no kernel takes the dtype, whatever it meets
    "phase",  # when it runs
    "operator",  # which family of operators it belongs to
    "operand",  # what kind of weight it is
    "rest",
]
"""What a claim goes by; those of an earlier stage are asked first, those of one stage in order of the codes."""

Refused = Literal["mixture", "dtype", "by the model"]
"""What was refused: operands of several dtypes, a dtype by the device, a dtype by a check of the model's own code."""


@dataclass(frozen=True)
class Broken:
    """A broken contract, as the rules are asked about it.

    Attributes:
        call: the operator.
        mismatched: the operand to blame.
        trace: of the step.
    """

    call: Call
    mismatched: Operand
    trace: Trace

    @property
    def owners(self) -> Mapping[str, Weight]:
        """Every weight by each of its names."""
        return self.trace.owners

    @cached_property
    def floats(self) -> frozenset[torch.dtype]:
        """The float dtypes of its operands."""
        return frozenset(operand.dtype for operand in self.call.operands if operand.dtype in FLOATS)

    @property
    def message(self) -> str:
        """What the device says."""
        return self.call.breach.message if self.call.breach is not None else ""

    @property
    def agrees(self) -> bool:
        """True if its float operands agree, and no autocast to another dtype than theirs is the reason either.

        A 16-bit dtype that meets an autocast to the other one is refused where it promotes
        (`at::autocast::prioritize`).
        """
        return len(self.floats) < 2 and "autocast" not in self.message

    @property
    def packed(self) -> bool:
        """True if bytes lie among float operands: packed codes."""
        codes = any(operand.dtype in (torch.uint8, torch.int8) for operand in self.call.operands)
        return codes and bool(self.floats)

    def runs(self, *names: str) -> bool:
        """Return whether the operator's name contains one of these."""
        return any(name in self.call.op for name in names)


@dataclass(frozen=True)
class Claim:
    """Broken contracts that are a rule's own; a rule's file lists them as `CLAIMS`.

    Attributes:
        stage: what it goes by, and so when it is asked.
        takes: whether a broken contract is the rule's.
        refused: what was refused, which decides what may fix it.
        grouped: whether `contract_rule` makes its findings, one a cause; else the rule finds them in the trace itself.
        settled: whether nothing but the first call of a group makes its finding, which no later phase then changes.
    """

    stage: Stage
    takes: Callable[[Broken], bool]
    refused: Refused = "mixture"
    grouped: bool = True
    settled: bool = True


def rule_modules() -> Mapping[str, ModuleType]:
    """Return the file of every rule by its code, in order of the codes."""
    package = import_module("isotype.rules")
    names = sorted(info.name for info in iter_modules(package.__path__) if info.name.startswith("ist"))
    return {code_of(name): import_module(f"{package.__name__}.{name}") for name in names}


def code_of(module: str) -> str:
    """Return the code of a rule by the name of its file: `isotype.rules.ist101_operands` -> `IST101`."""
    return module.rpartition(".")[2].split("_", 1)[0].upper()


@cache
def all_claims() -> tuple[tuple[str, Claim], ...]:
    """Return (code, claim) of every rule on broken contracts, in the order in which they are asked."""
    claims = [
        (code, each) for code, module in rule_modules().items() for each in getattr(module, "CLAIMS", ())
    ]
    return tuple(sorted(claims, key=lambda claim: get_args(Stage).index(claim[1].stage)))


def claimed(broken: Broken) -> tuple[str, Claim]:
    """Return the code of the rule that a broken contract belongs to, and the claim by which it does."""
    return next((code, claim) for code, claim in all_claims() if claim.takes(broken))
