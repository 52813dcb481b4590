"""The step could not be traced to its end

**What it means.** The step raised an error, and the error ended the trace. The check does not know a dtype mismatch that explains the
error. Only the part of the step before the error was checked.

**Why it happens.** The cause is one of these:

- the model computes a size from the values of a tensor, but a trace has no values;
- the model calls a kernel without a fake implementation;
- a library is missing;
- the model does not accept the inputs.

The severity of the finding is "error" if the real step very likely raises the same exception, for example an exception about dtypes. In all
other cases, the severity of the finding is "warning".

**An example**

    class Pooled(nn.Module):
        def forward(self, x):
            return x.reshape(int(x.sum()), -1)     # a size that only values decide

    isotype.check(Pooled(), {"x": x})

**What to do.** If a size depends on the values of a tensor, record the real step with `isotype run train.py`. If the model calls your own
kernel, register a fake implementation (`torch.library.register_fake`). Install a missing library. If the model does not accept the inputs,
pass other inputs.

**How safe is the fix?** isotype changes nothing for this finding.

**Seen in** models with data-dependent shapes (jetmoe), kernels without a fake implementation.
"""

import re

from isotype.core.dtypes import named_integer
from isotype.core.names import plural, short
from isotype.records.finding import Finding, Severity
from isotype.records.trace import Failure, Trace
from isotype.rules import ist403_packed_raw
from isotype.rules.kit import contract_rule
from isotype.rules.kit.findings import Findings, advice, finding_after
from isotype.rules.kit.weight_sets import quantized

KIND = "untraced"

_DTYPES = re.compile(
    r"\bd?type\b.*\b(same|but|expected|got|found)\b|scalar type|\b(b?float([ -]?\d+)?|half|double)\b|"
    r"c10::|Complex(Half|Float|Double)|not implemented for '|data type|\b(bf|fp)[ -]?(16|32)\b",
    re.IGNORECASE,
)

_CERTAIN = re.compile(
    r"leaf Variable|modified by an inplace operation|modified inplace|graph a second time|one_hot is only|Muon only|"
    r"^IndexError: tensors used as indices|operator\.invert|optimizer got an empty parameter list|can.t optimize a non-leaf|"
    r"support (sparse|dense) gradients|can require gradients|if no padding token is defined|TrainableTokensLayer wraps an unknown"
)
"""Errors that do not depend on the values of tensors. Therefore the real step raises them, too."""

_COMPLEX = re.compile(r"(expected|same|match).*complex|ComplexHalf", re.IGNORECASE)

_REFUSALS = ("AssertionError", "NotImplementedError", "RuntimeError", "TypeError", "ValueError")


def find(trace: Trace) -> Findings:
    failure = trace.failure
    if failure is None or failure.recomputed:
        return  # a recomputation that fails is IST107
    without_state = any(w.module == failure.module and not state.present for w, state in quantized(trace))
    if ist403_packed_raw.explains(trace, failure) or without_state:  # IST402
        return
    if "finegrained-fp8" in failure.error:
        yield _of_fp8(trace, failure)
        return
    error = is_about_dtypes(failure)
    blames = error and named_integer(failure.error) is None
    blamed = contract_rule.of_failure(trace, failure) if blames else None
    if blamed is not None:
        yield blamed
        return
    message = f"the step was not traced beyond the {failure.phase}: {failure.error}"
    traced = sum(call.phase == failure.phase for call in trace.calls)
    was = "was" if traced == 1 else "were"
    place = " at ".join(filter(None, (failure.module, short(failure.source)))) or "it"
    checked = f"{plural(traced, 'operator')} of the {failure.phase} {was} checked; nothing after {place} was checked"
    if failure.phase == "load":
        message = f"the step could not be checked, because {failure.error}"
        checked = "no part of the step was checked"
    how = "run and record the real step with isotype run SCRIPT"
    fixes = (advice("isotype run", how, "the training script"),)
    if error and _COMPLEX.search(failure.error):
        how = "cast both operands to one complex dtype, such as x.to(torch.complex64); torch.fft of a float16 tensor returns complex32"
        fixes = (advice(failure.source, how),)
    severity: Severity = "error" if error or _CERTAIN.search(failure.error) else "warning"
    yield finding_after(severity, message, failure, cause=failure.error, notes=(checked,), fixes=fixes)


def _of_fp8(trace: Trace, failure: Failure) -> Finding:
    """Return a finding for transformers' FP8 layers: the device has no kernel, or the kernel has no backward."""
    profile, layer = trace.setup.profile, trace.modules[failure.module]
    message = f"{profile.title} has no kernel for transformers' {layer}"
    cause = "the kernel needs an NVIDIA GPU of compute capability 8.9 or later, or an Intel GPU"
    how = "load the model with quantization_config=FineGrainedFP8Config(dequantize=True); on a machine with this device, from_pretrained sets it by default"
    if profile.runs_fp8:
        message = f"transformers' {layer} has no backward with batched_mm"
        cause = "the model's experts_implementation is batched_mm"
        how = 'call model.set_experts_implementation("grouped_mm")'
    fixes = (advice("quantization_config", how),)
    return finding_after("error", message, failure, cause=cause, fixes=fixes)


def is_about_dtypes(failure: Failure) -> bool:
    """Return True if the error's text is about dtypes, or if a condition on a dtype raised the error."""
    name, _, message = failure.error.partition(":")
    if failure.dtype_related and "dtype" in failure.condition:
        return True
    return name in _REFUSALS and bool(_DTYPES.search(message))
