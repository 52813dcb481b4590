"""
**What it means.** The step raised an error that no operator's contract explains, and the trace ended there. The part
of the step that precedes the error was checked; the part that follows was not.

**Why it happens.** The model needs values and not only dtypes (a size that is computed from a tensor's
values), it calls a kernel without a fake implementation, a library is missing, or
the inputs do not fit the model. If the error is about dtypes, the real step very likely raises it too, so the
finding is an error; else it is a warning.

**An example**

    class Pooled(nn.Module):
        def forward(self, x):
            return x.reshape(int(x.sum()), -1)     # a size that only values decide

    isotype.check(Pooled(), {"x": x})

**What to do.** Run the real step with `isotype run train.py`: it records the step without fake tensors. Call
`check` with inputs that the model accepts. For a kernel of your own, register a fake
(`torch.library.register_fake`).

**How safe is the fix?** Nothing is changed.

**Seen in** models with data-dependent shapes (jetmoe), kernels without a fake implementation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from isotype.core.names import plural, short
from isotype.records.finding import Finding, Kind
from isotype.records.trace import Failure, Trace
from isotype.rules import ist403_packed_raw
from isotype.rules.kit import contract_rule
from isotype.rules.kit.words import advice

TITLE = "The step could not be traced to its end"
KIND: Kind = "untraced"

_DTYPES = re.compile(
    r"\bd?type\b.*\b(same|but|expected|got|found)\b|scalar type|\b(b?float([ -]?\d+)?|half|double)\b|"
    r"c10::|not implemented for '|data type|\b(bf|fp)[ -]?(16|32)\b",
    re.IGNORECASE,
)

_REFUSALS = ("AssertionError", "NotImplementedError", "RuntimeError", "TypeError", "ValueError")


def find(trace: Trace) -> Iterator[Finding]:
    """Yield the finding of a step that ended early."""
    failure = trace.failure
    if failure is None or failure.recomputed:
        return  # a recomputation that fails is IST107
    if ist403_packed_raw.explains(trace, failure) or _without_state(trace, failure):
        return
    error = is_about_dtypes(failure)
    blamed = contract_rule.of_failure(trace, failure, "IST199") if error else None
    if blamed is not None:
        yield blamed
        return
    traced = sum(call.phase == failure.phase for call in trace.calls)
    was = "was" if traced == 1 else "were"
    yield Finding(
        code="IST199",
        severity="error" if error else "warning",
        message=_message(failure),
        module=failure.module,
        phase=failure.phase,
        source=failure.source,
        cause=failure.error,
        notes=(
            "no part of the step was checked"
            if failure.phase == "load"
            else f"{plural(traced, 'operator')} of the {failure.phase} {was} checked before; nothing after {_place(failure)} was",
        ),
        fixes=(
            advice(
                "isotype run",
                "run the real step under the live recorder: isotype run SCRIPT",
                "the training script",
            ),
        ),
        places=(failure.module,),
    )


def _message(failure: Failure) -> str:
    if failure.phase == "load":
        return f"the step could not be checked, because {failure.error}"
    return f"the step was not traced beyond the {failure.phase}: {failure.error}"


def _without_state(trace: Trace, failure: Failure) -> bool:
    """Return whether the step ended in a layer that lacks its quantization state: IST402 reports that."""
    return any(
        weight.module == failure.module
        and weight.quantization is not None
        and not weight.quantization.present
        for weight in trace.weights
    )


def is_about_dtypes(failure: Failure) -> bool:
    """Return whether the error, or the check that raised it, is about dtypes."""
    name, _, message = failure.error.partition(":")
    if failure.dtype_related and "dtype" in failure.condition:
        return True
    return name in _REFUSALS and bool(_DTYPES.search(message))


def _place(failure: Failure) -> str:
    return " at ".join(part for part in (failure.module, short(failure.source)) if part) or "it"
