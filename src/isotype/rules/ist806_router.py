"""
**What it means.** A mixture-of-experts router multiplies in 16 bits, and chooses experts by scores with 8
(bfloat16) or 11 (float16) significant bits. A float32 softmax of the scores does not restore the lost bits.

**Why it is bad.** Scores that differ by less than a rounding step become equal or swap, so a token goes to
other experts than in float32. Its experts can also change with the padding of the batch or with the kernel.
The balance loss and the routing weights use the same rounded numbers.

**An example that costs**

    scores = F.linear(hidden, self.gate.weight)                          # bfloat16
    weights, chosen = scores.softmax(-1, dtype=torch.float32).topk(2)

**Repaired**

    scores = F.linear(hidden.float(), self.gate.weight.float())
    weights, chosen = scores.softmax(-1).topk(2)

**How safe is the fix?** A float32 router only adds digits, and its product is small (tokens by experts). If a
model was pretrained with a 16-bit router, a float32 router chooses other experts for a few tokens: compare
with the model's reference code.

**Seen in** pytorch/torchtitan #2389; NVIDIA-NeMo/Automodel #3650.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from isotype.core.dtypes import dtype_name
from isotype.core.names import starred
from isotype.records.finding import Action, Finding, Fix, finding_at
from isotype.records.trace import HALVES, Call, Operand, Trace, Weight
from isotype.rules.kit.words import actions, advice, evidence

TITLE = "Experts chosen from 16-bit scores"

_CHOICES = (
    "aten.topk.default",
    "aten.sort.default",
    "aten.sort.stable",
    "aten.max.dim",
    "aten.argmax.default",
)
_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.linear.default", "aten.matmul.default")


def find(trace: Trace) -> Iterator[Finding]:
    routers: dict[str, tuple[Call, Operand]] = {}
    products: list[tuple[Call, Operand]] = []
    for call in trace.calls:
        if call.phase != "forward" or call.recomputed or not call.operands or not call.results:
            continue
        if call.op in _PRODUCTS:
            products += [(call, operand) for operand in call.operands if _is_weight(trace.owners, operand)]
        elif call.op in _CHOICES and call.operands[0].dtype.is_floating_point:
            scores = _scores_of(call, products)
            if scores is not None and {scores[0].results[0][0], call.operands[0].dtype} & set(HALVES):
                routers.setdefault(starred(scores[1].origin.name), scores)
    for product, weight in routers.values():
        yield _finding(trace, trace.owners[weight.origin.name], product, weight)


def _is_weight(owners: Mapping[str, Weight], operand: Operand) -> bool:
    owner = owners.get(operand.origin.name)
    whole = owner is not None and math.prod(owner.shape) == math.prod(operand.shape)
    return whole and len(operand.shape) == 2


def _scores_of(choice: Call, products: list[tuple[Call, Operand]]) -> tuple[Call, Operand] | None:
    """Return (product, its weight) for the last product near `choice` that has one number per token and expert."""
    wanted = choice.operands[0].shape
    inside = (f"{choice.module}.", f"{choice.module.rpartition('.')[0]}.")
    for product, weight in reversed(products):
        near = product.module == choice.module or product.module.startswith(inside)
        shape = product.results[0][1]
        if near and wanted and shape[-1:] == wanted[-1:] and math.prod(shape) == math.prod(wanted):
            return product, weight
    return None


def _finding(trace: Trace, owner: Weight, product: Call, weight: Operand) -> Finding:
    dtype = product.results[0][0] if product.results[0][0] in HALVES else trace.setup.compute
    router = starred(owner.module)
    weights = {starred(w.name) for w in trace.weights if starred(w.module) == router and not w.buffer}
    wide = (*actions("parameter", sorted(weights), "float32"), Action("input", router, "float32"))
    back = Action("output", router, dtype_name(dtype))
    narrow = f"let the router choose in float32 and return {dtype_name(dtype)}"
    how = "cast the router's input and weight to float32 before they are multiplied, outside of autocast"
    return finding_at(
        "IST806",
        "note",
        f"experts are chosen from {dtype_name(dtype)} scores",
        product,
        cause=f"{owner.name} and its other operand are {dtype_name(dtype)}",
        evidence=evidence(weight.origin),
        fixes=(
            Fix("let the router take and return float32", "safe", actions=wide),
            Fix(narrow, "safe", actions=(*wide, back)),
            advice(product.source or product.module, how),
        ),
    )
