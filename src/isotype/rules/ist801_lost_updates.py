"""Updates that are lost to rounding in 16-bit weights

**What it means.** Trainable parameters are 16-bit, and their updates are too small. If an update is less than half of the distance to the
next number of the dtype, the sum of value and update is rounded back to the value. Between 2^n and 2^(n+1), this distance is 2^(n-7) in
bfloat16 and 2^(n-10) in float16. An Adam update is about as large as the learning rate. An SGD update is the learning rate times the
gradient. To check SGD, the rule needs the gradients that `isotype.measure_ranges` measures.

**Why it is bad.** Most weights do not change. Large weights lose their updates first, especially the weights of norms, which are near one.
Updates by weight decay are lost even earlier, because they are smaller than the other updates. The loss falls a little and then stops,
without an error.

**What is not reported.** Optimizers that round stochastically, or add the rounding errors in a later step (Kahan summation), lose no
updates. But if such an optimizer multiplies bfloat16 tensors by a number above 0.998, the product is the tensor itself: this weight decay
has no effect, or this moving average never falls.

**An example that costs**

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    torch.optim.AdamW(model.parameters(), lr=1e-5)

**Repaired**

    model.float()                                            # the optimizer updates float32 weights
    with torch.autocast("cuda", torch.bfloat16): ...         # matmuls in bfloat16

**How safe is the fix?** The fix is safe: a cast to float32 keeps every value. Float32 parameters take more memory.

**Seen in** pytorch/ao #1124; tianweiy/CausVid #19; Nerogar/OneTrainer #996; verl-project/verl-omni #73; kyegomez/SingLoRA #6;
unslothai/unsloth-zoo #680; huggingface/trl #1644; pytorch/pytorch #191763; Lorenzo-Mazza/VersatIL #5.
"""

import math
import re
from collections.abc import Iterator

import torch

from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.names import base_name, grouped
from isotype.precision.ranges import ModuleRange
from isotype.records.finding import Action, Finding, Fix
from isotype.records.trace import Call, Trace, Weight
from isotype.rules.kit.findings import Findings, Fixes, advice, finding_of
from isotype.rules.kit.weight_sets import borders, casts, count, float32_masters, spacing, trained
from isotype.rules.kit.words import at, op_name

_DRAWS = re.compile(r"aten\.(randint|rand|rand_like|random_|bernoulli|uniform)[._]")
"""Operators by which an optimizer rounds stochastically: the updates of many steps are right on average."""
_SMALL = "each update is less than half of the distance to the next number of the dtype"


def find(trace: Trace) -> Findings:
    compensated = trace.compensated or any(c.phase == "optimizer" and _DRAWS.match(c.op) for c in trace.calls)
    if compensated or not (trace.unmoved or trained(trace, *HALVES)):
        yield from _lost_products(trace)
        return
    if trace.unmoved:
        if weights := [trace.owners[name] for name in trace.unmoved if name in trace.owners]:
            yield _unmoved(trace, weights)
        if "" in trace.unmoved:
            yield Finding(
                "warning",
                f"the step of {trace.setup.optimizer} does not change most values of its 16-bit copies of the weights",
                phase="optimizer",
                cause=f"the optimizer has 16-bit parameters that do not belong to the model: {_SMALL}",
                fixes=(advice("copies", "let the optimizer update float32 copies of the weights"),),
            )
        return
    if not trace.setup.learning_rate or "optimizer" not in trace.setup.phases:
        return
    low = trained(trace, *HALVES)
    sizes = {weight.name: _size(weight, trace) for weight in low}
    updates = {weight.name: _update(weight, trace) for weight in low}
    sized = [weight for weight in low if 0 < sizes[weight.name][0] < math.inf]
    lost = [w for w in sized if updates[w.name] < spacing(sizes[w.name][0], w.dtype) / 2]
    if not lost:
        return
    worst = max(lost, key=lambda weight: sizes[weight.name][0])
    rate = max(updates[weight.name] for weight in lost)
    size, source = sizes[worst.name]
    gap = f"two {dtype_name(worst.dtype)} numbers differ by at least {spacing(size, worst.dtype):.1e}"
    yield finding_of(
        "warning",
        f"updates of {rate:.2g} are lost in {count(lost)} of {count(trained(trace))} trainable parameters",
        lost,
        phase="optimizer",
        notes=(
            f"{worst.name}: {source} {size:.2g}, where {gap}",
            *(finding.message for finding in _lost_products(trace)),
        ),
        fixes=tuple(_fixes(trace, lost)),
    )


def _lost_products(trace: Trace) -> Findings:
    """Yield a finding for each factor near 1 whose product with a 16-bit tensor is the tensor, in the optimizer's step."""
    step = [call for call in trace.calls if call.phase == "optimizer"]
    factors = ((call, number, dtype) for call in step for number, dtype in _factors(call))
    lost = [row for row in factors if 0 < 1 - row[1] < torch.finfo(row[2]).eps / 4]
    others = {
        number for call in step for role, number in call.numbers if role in ("value", "weight", "alpha")
    }
    for (number, dtype), rows in grouped(lost, lambda row: row[1:]).items():
        call, name = rows[0][0], dtype_name(dtype)
        average = "_fused" in call.op or any(
            math.isclose(1 - number, other, rel_tol=1e-6) for other in others
        )
        effect, how = (
            "weight decay has no effect",
            "decay the float32 values that the optimizer computes with",
        )
        if average:
            effect = "a moving average of the optimizer never falls"
            how = "keep the optimizer's averages in float32, or average over fewer steps, such as beta2=0.95"
        yield Finding(
            "warning",
            f"{number:.6g} times a {name} number is the number itself: {effect}",
            op=call.op,
            phase="optimizer",
            source=call.source,
            cause=f"the step of {trace.setup.optimizer} multiplies {name} tensors by {number:.6g}{at(call.source)}",
            fixes=(advice("optimizer", how),),
        )


