"""The step does not fit into the device's memory

**What it means.** In a step, an evaluation or a rollout, the peak memory of the tensors exceeds the available memory: 85 % of a GPU's
memory, or half of a CPU's memory. If the device is in this machine, the limit is the same share of its free memory. The remaining memory is
for fragmentation of the allocator, workspaces of kernels, and the context of the driver (0.3 to 0.6 GB).

**Why it is bad.** The run ends with an out-of-memory error, often only at the first long batch.

**What is counted.** A tensor and its views are counted once. The report groups the memory by kind: weights with their quantization states,
adapters, gradients, optimizer states, activations. The reported peak is the peak of a later step, in which optimizer states, gradients of
earlier micro-batches, and activations are in memory together. If a trainer has `compute_metrics`, the evaluation keeps the predictions of
all rows, and copies all of them after each batch.

**What helps, and by how much.** A fix is one saving that is enough, or a combination of several smaller savings. The report estimates each
saving independently of the others:

- Gradient checkpointing stores only the input of each layer. For a model of n layers, about `1/n` of the activations remains. The memory of
  the logits stays the same. In 16 traced steps, this estimate was too large by at most 5.7 % of the peak. Therefore the report says "may be
  enough" if less than 6 % of the peak would be free afterwards.
- A loss that is computed in chunks needs at most about 1/8 of the memory of all logits, their copies and their gradients.
- nf4 takes 0.5625 bytes per weight: half a byte for the code, and 4 bytes for the scale of each block of 64 weights.
- A cast of frozen float32 weights to 16 bits halves their memory. 8-bit optimizer states take about a quarter of the memory of float32
  states. The states of embeddings and of small parameters stay in float32.
- The memory of activations is proportional to the batch size, and to the length of the rows.
- With FSDP2 on N devices, each device stores 1/N of the layers' weights, gradients and optimizer states, and the activations of its batch.
  Each device also stores all weights outside of the layers, and up to three whole layers: the current layer, the buffer that gathers this
  layer, and the buffer of the next layer.

**An example**

    isotype check meta-llama/Llama-3.1-8B --device t4          # 16 GB of weights on 15 GB

**Repaired**

    isotype check meta-llama/Llama-3.1-8B --device t4 --quantization nf4 --gradient-checkpointing

**How safe is the fix?** Checkpointing, a loss in chunks and FSDP2 are safe, because they compute the same results. A smaller batch or
shorter rows change the training, but not the precision. nf4 is unsafe because it rounds the base weights. 8-bit optimizer states are unsafe
because they round the moments of the gradients. 16-bit storage is unsafe if the float32 values of the weights do not fit into 16 bits, or
are unknown.

**Seen in** huggingface/transformers #17089 and artidoro/qlora #261 (evaluations).
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch

from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.names import format_bytes, grouped, plural
from isotype.core.optimizers import state_bytes
from isotype.records.finding import Action, Cost, Finding, Fix
from isotype.records.memory import BETWEEN_STEPS, Phase
from isotype.records.request import Setup
from isotype.records.trace import Trace, Weight
from isotype.rules.ist806_router import router_products
from isotype.rules.kit import costs
from isotype.rules.kit.findings import Findings, Fixes
from isotype.rules.kit.weight_sets import count, is_frozen_base

KIND = "memory"

_NF4_BYTES = 0.5 + 4 / 64
_NUMBERS = re.compile(r"\.\d+\.")
_LARGEST, _HEAVIEST = 4, 2  # numbers of tensors and of weights in the notes
_IN_LAYER = re.compile(r".*?\.\d+(?=\.)")
_PREDICTIONS = "keep only what compute_metrics needs of an evaluated batch (preprocess_logits_for_metrics), or move its predictions to the CPU's memory (eval_accumulation_steps=1)"
_LOGITS = "compute the loss from the logits of a part of the tokens at a time (use_liger_kernel=True)"
_MOST_COPIES = 6  # maximum number of copies of the logits that a loss stores
_ERROR = {"gradient_checkpointing": 0.06}
"""Largest known error of an estimate, as a share of the peak memory."""
_SIZES: Mapping[Phase, tuple[str, str]] = {
    "evaluate": ("the evaluation's batch size", "per_device_eval_batch_size"),
    "rollout": ("the number of rows that are generated together", "generation_batch_size"),
}
_DEVICES = (2, 4, 8, 16, 32, 64)


class Saving(NamedTuple):
    """A change that saves memory, as an instruction and as a training argument with its value."""

    how: str
    bytes: int
    target: str
    value: str
    safe: bool = True


def find(trace: Trace) -> Findings:
    limit, peak, phase = trace.setup.limit, trace.memory.peak, trace.memory.peak_phase
    if limit.size is None or phase is None or limit.holds(peak):
        return
    over = peak - limit.size
    place = "evaluation" if phase == "evaluate" else phase
    kinds = sorted(trace.memory.phases[phase].items(), key=lambda item: -item[1])
    savings = sorted(_savings(trace), key=lambda saving: -saving.bytes)
    fixes = tuple(_fixes(trace, savings, over))
    small = "; ".join(f"{saving.how} (about {format_bytes(saving.bytes)} less)" for saving in savings)
    yield Finding(
        severity="error",
        message=f"the step does not fit: {format_bytes(peak)} at the peak of the {place}, more than {limit}",
        phase=phase,
        cause=f"{'optimizer states' if kinds[0][0] == 'optimizer' else kinds[0][0]} take {format_bytes(kinds[0][1])}",
        notes=(
            ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds if size >= peak / 100),
            *([f"not enough, even together: {small}"] if small and not fixes else []),
            *largest_tensors(trace),
        ),
        fixes=fixes,
        cost=Cost(memory_bytes=over),
    )


def largest_tensors(trace: Trace) -> Iterator[str]:
    """Yield a sentence about each of the largest tensors and weights. Equal tensors of several layers are described in one sentence."""
    numbers: Counter[tuple[str, str, torch.dtype, tuple[int, ...]]] = Counter()
    for call in trace.calls if trace.memory.peak_phase not in BETWEEN_STEPS else ():
        if call.recomputed or call.phase not in ("forward", "backward") or not costs.allocates(call.op):
            continue
        module, source = _NUMBERS.sub(".*.", call.module), "/".join(call.source.split("/")[-2:])
        for dtype, shape in call.results:
            numbers[module, source, dtype, shape] += call.repeats
    sizes = {key: key[2].itemsize * math.prod(key[3]) for key in numbers}
    for key in sorted(sizes, key=lambda key: -sizes[key])[:_LARGEST]:
        module, source, dtype, shape = key
        tensors = f"{plural(numbers[key], 'tensor')} of {format_bytes(sizes[key])}"
        yield f"the step allocates {tensors}: {dtype_name(dtype)} {list(shape)} in {module or 'the model'} at {source}"
    weights = grouped(trace.weights, lambda w: (_NUMBERS.sub(".*.", w.name), dtype_name(w.dtype), w.shape))
    heaviest = sorted(weights.items(), key=lambda item: -item[1][0].bytes)[:_HEAVIEST]
    for (name, stored, shape), equal in heaviest:
        yield f"{plural(count(equal), 'weight')} of {format_bytes(equal[0].bytes)}: {stored} {list(shape)} {name}"


def _fixes(trace: Trace, savings: Sequence[Saving], over: int) -> Fixes:
    """Yield a fix for each saving of at least `over` bytes, and one fix for several smaller savings that are enough together."""
    small = [saving for saving in savings if saving.bytes < over]
    sets = [parts for n in range(2, len(small) + 1) for parts in combinations(small, n)]
    sets = [parts for parts in sets if not {"quantization", "dtype"} <= {part.target for part in parts}]
    enough = [parts for parts in sets if sum(part.bytes for part in parts) >= over]
    enough.sort(key=lambda parts: (not all(part.safe for part in parts), len(parts)))
    for parts in (*((saving,) for saving in savings if saving not in small), *enough[:1]):
        saved, error = sum(part.bytes for part in parts), max(_ERROR.get(part.target, 0) for part in parts)
        may = "may be" if saved < over + trace.memory.peak * error else "is"
        less = f"{format_bytes(saved)} less{' together' * (len(parts) > 1)}, which {may} enough"
        how = f"{' and '.join(part.how for part in parts)}: about {less}"
        actions = tuple(Action("advice", part.target, part.value) for part in parts)
        yield Fix(how, "safe" if all(part.safe for part in parts) else "unsafe", actions=actions)


def _savings(trace: Trace) -> Iterator[Saving]:
    phase = trace.memory.peak_phase
    assert phase is not None
    peak = trace.memory.phases[phase]
    activations, predictions = peak.get("activations", 0), peak.get("predictions", 0)
    layers, of_layers = trace.memory.layers, trace.memory.saved.get(phase, 0)
    if predictions:
        yield Saving(_PREDICTIONS, predictions, "eval_accumulation_steps", "1")
    if layers > 1 and not any(call.recomputed for call in trace.calls):
        saved = of_layers - of_layers // layers - _layer_inputs(trace, layers)
        if saved > 0:
            yield Saving("checkpoint the layers' activations", saved, "gradient_checkpointing", "True")
    if _has_all_logits(trace, activations - of_layers):
        yield Saving(_LOGITS, (activations - of_layers) * 7 // 8, "logits", "in chunks")
    # lm_head stays dense, as in transformers' quantizers.
    linear = (w for w in trace.weights if is_frozen_base(w) and w.kind == "linear")
    dense = [w for w in linear if "lm_head" not in w.name]
    packed = int(sum((w.dtype.itemsize - _NF4_BYTES) * math.prod(w.shape) * w.repeats for w in dense))
    if packed:
        yield Saving("store the frozen linear layers in nf4", packed, "quantization", "nf4", False)
    narrowed = _narrowed(trace)
    halved = sum(weight.bytes * weight.repeats // 2 for weight in narrowed)
    if halved and trace.setup.profile.best_dtype() in HALVES:
        exact = all(weight.exact_in in HALVES for weight in narrowed)
        yield Saving("store the frozen weights in 16 bits", halved, "dtype", "auto", exact)
    trained = ((w.repeats, w.shape, w.kind == "embedding") for w in trace.weights if w.trainable)
    states = sum(times * state_bytes("adamw_8bit", shape, float32=kept) for times, shape, kept in trained)
    if (saved := peak.get("optimizer", 0) - states // _shards(trace.setup)) > 0:
        yield Saving("use an optimizer with 8-bit states", saved, "optim", "adamw_8bit", False)
    yield from _sharding(trace)
    over = trace.memory.peak - (trace.setup.limit.size or 0)
    if over < activations:
        share = 1 - over / activations
        size, setting = _SIZES.get(phase, ("batch size x length", "max_length"))
        yield Saving(f"reduce {size} to {100 * share:.0f} %", over, setting, f"{share:.2f} of it")


def _narrowed(trace: Trace) -> list[Weight]:
    """Return the frozen float32 weights that can be stored in 16 bits, without routers (which are in float32 on purpose)."""
    routers = {weight.origin.name for _, weight, _ in router_products(trace)}
    frozen = (w for w in trace.weights if not (w.buffer or w.trainable or w.pinned or w.quantization))
    return [w for w in frozen if w.dtype == torch.float32 and w.name not in routers]


def _sharding(trace: Trace) -> Iterator[Saving]:
    """Yield FSDP2's saving on each device, with the smallest number of devices on which the step fits."""
    setup = trace.setup
    phase = trace.memory.peak_phase
    if setup.profile.kind in ("cpu", "mps") or phase is None:
        return
    peak, before = trace.memory.phases[phase], _shards(setup)
    groups: Counter[str] = Counter()
    whole = 0
    for weight in trace.weights:
        if not weight.buffer:
            match = _IN_LAYER.match(weight.name)
            groups[match[0] if match else ""] += weight.bytes
            whole += weight.bytes * weight.repeats
    outside = groups.pop("", 0)
    sharded = whole + before * sum(peak.get(kind, 0) for kind in ("gradients", "optimizer"))
    # Quantization states are on every device, and so are activations.
    kinds = ("weights", "adapters", "activations", "predictions", "inputs", "buffers")
    stays = sum(size for kind, size in peak.items() if kind in kinds)
    stays += outside + 3 * max(groups.values(), default=0) - whole // before
    for devices in _DEVICES:
        share = stays + sharded // devices
        if devices > before and setup.limit.holds(share):
            advice = f"shard the model over {devices} devices (isotype check: --fsdp 2 --devices {devices}; training: --fsdp full_shard)"
            yield Saving(advice, trace.memory.peak - share, "devices", str(devices))
            return


