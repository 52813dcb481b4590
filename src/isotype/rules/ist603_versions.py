"""Incompatible library versions

**What it means.** Installed libraries are incompatible with each other, or with this machine's device.

**Why it is bad.** An import fails, or a quantized layer has no kernel. In other cases, a library ignores another library without a warning.

**Why it happens.** Only one of torch, transformers, peft, trl, accelerate and bitsandbytes was upgraded. In other cases, a library was
built for another CUDA version than torch.

**An example**

    pip install "transformers==5.23.0" "torch==2.4.0"     # transformers 5.23 disables torch below 2.6

**Repaired**

    pip install --upgrade "torch>=2.6"

**What is checked.** The rule checks the requirements in the packages' metadata, and the minimum versions that some packages check only at
run time. The rule also checks pairs of libraries that an issue on GitHub reports as incompatible. The rule checks nothing if `--device`
names a device of another machine, because the libraries of that machine are unknown. `isotype doctor` runs the same check without a model.

**How safe is the fix?** The fix is safe: you run a `pip` command. This command changes no weights and no code.

**Seen in** huggingface/transformers #41889; bitsandbytes #1688.
"""

from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice

KIND = "versions"


def find(trace: Trace) -> Findings:
    for known in trace.setup.incompatible:
        cause, fixes = " and ".join(known.packages), (advice("pip", known.command),)
        yield Finding(known.severity, known.fact, phase="load", cause=cause, fixes=fixes)
