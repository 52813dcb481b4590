"""Rows of a batch that affect each other

**What it means.** A row's predictions depend on the tokens of another row of the batch.

**Why it happens.** A layer computes statistics over the batch (`BatchNorm` in training, a mean over rows). In other models, rows compete
for the limited capacity of experts. Some models join all rows into one row, and the original rows attend to each other.

**Why it is bad.** A row's gradient depends on the other rows of its batch. An evaluation puts the row into a batch with different rows, so
the prediction changes. The result of a training depends on the number of processes and on the size of micro-batches.

**An example that fails**

    hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)           # nn.BatchNorm1d over all tokens of all rows

**Repaired**

    self.norm = nn.LayerNorm(hidden_size)                              # or nn.BatchNorm1d in eval()

**How safe is the fix?** The fix is safe: you edit the model so that it computes each row separately. This edit changes the function that is
trained.

**Seen in** deepseek-ai/DeepSeek-V2 #48 (experts that drop tokens over their capacity); laekov/fastmoe #34.
"""

from isotype.records.finding import Severity
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, finding_of_leak, reach_of


def find(trace: Trace) -> Findings:
    reach = reach_of(trace)
    leak, later = reach.leak("other row"), reach.leak("later token")
    if leak is not None:
        both = later is not None and later.module == leak.module
        message = "a row's predictions depend on the other rows of the batch"
        message += ", and on later tokens of the same row" if both else ""
        cause = f"{leak.where} mixes the rows of the batch"
        how = "compute the module's statistics for each row separately, or switch the module to eval()"
        severity: Severity = "error" if both else "warning"
        yield finding_of_leak(reach, leak, severity, message, cause, advice(leak.module or "rows", how))
