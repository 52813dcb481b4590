"""Experts chosen from 16-bit scores

**What it means.** A mixture-of-experts router multiplies hidden states and its weight in 16 bits. The scores that choose the experts then
have only 8 (bfloat16) or 11 (float16) significant bits. A float32 softmax of the scores does not restore the lost bits.

**Why it is bad.** Two scores that differ by less than the last significant bit become equal or change their order. The router then sends a
token to other experts than in float32. A token's experts can also change with the batch's padding or with the kernel. The balance loss and
the routing weights use the same rounded numbers.

**An example that costs**

    scores = F.linear(hidden, self.gate.weight)                          # bfloat16
    weights, chosen = scores.softmax(-1, dtype=torch.float32).topk(2)

**Repaired**

    scores = F.linear(hidden.float(), self.gate.weight.float())
    weights, chosen = scores.softmax(-1).topk(2)

**How safe is the fix?** The fix is safe: a float32 router only adds digits, and its matmul is small (one score for each token and expert).
If a model was pretrained with a 16-bit router, as its reference code shows, a float32 router chooses other experts for a few tokens.

**Seen in** pytorch/torchtitan #2389; NVIDIA-NeMo/Automodel #3650.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.names import starred
from isotype.records.finding import Action, Finding, Fix
from isotype.records.trace import Call, Operand, Trace, Weight
from isotype.rules.kit.findings import Findings, actions, advice, finding_at
from isotype.rules.kit.words import evidence, place

_CHOICES = ("aten.topk.default", "aten.sort.default", "aten.sort.stable")
# In a model without experts, these also choose the predicted class of a head.
_MAXIMA = ("aten.max.dim", "aten.argmax.default")
_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.linear.default", "aten.matmul.default")


def find(trace: Trace) -> Findings:
    rounded: dict[str, tuple[Call, Operand]] = {}
    for product, weight, chosen in router_products(trace):
        if product.breach is None and {product.results[0][0], chosen} & set(HALVES):
            rounded.setdefault(starred(weight.origin.name), (product, weight))
    for product, weight in rounded.values():
        yield _finding(trace, trace.owners[weight.origin.name], product, weight)


def _finding(trace: Trace, owner: Weight, product: Call, weight: Operand) -> Finding:
    dtype = product.results[0][0]
    if dtype not in HALVES:
        how = "choose experts by the float32 scores, and then cast the scores of the chosen experts"
        return finding_at(
            "note",
            "experts are chosen from rounded scores",
            [product],
            cause=f"{owner.module or 'the router'} multiplies in float32, but its scores are rounded to 16 bits before experts are chosen",
            evidence=evidence(weight.origin),
            fixes=(advice(product.module, how),),
        )
    router = starred(owner.module)
    weights = {starred(w.name) for w in trace.weights if starred(w.module) == router and not w.buffer}
    wide = (*actions("parameter", sorted(weights), "float32"), Action("input", router, "float32"))
    back = Action("output", router, dtype_name(dtype))
    narrow = f"let the router choose the experts in float32 and return {dtype_name(dtype)}"
    how = "outside of autocast, cast the router's input and weight to float32 before the product"
    return finding_at(
        "note",
        f"experts are chosen from {dtype_name(dtype)} scores",
        [product],
        cause=f"{owner.name} and the router's input are {dtype_name(dtype)}",
        evidence=evidence(weight.origin),
        fixes=(
            Fix("let the router take and return float32", "safe", actions=wide),
            Fix(narrow, "safe", actions=(*wide, back)),
            advice(place(product), how),
        ),
    )


def router_products(trace: Trace) -> Iterator[tuple[Call, Operand, torch.dtype]]:
    """For each choice of experts in the forward, yield the router's product, its weight, and the dtype of the scores."""
    products: list[tuple[Call, Operand]] = []
    choices = (*_CHOICES, *_MAXIMA) if any("expert" in weight.name for weight in trace.weights) else _CHOICES
    for call in trace.calls:
        if call.phase != "forward" or call.recomputed or not call.operands or not call.results:
            continue
        if call.op in _PRODUCTS:
            weights = (_weight(trace.owners, operand) for operand in call.operands)
            products += [(call, weight) for weight in weights if weight is not None]
        elif call.op in choices and call.operands[0].dtype.is_floating_point:
            scores = _scores_of(call, products)
            if scores is not None:
                yield *scores, call.operands[0].dtype


def _weight(owners: Mapping[str, Weight], operand: Operand) -> Operand | None:
    """If `operand` is a matrix weight or a cast of a matrix weight, return `operand` with this weight as the origin; else None."""
    origin = next((step for step in operand.origin.path() if step.kind == "parameter"), operand.origin)
    owner = owners.get(origin.name)
    whole = owner is not None and not owner.buffer and math.prod(owner.shape) == math.prod(operand.shape)
    return replace(operand, origin=origin) if whole and len(operand.shape) == 2 else None


def _scores_of(choice: Call, products: list[tuple[Call, Operand]]) -> tuple[Call, Operand] | None:
    """Return (product, weight) of a router: the product computes a score for each token and expert.

    The call `choice` chooses experts by these scores. The product is the last one inside of the parent module of
    `choice`.
    """
    wanted = choice.operands[0].shape
    inside = (f"{choice.module}.", f"{choice.module.rpartition('.')[0]}.")
    for product, weight in reversed(products):
        near = product.module == choice.module or product.module.startswith(inside)
        shape = product.results[0][1]
        if near and wanted and shape[-1:] == wanted[-1:] and math.prod(shape) == math.prod(wanted):
            return product, weight
    return None
