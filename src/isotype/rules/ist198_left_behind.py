"""
**What it means.** The check could not put back everything that the step's own code has assigned while it was traced.

**Why it happens.** A trace runs the loss and the model's code on fake tensors. What that code assigns (attributes, globals,
containers, memoized results) is put back afterwards. A generator that has moved on cannot be, nor what is held where
Python cannot look: inside of another library's own objects, or beyond the number of objects that a check looks at.

**An example**

    batches = (load(path) for path in paths)
    isotype.check(model, lambda m: m(next(batches)).mean())     # the first batch is gone

**What to do.** Give the check what the step needs by value: draw the batch before, and let the loss use it. What is named
as still holding a tensor of the trace has to be made again before the real step.

**How safe is the fix?** Nothing is changed.

**Seen in** losses that draw their own batches; caches in compiled extensions.
"""

from __future__ import annotations

from collections.abc import Iterator

from isotype.records.finding import Finding
from isotype.records.trace import Trace

TITLE = "Something the check could not put back"


def find(trace: Trace) -> Iterator[Finding]:
    """What the trace has left behind, in one note."""
    if trace.left:
        yield Finding(
            code="IST198",
            severity="note",
            message="the check could not restore everything that the step's own code assigned",
            cause=trace.left[0],
            notes=trace.left[1:],
        )