def _shards(setup: Setup) -> int:
    return setup.devices if setup.fsdp else 1


def _lookup(trace: Trace) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Return dtype and shape of the first embedding's output; None if the step has no embedding."""
    return next((call.results[0] for call in trace.calls if "embedding" in call.op and call.results), None)


def _layer_inputs(trace: Trace, layers: int) -> int:
    dtype, shape = _lookup(trace) or (torch.float32, (0,))
    return layers * math.prod(shape) * dtype.itemsize


def _has_all_logits(trace: Trace, outside: int) -> bool:
    """Return True if the logits or losses of all tokens take most of the activation memory outside of layers (`outside`)."""
    _, embedded = _lookup(trace) or (None, ())
    embeddings = (w for w in trace.weights if w.kind == "embedding" and not w.buffer)
    vocabularies = {weight.shape[0] for weight in embeddings}
    results = (result for call in trace.calls if costs.allocates(call.op) for result in call.results)
    logits = ((dtype, shape) for dtype, shape in results if shape and shape[-1] in vocabularies)
    of_all = (x for x in logits if math.prod(x[1][:-1]) * 2 >= math.prod(embedded[:-1]))
    largest = max((math.prod(shape) * dtype.itemsize for dtype, shape in of_all), default=0)
    return largest > max(outside // _MOST_COPIES, trace.memory.peak // 20)
