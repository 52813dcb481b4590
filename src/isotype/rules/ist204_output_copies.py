"""Whole outputs copied to float32

**What it means.** The step casts a large 16-bit result, such as the logits, to float32 as a whole. However, no operator uses the float32
copy, or the loss uses the copy only in small pieces.

**Why it is bad.** The logits are the largest activation of a language model. They have one value for each token and each entry of the
vocabulary. For 2 x 2,048 tokens and a vocabulary of 128,256, each float32 copy takes 2.1 GB.

**Why it happens.** `Accelerator.prepare` wraps the forward in `convert_outputs_to_fp32`, which casts every output. If the model computes
the loss, no operator uses the float32 copy of the logits. `unwrap_model(keep_fp32_wrapper=False)` also removes autocast. Megatron's
`Float16Module(fp32_output=True)` casts every output, although the loss uses the logits in chunks.

**An example that costs**

    logits = model(ids).logits.float()                   # all rows at once
    for rows, targets in zip(logits.split(1024), labels.split(1024)):
        loss = loss + F.cross_entropy(rows, targets)

**Repaired**

    logits = model(ids).logits
    for rows, targets in zip(logits.split(1024), labels.split(1024)):
        loss = loss + F.cross_entropy(rows.float(), targets)

**What is not reported.** The rule does not report a float32 copy that a loss uses as a whole, because softmax and loss need float32. If the
check did not trace the loss of a script, the rule does not report copies that this loss may use. The rule ignores copies below 1 % of the
step's peak memory, and reports copies below 5 % as a note.

**How safe is the fix?** The fix is safe, because softmax and loss still compute in float32. If no operator uses the copies, you remove the
cast, and the outputs stay in 16 bits.

**Seen in** huggingface/accelerate #3477, #3620; radixark/miles #2764.
"""

import math
from collections.abc import Sequence

from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.names import agree, format_bytes, grouped, short
from isotype.records.finding import Cost, Finding
from isotype.records.trace import FSDP_CASTS, Call, Trace
from isotype.rules.kit import costs
from isotype.rules.kit.findings import Findings, advice, finding_at
from isotype.rules.kit.groups import per_trace

_LEAST_SHARE, _WARNING_SHARE = 0.01, 0.05
_LOSSES = ("_log_softmax", "_softmax", "nll_loss", "logsumexp")


def find(trace: Trace) -> Findings:
    if trace.failure is not None or trace.setup.compute not in HALVES:
        return
    readers = _readers(trace)
    # A quantized layer returns its input's dtype, so the origin of the input's dtype counts.
    quantized = {weight.module for weight in trace.weights if weight.quantization is not None}
    copies: list[tuple[bool, costs.Cast]] = []
    for cast in costs.casts(trace):
        forward = cast.call.phase == "forward" and not cast.call.recomputed
        if cast.widens and forward and cast.call.module not in quantized:
            before, source = id(cast.operand.origin), cast.call.source
            reading = [call for m in {cast.call.module, ""} for call in readers.get((before, source, m), ())]
            if _in_pieces(cast, reading) if reading else not trace.partial:
                copies.append((not reading, cast))
    for (unread, _), group in grouped(copies, lambda copy: (copy[0], copy[1].call.source)).items():
        casts = [cast for _, cast in group]
        size = sum(cast.elements * cast.after.itemsize for cast in casts)
        if size >= _LEAST_SHARE * trace.memory.peak:
            yield _finding(trace, casts, size, unread)


@per_trace
def _readers(trace: Trace) -> dict[tuple[int, str, str], list[Call]]:
    """Return (id of the origin before a cast, line, module) -> the calls, except views, that read the cast's result."""
    readers: dict[tuple[int, str, str], list[Call]] = {}
    for call in trace.calls:
        if costs.is_view(call.op):
            continue
        for operand in call.operands:
            for step in operand.origin.path():
                # The casts of FSDP2 belong to no module.
                if (step.kind in ("cast", "autocast") or step.name in FSDP_CASTS) and step.before is not None:
                    readers.setdefault((id(step.before), step.source, step.module), []).append(call)
    return readers


def _in_pieces(cast: costs.Cast, reading: Sequence[Call]) -> bool:
    """Return True if several loss operators read the cast's result, and each of them reads only some of the rows."""
    whole = math.prod(cast.call.results[0][1])
    last = cast.call.results[0][1][-1:]
    forward = (c for c in reading if c.phase == "forward" and any(name in c.op for name in _LOSSES))
    read = (call.operands[0].shape for call in forward if call.operands)
    losses = [math.prod(shape) for shape in read if shape[-1:] == last]
    # One or two rows may be dropped before the loss, because labels are shifted.
    return len(losses) > 1 and max(losses) <= whole // 2


def _finding(trace: Trace, casts: Sequence[costs.Cast], size: int, unread: bool) -> Finding:
    first = casts[0]
    wide, narrow = dtype_name(first.after), dtype_name(first.before)
    what = "no operator uses the copies" if unread else "the loss uses the copies piece by piece"
    how = f"split the outputs first, and then cast each piece to {wide}"
    if unread:
        how = f"keep the outputs in {narrow}: remove the cast"
    if unread and "accelerate/utils/operations.py" in first.call.source:
        how = "with transformers' Trainer, set use_liger_kernel=True, which computes the loss without logits; with your own loop, unwrap the model with keep_fp32_wrapper=False, and call it under torch.autocast"
    where, peak = short(first.call.source), trace.memory.peak
    return finding_at(
        "warning" if size >= _WARNING_SHARE * peak else "note",
        f"{agree(len(casts), 'output', 'are')} copied to {wide} ({format_bytes(size)}): {what}",
        [cast.call for cast in casts],
        cause=f"a cast to {wide} at {where}",
        notes=(f"{100 * size / max(1, peak):.0f} % of the peak memory of the step",),
        fixes=(advice(where, how),),
        cost=Cost(cast_bytes=sum(cast.bytes for cast in casts), memory_bytes=size),
    )
