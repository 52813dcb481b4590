"""No kernel for the dtype of the operands

**What it means.** The operands of an operator have one dtype, but the device has no kernel for this dtype.

**Why it happens.** Some operators exist only in float32 and float64: linear algebra (SVD, inverse, eigenvalues), Fourier transforms,
quantiles, histograms and some losses. On a GPU, products with a sparse matrix have no 16-bit kernel. Some operators have no float16 kernel
on a CPU, or no bfloat16 kernel on an older GPU. On a GPU, `binary_cross_entropy` raises an error under autocast, because its float16
gradients could overflow.

**An example that fails**

    torch.linalg.svd(weight.bfloat16())      # "linalg_svd_cpu" not implemented for 'BFloat16'

**Repaired**

    torch.linalg.svd(weight.float()).U.to(weight.dtype)

**How safe is the fix?** The fix is safe: the operator computes in float32 and rounds its result once. Sparse products and
`binary_cross_entropy` run outside of autocast. A loss from logits (`binary_cross_entropy_with_logits`) is safe too, because it computes the
same function. A cast is unsafe if it changes a trained weight or may round a frozen weight.

**Seen in** huggingface/peft #1052; arcee-ai/mergekit #304; h2oai/h2o-llmstudio #233; tloen/alpaca-lora #308;
pytorch/pytorch #61098, #117844, #144040; cai4cai/torchsparsegradutils #53; thuml/Time-Series-Library #761; innnky/so-vits-svc #11;
ldeecke/gmm-torch #27; open-mmlab/mmdetection #4746; Lightning-AI/pytorch-lightning #13871.
"""

import re
from dataclasses import replace

from isotype.core.dtypes import FLOATS, dtype_name
from isotype.core.names import short
from isotype.records.finding import Finding
from isotype.records.trace import UNSAFE, Call, Trace
from isotype.rules.kit import contract_rule
from isotype.rules.kit.findings import Findings, advice, finding_at, fix
from isotype.rules.kit.groups import Broken, Claim
from isotype.rules.kit.words import device_error

_TAKES_INTEGERS = re.compile("bitwise|shift")


def _is_unsafe(call: Call) -> bool:
    return call.refusal.endswith(UNSAFE)


def _has_no_kernel(broken: Broken) -> bool:
    # float8 is a storage dtype: no operator promotes it.
    return any(dtype.itemsize == 1 for dtype in broken.floats) or (broken.lacks_kernel and not broken.packed)


_HEADLINE = "{op} has no kernel for {given} on this device"
CLAIMS = (
    Claim("step", lambda broken: _is_unsafe(broken.call)),
    Claim("dtype", _has_no_kernel, _HEADLINE, refused="dtype", settled=False),
)


def find(trace: Trace) -> Findings:
    for finding in contract_rule.find(__name__, trace):
        floats = [operand for operand in finding.operands if operand.dtype in FLOATS]
        if any(operand.dtype.itemsize == 1 for operand in floats):
            yield finding  # its cause already names the float8 tensor
            continue
        # The headline names the dtype without a kernel; other operands may have another dtype.
        floats.sort(key=lambda operand: dtype_name(operand.dtype) not in finding.message.split())
        dtype, where, cause = dtype_name(floats[0].dtype), short(finding.source), floats[0].origin.cause
        # For an operator of integers, a cast to another float dtype does not help.
        if floats[0].dtype.itemsize >= 4 or _TAKES_INTEGERS.search(finding.op):
            if cause.kind == "conversion" and _TAKES_INTEGERS.search(cause.name):
                continue  # another finding: the operator that returned this operand takes integers, too
            origin = floats[0].origin
            while origin.before is not None and origin.before.dtype in FLOATS:
                origin = origin.before
            if origin.before is not None:  # a cast of integers
                name, kept, line = origin.before.name, dtype_name(origin.before.dtype), short(origin.source)
                keep = fix(f"keep {name} in {kept} at {line}", "line", (origin.source,), kept)
                yield replace(finding, cause=f"{name} is cast to {dtype} at {line}", fixes=(keep,))
                continue
            what = f"keep {origin.name} as integers, because a cast to {dtype} rounds them"
            stored = origin.kind in ("buffer", "parameter")
            masks = what if stored else f"use bool or integer tensors at {where}"
            finding = replace(finding, fixes=(advice(finding.source, masks),))
        if "sparse" in finding.op and trace.setup.autocast is not None:  # autocast would cast float32 again
            how = f"turn autocast off around {where}, and multiply in float32"
            finding = replace(finding, fixes=(fix(how, "line", (finding.source,), "float32"),))
        yield replace(finding, cause=f"{finding.op} is called in {dtype} at {where}")
    refused = {call.source: call for call in trace.breaches() if _is_unsafe(call)}
    yield from map(_unsafe, refused.values())


def _unsafe(call: Call) -> Finding:
    assert call.autocast is not None
    where, logits = short(call.source), "binary_cross_entropy_with_logits"
    message = f"{call.op} raises an error under autocast"
    cause = f"{call.op} is called under autocast to {dtype_name(call.autocast)} at {where}"
    without_autocast = f"turn autocast off around {where}, and call the loss in float32"
    fixes = (
        fix(without_autocast, "line", (call.source,), "float32"),
        advice(call.source, f"omit the sigmoid, and pass the logits to {logits}()", logits),
    )
    return finding_at("error", message, [call], cause=cause, notes=device_error(call.refusal), fixes=fixes)
