"""State that the check could not restore

**What it means.** The check could not restore all state that the step's code assigned while the check ran this code.

**Why it happens.** The check runs the loss and the model's code on fake tensors, which have no values. Then it restores
the state that the code assigned: attributes, globals, containers, memoized results. It cannot restore items that a
Python generator has yielded, state inside of another library's objects, and objects beyond the 20,000 that it visits.

**An example**

    batches = (load(path) for path in paths)
    isotype.check(model, lambda m: m(next(batches)).mean())     # the first batch is gone

**What to do.** Draw the batch before the check, and let the loss use this batch. Before the real step, recreate the
objects that the finding names, because these objects may still hold a fake tensor.

**How safe is the fix?** isotype changes nothing for this finding.

**Seen in** losses that draw their own batches; caches in compiled extensions.
"""

from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings


def find(trace: Trace) -> Findings:
    if trace.left:
        message = "the check could not restore everything that the step's own code assigned"
        yield Finding(severity="note", message=message, cause=trace.left[0], notes=trace.left[1:])
