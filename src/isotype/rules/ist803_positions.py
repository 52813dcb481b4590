"""Rotary positions in 16 bits

**What it means.** Rotary frequencies, or the angles (position times frequency), are in 16 bits. In other cases, a complex table
(`freqs_cis`) has lost its imaginary part, which contains the sines.

**Why it happens.** `.to(bfloat16)`, `.half()` and DeepSpeed also cast buffers, but `from_pretrained(dtype=…)` does not. `.to(bfloat16)`
also makes complex buffers real. Autocast multiplies positions by frequencies in 16 bits, unless the model disables autocast for this
product.

**Why it is bad.** bfloat16 rounds an angle of about 2000 radians to a multiple of 8, so its cosine is arbitrary. No error is raised, but
distant positions become equal. Without sines, queries and keys are scaled and not rotated. Only `torch.view_as_real` and `.imag` raise an
error. In bfloat16, a diffusion model's timestep 998.4 becomes 1000.

**An example that costs**

    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)

**Repaired**

    isotype.repair(model, isotype.check(model, batch))      # frequencies are recomputed in float32

**How safe is the fix?** The fix is safe: `isotype.repair` computes the frequencies from the config in float32, which takes a few hundred
bytes. You apply the other fixes in your code: create a complex table after the cast, keep timesteps in float32, or compute angles outside
of autocast.

**Seen in** EleutherAI/gpt-neox #1003; huggingface/transformers #25681, #29285; huggingface/optimum-habana #746;
modelscope/DiffSynth-Studio #562, #1025; huggingface/diffusers #9405; wfondrie/depthcharge #82; nkalyanv99/UNI-D2 #6.
"""

import re
from collections.abc import Collection, Iterator

from isotype.core.dtypes import FLOATS, HALVES, dtype_name
from isotype.core.names import grouped, named, short
from isotype.records.finding import Finding, Severity
from isotype.records.trace import CASTS, Call, Operand, Trace
from isotype.rules.kit.findings import Findings, advice, finding_at, finding_of, fix, rounding_at
from isotype.rules.kit.groups import Claim
from isotype.rules.kit.weight_sets import counted, names
from isotype.rules.kit.words import ANGLES, cause_text, device_error, op_name

_ONLY_COMPLEX = re.compile("only supported for complex tensors|non-complex dtypes")
CLAIMS = (Claim("step", lambda broken: bool(_ONLY_COMPLEX.search(broken.call.refusal))),)

_BUFFERS = re.compile(r"inv_freq|rotary|rope|freqs", re.IGNORECASE)
_TABLE = re.compile(r"freqs[^.]*$|cis$", re.IGNORECASE)
_MODULES = re.compile(r"rotary|rope", re.IGNORECASE)
# transformers' class names begin with the model's name, and their config has the frequencies' parameters.
_FROM_CONFIG = re.compile(r"\wRotaryEmbedding$")


def find(trace: Trace) -> Findings:
    real: dict[str, Finding] = {}
    for name, finding in _without_imaginary(trace):
        real.setdefault(name, finding)
    yield from real.values()
    low = (w for w in trace.weights if w.buffer and w.dtype in HALVES and w.name not in real)
    rounded = [weight for weight in low if _BUFFERS.search(weight.name)]
    if rounded and trace.calls and trace.failure is None:
        used = {operand.origin.name for call in trace.calls for operand in call.operands}
        rounded = [weight for weight in rounded if not used.isdisjoint((weight.name, *weight.tied))]
    if rounded:
        message = f"{counted(rounded, 'rotary buffer', 'are')} rounded to {dtype_name(rounded[0].dtype)}"
        cause, again = rounding_at(trace, rounded[0].name, "")
        if all(_FROM_CONFIG.search(weight.module_class) for weight in rounded):
            how = "compute the rotary frequencies again in float32"
            again = fix(how, "buffer", names(rounded), "float32")
        yield finding_of("warning", message, rounded, cause=cause, fixes=(again,))
        return
    products = [call for call in trace.calls if _is_rounded_product(call, trace)]
    yield from _angles(trace, {call.module for call in products})
    if products:
        first = products[0]
        dtype = dtype_name(first.results[0][0])
        by = "autocast" if first.autocast else "a product"
        how = "turn autocast off where the angles are computed, and compute them in float32"
        yield finding_at(
            "warning",
            f"rotary angles are computed in {dtype}",
            products,
            cause=f"{by} in {dtype} at {short(first.source)} in {named(first.module)}",
            fixes=(advice(first.module, how),),
        )


