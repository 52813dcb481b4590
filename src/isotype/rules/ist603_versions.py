"""
**What it means.** Installed libraries are incompatible with each other, or with this machine's device.

**Why it is bad.** The import fails, a quantized layer finds no kernel, or a library silently disables another
library.

**Why it happens.** One of torch, transformers, peft, trl, accelerate, bitsandbytes was upgraded alone; a
wheel was built for another CUDA version than torch's.

**An example**

    pip install "transformers==5.23.0" "torch==2.4.0"     # transformers 5.23 disables torch below 2.6

**Repaired**

    pip install --upgrade "torch>=2.6"

**What is not reported.** Incompatible versions if `--device` names a device of another machine: its libraries
are unknown. The rule compares the requirements that packages declare, the minimum versions that some packages
check only at run time, and known incompatible pairs with a public link. `isotype doctor` reports the same
without a model.

**How safe is the fix?** The fix changes the environment, so only you can apply it.

**Seen in** huggingface/transformers #41889; bitsandbytes #1688.
"""

from __future__ import annotations

from collections.abc import Iterator

from isotype.records.finding import Finding, Kind
from isotype.records.trace import Trace
from isotype.rules.kit.words import advice

TITLE = "Incompatible library versions"
KIND: Kind = "versions"


def find(trace: Trace) -> Iterator[Finding]:
    for incompatibility in trace.setup.incompatible:
        yield Finding(
            code="IST603",
            severity=incompatibility.severity,
            message=incompatibility.fact,
            phase="load",
            cause=" and ".join(incompatibility.packages),
            fixes=(advice("pip", incompatibility.command),),
        )
