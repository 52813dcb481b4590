"""Experts chosen from 16-bit scores

**What it means.** A mixture-of-experts router multiplies hidden states and its weight in 16 bits. The scores that
choose the experts then have 8 (bfloat16) or 11 (float16) significant bits. A float32 softmax of the scores does not
restore the lost bits.

**Why it is bad.** Two scores that differ by less than the last of these bits become equal or change their order. A
token then goes to other experts than in float32. A token's experts can also change with the batch's padding or with the
kernel. The balance loss and the routing weights use the same rounded numbers.

**An example that costs**

    scores = F.linear(hidden, self.gate.weight)                          # bfloat16
    weights, chosen = scores.softmax(-1, dtype=torch.float32).topk(2)

**Repaired**

    scores = F.linear(hidden.float(), self.gate.weight.float())
    weights, chosen = scores.softmax(-1).topk(2)

**How safe is the fix?** Safe: a float32 router only adds digits, and its matmul is small (one score for each token and
expert). If a model was pretrained with a 16-bit router, as its reference code shows, a float32 router chooses other
experts for a few tokens.

**Seen in** pytorch/torchtitan #2389; NVIDIA-NeMo/Automodel #3650.
"""

from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.names import starred
from isotype.records.finding import Action, Finding, Fix
from isotype.records.trace import Call, Operand, Trace, Weight
from isotype.rules.kit.findings import Findings, actions, advice, finding_at
from isotype.rules.kit.routers import router_products
from isotype.rules.kit.words import evidence, place


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
    narrow = f"let the router choose in float32 and return {dtype_name(dtype)}"
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