def _factors(call: Call) -> Iterator[tuple[float, torch.dtype]]:
    """Yield (number, dtype) for each number by which an optimizer's operator multiplies tensors of a 16-bit dtype."""
    averages = [operand.dtype for operand in call.operands if operand.role.startswith("exp_avg_sqs")]
    numbers, dtypes = dict(call.numbers), averages or [operand.dtype for operand in call.floats[:1]]
    if dtypes and dtypes[0] in HALVES:
        if averages:
            yield numbers.get("beta2", 0.0), dtypes[0]
        elif op_name(call).strip("_").removeprefix("foreach_") == "mul":
            yield from ((numbers[role], dtypes[0]) for role in ("other", "scalar") if role in numbers)


def _unmoved(trace: Trace, weights: list[Weight]) -> Finding:
    """Return a finding for parameters that a real optimizer step has not changed."""
    optimizer, fixes = trace.setup.optimizer, tuple(_fixes(trace, weights))
    cause = _SMALL
    if optimizer == "fused SGD" and trace.setup.profile.kind == "cpu":
        cause = "torch's fused SGD does not change 16-bit parameters on a CPU (pytorch/pytorch #191763)"
        fixes = (advice("fused", "create the optimizer with fused=False"),)
    number = f"{count(weights)} of {count(trained(trace))} trainable parameters"
    message = f"the step of {optimizer} changes no value of {number}, although their gradients are not zero"
    return finding_of("warning", message, weights, cause=cause, phase="optimizer", fixes=fixes)


def _update(weight: Weight, trace: Trace) -> float:
    """Return the largest change of a weight's values by the first optimizer step; infinity if it is unknown."""
    same = trace.setup.optimizer, trace.setup.learning_rate
    optimizer, rate = trace.setup.updates.get(weight.name, ("", 0.0) if trace.setup.updates else same)
    if not rate:  # no update is lost
        return math.inf
    if "adam" in optimizer.lower():
        return rate
    gradient = _measured(weight, trace).weight_gradient
    return rate * gradient if "sgd" in optimizer.lower() and gradient else math.inf


def _measured(weight: Weight, trace: Trace, module: str | None = None) -> ModuleRange:
    """Return the `ModuleRange` of `module` (default: the module of the weight), with zeros if nothing was measured."""
    name = base_name(weight.module if module is None else module)
    measured = {} if trace.setup.ranges is None else trace.setup.ranges.by_module
    return measured.get(name, ModuleRange(name, weight.kind, 0.0, 0.0))


def _size(weight: Weight, trace: Trace) -> tuple[float, str]:
    """Return the median magnitude of a weight's nonzero values (0 if unknown), and a phrase that says how the
    magnitude is known.

    Unknown values are estimated for matrices of the base model and for DoRA magnitudes. A DoRA magnitude is the norm of a
    row of the layer's weight (https://arxiv.org/abs/2402.09353, eq. 5). A row of `n` normally distributed values with the
    median magnitude m has the norm sqrt(n) m / 0.6745. If the median magnitude was not measured, the function assumes that
    the weight is untrained. The standard deviation of an untrained weight is 0.02 in transformers and 1 / sqrt(3 n) in
    torch. The function uses the smaller number.
    """
    if weight.median_magnitude is not None:
        return weight.median_magnitude, "values near"
    measured = _measured(weight, trace).median_weight
    if measured and not weight.adapter:
        return measured, "measured values near"
    if not weight.adapter and len(weight.shape) == 2:
        return 0.6745 * _spread(
            weight.shape[1]
        ), "not loaded; after initialization, half of its values are above"
    if "magnitude" not in weight.name:
        return 0.0, ""
    layer = weight.name.partition("magnitude")[0].rpartition(".")[0]
    of_layer = (w for w in trace.weights if w.name.startswith(f"{layer}.lora_") and len(w.shape) == 2)
    inputs = [w.shape[1] for w in of_layer if "lora_a" in w.name.lower()]
    if not inputs:
        return 0.0, ""
    base = _measured(weight, trace, layer).median_weight
    if base:
        return math.sqrt(inputs[0]) * base / 0.6745, "values (from the layer's measured weights) near"
    return math.sqrt(inputs[0]) * _spread(inputs[0]), "not loaded; after initialization, its values are near"


def _spread(inputs: int) -> float:
    """Return the standard deviation of an untrained matrix with `inputs` columns."""
    return min(0.02, 1 / math.sqrt(3 * inputs))


def _fixes(trace: Trace, lost: list[Weight]) -> Fixes:
    low, setup = trained(trace, *HALVES), trace.setup
    requested = setup.policy is not None and setup.policy.master in HALVES
    if requested or all(weight.kind == "norm" for weight in lost):
        raised, text = lost, "keep the norms' weights in float32 and their outputs in the compute dtype"
        if requested:
            raised, text = list(low), "train float32 weights, which take twice the memory"
        # A float32 model, and autocast, accept float32 norms. A 16-bit model needs casts of their outputs.
        inner = [w for w in raised if w.kind in ("norm", "embedding")] if setup.compute in HALVES else []
        request = (Action("setting", "master_dtype", "float32"),) * requested
        actions = (*casts(raised, torch.float32), *borders(inner, setup.compute), *request)
        yield Fix(text, "safe", actions=actions)
    if not requested:
        adapters = tuple(weight for weight in low if weight.adapter)
        yield from float32_masters(trace, adapters if all(weight.adapter for weight in lost) else low)
