"""Assignment of broken contracts to rules: each rule's file lists its claims, which are checked in a fixed order."""

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
    "tensor",  # owner of the tensor
    "step",  # independent of operands: a phase, a function refused by name
    "value",  # a number
    "dtype",  # no kernel for the dtype in any combination
    "phase",  # phase
    "operator",  # family of operators
    "operand",  # kind of weight
    "rest",
]
"""The criterion of a claim; earlier stages are checked first, within a stage in order of the codes."""

Refused = Literal["mixture", "dtype", "by the model"]
"""Kind of refusal: several dtypes, one dtype by the device, one dtype by a check of the model's code."""


@dataclass(frozen=True)
class Broken:
    """A broken contract as input of claims: the call, the operand to blame, the trace."""

    call: Call
    mismatched: Operand
    trace: Trace

    @property
    def owners(self) -> Mapping[str, Weight]:
        """Weights by each of their names."""
        return self.trace.owners

    @cached_property
    def floats(self) -> frozenset[torch.dtype]:
        """The float dtypes of its operands."""
        return frozenset(operand.dtype for operand in self.call.operands if operand.dtype in FLOATS)

    @property
    def message(self) -> str:
        """The device's message."""
        return self.call.breach.message if self.call.breach is not None else ""

    @property
    def agrees(self) -> bool:
        """True if its float operands agree and autocast to another dtype is not the reason.

        Autocast refuses another 16-bit dtype than its own when promoting (`at::autocast::prioritize`).
        """
        return len(self.floats) < 2 and "autocast" not in self.message

    @property
    def packed(self) -> bool:
        """True if float operands are mixed with bytes: packed codes."""
        codes = any(operand.dtype in (torch.uint8, torch.int8) for operand in self.call.operands)
        return codes and bool(self.floats)

    def runs(self, *names: str) -> bool:
        """Return whether the operator's name contains one of these."""
        return any(name in self.call.op for name in names)


@dataclass(frozen=True)
class Claim:
    """A rule's claim on broken contracts, listed in its file's `CLAIMS`.

    Attributes:
        stage: its criterion, and so its order.
        takes: whether a broken contract is the rule's.
        refused: what was refused, which decides the possible fixes.
        grouped: whether `contract_rule` creates its findings, one per cause; else the rule itself does
            from the trace.
        settled: whether the first call of a group determines its finding, so that later phases cannot
            change it.
    """

    stage: Stage
    takes: Callable[[Broken], bool]
    refused: Refused = "mixture"
    grouped: bool = True
    settled: bool = True


def rule_modules() -> Mapping[str, ModuleType]:
    """Return every rule's module by code, in order of the codes."""
    package = import_module("isotype.rules")
    names = sorted(info.name for info in iter_modules(package.__path__) if info.name.startswith("ist"))
    return {code_of(name): import_module(f"{package.__name__}.{name}") for name in names}


def code_of(module: str) -> str:
    """Return a rule's code for its module: `isotype.rules.ist101_operands` -> `IST101`."""
    return module.rpartition(".")[2].split("_", 1)[0].upper()


@cache
def all_claims() -> tuple[tuple[str, Claim], ...]:
    """Return (code, claim) of every rule on broken contracts, in the order of checking."""
    claims = [
        (code, each) for code, module in rule_modules().items() for each in getattr(module, "CLAIMS", ())
    ]
    return tuple(sorted(claims, key=lambda claim: get_args(Stage).index(claim[1].stage)))


def claimed(broken: Broken) -> tuple[str, Claim]:
    """Return (code, claim) of the rule to which a broken contract belongs."""
    return next((code, claim) for code, claim in all_claims() if claim.takes(broken))
