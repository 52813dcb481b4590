"""What the parts of an optimizer's name, as `--optim` takes it, say of it: one record each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NamePart:
    """A part of names, as in `galore_adamw_8bit`.

    Attributes:
        text: the part.
        package: that the optimizer is in, by its import name; "" where it is torch's or transformers' own.
        state: dtype of what it keeps, `{}` for the masters'; "" where the part says nothing of it.
        why: what it keeps.
        own_kernels: whether it updates in kernels of its own, which take every float dtype.
    """

    text: str
    package: str = ""
    state: str = ""
    why: str = ""
    own_kernels: bool = False


_IN_BLOCKS = "both moments are quantized in blocks; small tensors keep theirs in float32"
_LOW_RANK = "moments of gradients projected to a low rank"

NAME_PARTS: tuple[NamePart, ...] = (
    NamePart("8bit", state="8-bit", why=_IN_BLOCKS, own_kernels=True),
    NamePart("4bit", state="4-bit", why=_IN_BLOCKS),
    NamePart(
        "anyprecision",
        state="bfloat16",
        why="the second moment and Kahan's compensation are kept in bfloat16",
    ),
    NamePart("adafactor", state="float32", why="the second moment is kept as its row and column sums"),
    NamePart("galore", "galore_torch", "{}", _LOW_RANK, own_kernels=True),
    NamePart("bnb", "bitsandbytes", own_kernels=True),
    NamePart("adamw_8bit", "bitsandbytes"),
    NamePart("lion", "bitsandbytes", own_kernels=True),
    NamePart("ademamix", "bitsandbytes"),
    NamePart("paged", "bitsandbytes", own_kernels=True),
    NamePart("apollo", "apollo_torch", "{}", _LOW_RANK, own_kernels=True),
    NamePart("adamw_torch_4bit", "torchao"),
    NamePart("adamw_torch_8bit", "torchao"),
    NamePart("schedule_free", "schedulefree", "{}", "follows the parameters", own_kernels=True),
    NamePart("lomo", "lomo_optim", "none", "weights are updated in the backward pass; no moments", True),
    NamePart("grokadamw", "grokadamw"),
    NamePart("muon", own_kernels=True),
    NamePart("stable_adamw", own_kernels=True),
    NamePart("sgd", state="none", why="no moments without momentum"),
)
"""Of several parts that say the same of a name, the first holds: `galore_adamw_8bit` is galore's, and keeps 8 bits."""


def package_of(name: str) -> str | None:
    """The package that an optimizer is in, by its import name; None for torch's and transformers' own."""
    return next((part.package for part in NAME_PARTS if part.package and part.text in name), None)


def state_of(name: str) -> tuple[str, str] | None:
    """(dtype of an optimizer's state, `{}` for the masters'; what it keeps); None where it is Adam's, in the masters' dtype."""
    return next(((part.state, part.why) for part in NAME_PARTS if part.state and part.text in name), None)


def has_own_kernels(name: str) -> bool:
    """Whether an optimizer updates in kernels of its own, which take every float dtype."""
    return any(part.own_kernels and part.text in name for part in NAME_PARTS)