def _without_imaginary(trace: Trace) -> Iterator[tuple[str, Finding]]:
    """Yield (name, finding) for each real tensor that is used as a complex tensor, and for each cast from complex to real."""
    if (end := trace.failure) is not None and _ONLY_COMPLEX.search(end.error):
        op = "torch.imag" if "imag" in end.error else "aten.view_as_real.default"
        for operand in [o for o in end.operands if o.origin.kind == "buffer"][:1]:
            call = Call(op, end.phase, end.module, end.source, (operand,), ())
            yield operand.origin.name, _made_real(trace, call, operand, end.error)
        return
    for call in trace.calls:
        # A product with the 0-dim `torch.tensor(1j)` makes complex numbers of a real table.
        values = [operand for operand in call.operands if operand.dtype.is_complex and operand.shape]
        fourier = any("fft" in step.name for operand in values for step in operand.origin.path())
        for operand in call.operands:
            name, owner = operand.origin.name, trace.owners.get(operand.origin.name)
            table = owner and owner.buffer and operand.dtype in FLOATS and _TABLE.search(name)
            if (table and values and not fourier) or _ONLY_COMPLEX.search(call.refusal):
                yield name, _made_real(trace, call, operand, call.refusal)
        # The result of an inverse transform may have an imaginary part of zeros.
        if values and call.op in CASTS and call.results[0][0] in FLOATS and not fourier:
            yield call.source, _made_real(trace, call, values[-1])


def _made_real(trace: Trace, call: Call, operand: Operand, error: str = "") -> Finding:
    name, stored = operand.origin.name, operand.origin.kind == "buffer"
    cause, how = cause_text(operand.origin.cause, trace.owners), "pass a complex tensor to this operator"
    if operand.dtype.is_complex:
        cast = f"a cast to {dtype_name(call.results[0][0])} at {short(call.source)}"
        cause = f"{cast} discards the imaginary part"
        how = "keep the tensor complex, cast the result of torch.view_as_real, or cast .real if the imaginary part is zero"
    elif stored:
        cause = f"{cause}: model.to(dtype) discards the imaginary part of a complex buffer"
        how = f"cast with model.bfloat16() or model.half(), which keep complex buffers, or compute {name} after the cast"
    message = "a complex tensor has lost its imaginary part"
    # The imaginary part of a computed tensor, such as `z * z.conj()`, may be zero.
    severity: Severity = "error" if stored or not operand.dtype.is_complex else "warning"
    notes, fixes = device_error(error), (advice(name, how),)
    return finding_at(severity, message, [call], cause=cause, notes=notes, fixes=fixes)


def _angles(trace: Trace, reported: Collection[str]) -> Findings:
    """Yield findings for sines and cosines whose angle comes from rounded numbers. `reported`: modules to skip."""
    circular = (call for call in trace.calls if op_name(call) in ANGLES and not call.recomputed)
    off = (call for call in circular if call.off > _OFF and call.module not in reported)
    for at, calls in grouped(off, lambda call: call.rounded_at).items():
        first = max(calls, key=lambda call: call.off)
        how = f"pass {at} as an integer or in float32, and cast the sines and cosines"
        cause, keep = rounding_at(trace, at, how)
        yield finding_at(
            "warning",
            f"{first.op} gets an angle that is wrong by up to {first.off:.2g} radians, because a number was rounded to 16 bits",
            (first, *calls),
            cause=cause,
            fixes=(keep, advice(first.module, _BY_HAND)),
        )


# A sine changes its sign within pi. An error of half a radian stands for another timestep.
_OFF = 0.5
_BY_HAND = "compute positions, frequencies and their product in float32, then cast the sines and cosines"


def _is_rounded_product(call: Call, trace: Trace) -> bool:
    leaf = call.module.rpartition(".")[2]
    rotary = _MODULES.search(leaf) or _MODULES.search(trace.modules.get(call.module, ""))
    product = any(name in call.op for name in (".mm.", ".bmm.", ".matmul.", ".einsum."))
    rounded = bool(call.results) and call.results[0][0] in HALVES
    return bool(rotary) and product and rounded and call.phase == "forward"
