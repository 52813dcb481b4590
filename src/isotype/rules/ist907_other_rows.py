"""
**What it means.** A row's predictions depend on the tokens of another row of the batch.

**Why it happens.** Statistics are taken over the batch (`BatchNorm` in training, a mean over rows), experts
have a capacity that rows compete for, rows are flattened into one and attended together.

**Why it is bad.** A row's gradient depends on the other rows, and evaluation, with other batches, computes
another function. Training depends on the number of ranks and the size of micro-batches.

**An example that fails**

    hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)           # nn.BatchNorm1d over all tokens of all rows

**Repaired**

    self.norm = nn.LayerNorm(hidden_size)                              # or nn.BatchNorm1d in eval()

**How safe is the fix?** It changes the trained function.

**Seen in** deepseek-ai/DeepSeek-V2 #48 (experts that drop tokens over their capacity); laekov/fastmoe #34.
"""

from __future__ import annotations

from collections.abc import Iterator

from isotype.records.finding import Finding, Severity
from isotype.records.trace import Trace
from isotype.rules.kit.reach import leak_finding, where
from isotype.rules.kit.words import advice

TITLE = "Rows of a batch that reach each other"
KIND = "wiring"


def find(trace: Trace) -> Iterator[Finding]:
    """Yield predictions of a row that depend on another row's tokens."""
    reach = trace.reach
    leak = None if reach is None else reach.leak("other row")
    if reach is not None and leak is not None:
        cause = f"{where(leak)} mixes the rows of the batch"
        how = "take statistics of each row alone, or switch this module to eval()"
        message = "a row's predictions depend on the other rows of the batch"
        later = reach.leak("later token")
        severity: Severity = "warning"
        if later is not None and later.module == leak.module:
            severity, message = "error", f"{message}, and on its own later tokens"
        yield leak_finding(
            "IST907", severity, message, reach, leak, cause, (advice(leak.module or "rows", how),)
        )
