"""State that the check could not restore

**What it means.** The check runs the code of the training step. This code assigned state that the check could not restore afterwards.

**Why it happens.** The check runs the loss and the model's code on fake tensors, which have no values. Afterwards, the check restores the
state that the code assigned: attributes, globals, containers, memoized results. The check cannot restore items that a Python generator has
yielded, and state inside of another library's objects. It visits at most 20,000 objects.

**An example**

    batches = (load(path) for path in paths)
    isotype.check(model, lambda m: m(next(batches)).mean())     # the first batch is gone

**What to do.** Draw the batch before the check, and use this batch in the loss. Before the real step, recreate the objects that the finding
names, because they may still contain a fake tensor.

**How safe is the fix?** isotype changes nothing for this finding.

**Seen in** losses that draw their own batches; caches in compiled extensions.
"""

from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings


def find(trace: Trace) -> Findings:
    if trace.left:
        message = "the check could not restore all state that the step's code assigned"
        yield Finding(severity="note", message=message, cause=trace.left[0], notes=trace.left[1:])
