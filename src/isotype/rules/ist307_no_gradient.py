"""Trainable parameters that get no gradient

**What it means.** Trainable parameters get no gradient in the backward. Either the forward uses them with gradients off, or the loss does
not depend on them, or code removes their gradients. The rule also reports a step in which all parameters of an adapter are frozen.

**Why it is bad.** If no parameter has a gradient, `backward` raises `element 0 of tensors does not require grad and does not have a
grad_fn`. A GradScaler raises `No inf checks were recorded for this optimizer` in the same case. If only some parameters have a gradient,
there is no error, but the parameters without a gradient never change.

**Why it happens.** The cause is one of these:

- Reentrant gradient checkpointing (`use_reentrant=True`, or DeepSpeed's) computes gradients only if an input of the checkpointed layer
  requires a gradient. The output of a frozen embedding requires no gradient.
- `PeftModel.from_pretrained` loads an adapter for inference by default. `prepare_model_for_kbit_training` freezes an adapter if it runs
  after `get_peft_model`. `enable_input_require_grads` hides the error, but does not make an adapter trainable.
- Code freezes parameters between the forward and the backward, as PEFT's `set_adapter` freezes all other adapters.
- Code detaches the loss or a result inside of the model, or runs a vision tower under `torch.no_grad()`.
- Code detaches one term of the loss or reads it with `item()`, so that only the other terms train (reported only by `isotype run`).
- The loss has several elements, such as one for each token (`reduction="none"`), so `backward` raises `grad can be implicitly created only
  for scalar outputs`.
- `zero_grad()` runs between the backward and the optimizer's step (reported only by `isotype run`).

**An example that fails**

    model = get_peft_model(base, config)                       # the embedding is frozen
    hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=True)
    loss.backward()                                            # RuntimeError: element 0 of tensors does not require grad

**Repaired**

    model.enable_input_require_grads()                         # or use_reentrant=False
    PeftModel.from_pretrained(base, path, is_trainable=True)   # to continue training an adapter

**What is not reported.** The rule does not report parameters that the step does not use, such as experts that get no tokens. Parameters of
the base model that do not affect the loss are reported only if a line of your code detaches values that depend on them. The rule reports
adapters that do not affect the loss, such as those in the pooling head of a vision tower, only as a note. If code removes the gradients of
only some parameters, the rule reports nothing.

**How safe is the fix?** All fixes are safe: they change no stored weight and no value of the forward. `isotype.repair` can make hidden
states require gradients, and can unfreeze an adapter. You apply the other fixes in your code, such as `loss.mean()`, or a loss without
`detach()`.

**Seen in** ostris/ai-toolkit #1054; huggingface/peft #2826; huggingface/transformers #32084; lm-sys/FastChat #581; microsoft/LoRA #120;
cloneofsimo/lora #26, #263; dropbox/hqq #41; locuslab/open-unlearning #178; brian6091/Dreambooth #23; LlamaChinese/Llama-Chinese #242;
unslothai/unsloth #5039; sacmehta/EdgeNets #14; guopengf/FL-MRCM #10; bboylyg/NAD #8; thuml/predrnn-pytorch #11; somuchtome/SimAC #3;
SheldonTsui/GOF_NeurIPS2021 #2.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from isotype.core.names import grouped, plural, short
from isotype.records.finding import Finding, Fix
from isotype.records.reach import Unreached
from isotype.records.trace import GRADIENTLESS, NOT_SCALAR, Call, Trace, Weight
from isotype.rules.kit.findings import Findings, advice, finding_at, finding_of, fix
from isotype.rules.kit.groups import Claim
from isotype.rules.kit.weight_sets import count, counted, layer_of, names, quantized, trained, unseen_towers
from isotype.rules.kit.words import and_others, at, device_error

_READS = ("aten._local_scalar_dense.default", "aten.argmax.default")
CLAIMS = (Claim("step", lambda broken: broken.call.op in GRADIENTLESS),)


def find(trace: Trace) -> Findings:
    for cut, added in trace.lost_terms:
        how = f"remove detach(), .data, item() or torch.tensor() at {short(cut)}"
        message = "a term of the loss has no gradient: it changes the value of the loss, but trains nothing"
        cause = f"the term's value is detached at {short(cut)}, and added to the loss at {short(added)}"
        yield Finding("warning", message, source=added, cause=cause, fixes=(advice(cut, how),))
    refused = next((call for call in trace.breaches() if call.op in GRADIENTLESS), None)
    if refused is not None and refused.refusal == NOT_SCALAR:
        yield _not_scalar(refused)
        return
    if (refused is None and trace.reached is None) or any(call.cuts for call in trace.calls):
        return  # IST407 reports repacked weights, which pass no gradient
    frozen = grouped((part for part in trace.unreached if part.frozen), lambda part: part.frozen)
    for line, parts in frozen.items():
        yield _frozen(trace, refused, [trace.owners[part.weight] for part in parts], line)
    without = (part for part in trace.unreached if not (part.ignored or part.frozen))
    by_function = grouped(without, lambda part: part.function)
    for function, parts in by_function.items():
        weights = [trace.owners[part.weight] for part in parts]
        why = _in_function if function else _without_gradients
        yield _finding(trace, refused, weights, *why(trace, parts[0], _named(weights)))
    # A line that reads a value may only print it. It is the cause only if nothing else is trained.
    reads = {call.source for call in trace.calls if trace.reached and call.op in _READS}
    lost = [part for part in trace.unreached if part.cleared or (part.cut and part.cut not in reads)]
    for cut, parts in grouped(lost, lambda part: "" if part.cleared else part.cut).items():
        yield _lost(trace, refused, [trace.owners[part.weight] for part in parts], cut)
    ignored = [trace.owners[part.weight] for part in trace.unreached if part.ignored and part not in lost]
    left_out = _left_out(trace, ignored)
    unused = [weight for weight in ignored if weight.adapter and weight not in left_out]
    if left_out and refused is None:
        how = "let the recomputation use the same parameters as the forward, and disable no adapter before the backward ends (with use_reentrant=False, checkpointing raises an error for such a change)"
        cause = (
            f"the forward uses {_named(left_out)}, but the recomputation of gradient checkpointing does not"
        )
        yield _finding(trace, None, left_out, cause, (advice("use_reentrant", how),))
    if unused and refused is None and trace.reached:  # the pooling head of a vision tower
        how = "exclude these modules from target_modules (exclude_modules=…), because their adapters are never trained"
        cause = f"the loss does not depend on results that are computed with {_named(unused)}"
        finding = _finding(trace, None, unused, cause, (advice("exclude_modules", how),))
        yield replace(finding, severity="note")
    adapted = any(weight.adapter for weight in trace.weights)
    none = refused is not None or (trace.reached == 0 and (trained(trace) or adapted))
    if none and not (frozen or by_function or lost or trace.unheld):
        yield _none_reached(trace, refused)


def _not_scalar(refused: Call) -> Finding:
    shape = refused.operands[0].shape
    return finding_at(
        "error",
        f"the loss has {plural(math.prod(shape), 'element')}: backward raises",
        [refused],
        cause=f"the loss function returns a tensor of shape {list(shape)}",
        notes=device_error(refused.refusal),
        fixes=(advice("loss", "return a scalar, such as loss.mean()"),),
    )


def _named(weights: Iterable[Weight]) -> str:
    return and_others(weight.name for weight in weights)


def _finding(
    trace: Trace,
    refused: Call | None,
    weights: Sequence[Weight],
    cause: str,
    fixes: Iterable[Fix],
    what: str = "no gradient reaches",
) -> Finding:
    message = f"{what} {count(weights)} of {count(trained(trace))} trainable parameters"
    if refused is None:
        return finding_of("warning", message, weights, cause=cause, fixes=tuple(fixes))
    message = f"{message}: {refused.op.removeprefix('torch.autograd.')} raises"
    place = {"op": refused.op, "phase": refused.phase}
    notes = device_error(refused.refusal)
    return finding_of("error", message, weights, cause=cause, notes=notes, fixes=tuple(fixes), **place)


def _in_function(trace: Trace, first: Unreached, named: str) -> tuple[str, list[Fix]]:
    """Return (cause, fixes) for parameters that an `autograd.Function` uses, such as reentrant checkpointing."""
    cause = f"{first.function} runs {named}{at(first.source)} with gradients off, and no input of the function requires a gradient"
    embeddings = [name for name in first.behind if "Embedding" in trace.modules.get(name, "")]
    fixes = [
        fix(f"let the outputs of {name} require gradients", "differentiable", (name,), "True")
        for name in dict.fromkeys((*embeddings[-1:], *first.behind[-1:]))
    ]
    how = "checkpoint with use_reentrant=False, or call model.enable_input_require_grads()"
    return cause, [*fixes, advice(first.function, how, "use_reentrant=False")]


def _without_gradients(trace: Trace, first: Unreached, named: str) -> tuple[str, list[Fix]]:
    """Return (cause, fixes) for parameters that the forward uses under `torch.no_grad()`."""
    how = f"run {first.module or 'the trained part'} outside of torch.no_grad(){at(first.source)}, or freeze its parameters"
    return f"gradients are off where {named} is used{at(first.source)}", [advice(first.weight, how)]


def _lost(trace: Trace, refused: Call | None, weights: Sequence[Weight], cut: str) -> Finding:
    """Return a finding for weights without gradients. Either the line `cut` detaches values, or code removes the
    gradients (`cut` is "")."""
    if cut:
        whole = count(weights) == count(trained(trace))
        values = f"values that are computed with {_named(weights)} are detached"
        cause = f"{'the loss is computed from detached values' if whole else values} at {short(cut)}"
        how = f"compute the loss without detach(), .data, item() or argmax at {short(cut)}"
        return _finding(trace, refused, weights, cause, (advice(cut, how),))
    cause = "zero_grad() or `grad = None` runs between the backward and the optimizer's step"
    fixes = (advice("zero_grad", "call zero_grad() before the backward"),)
    return _finding(trace, refused, weights, cause, fixes, "the optimizer's step gets no gradient of")


def _frozen(trace: Trace, refused: Call | None, weights: Sequence[Weight], line: str) -> Finding:
    """Return a finding for weights that the forward uses, and that the code at `line` freezes before the backward."""
    cause = f"the code at {short(line)} sets requires_grad of {_named(weights)} to False after the forward has used them"
    how = f"set requires_grad to True again at {short(line)}, or freeze no weight before the backward ends"
    if any(weight.adapter for weight in weights):
        how += "; set_adapter() freezes all other adapters"
    finding = _finding(trace, refused, weights, cause, (advice(line, how),))
    get = counted(weights, "parameter", "get")
    return replace(finding, message=f"{get} no gradient: frozen before the backward")


def _left_out(trace: Trace, ignored: Iterable[Weight]) -> list[Weight]:
    """Return the parameters in `ignored` that the recomputation of their layer does not use."""
    recomputed = [call for call in trace.calls if call.recomputed]
    layers = {layer_of(call.module) for call in recomputed} - {""}
    used = {operand.origin.name for call in recomputed for operand in call.operands}
    inside = (weight for weight in ignored if layer_of(weight.name) in layers)
    left_out = (weight for weight in inside if used.isdisjoint((weight.name, *weight.tied)))
    return sorted(left_out, key=lambda weight: weight.name)


def _none_reached(trace: Trace, refused: Call | None) -> Finding:
    """Return a finding for a step in which no parameter gets a gradient."""
    lost = {part.weight for part in trace.unreached}  # another optimizer may train the other weights
    weights = [weight for weight in trained(trace) if not lost or weight.name in lost]
    if not weights:
        frozen = [weight for weight in trace.weights if weight.adapter and weight.dtype.is_floating_point]
        fixes = [
            fix("train the adapter", "trainable", names(frozen), "True"),
            advice("is_trainable", "PeftModel.from_pretrained(model, path, is_trainable=True)", "True"),
        ]
        if any(quantized(trace)):
            how = "call prepare_model_for_kbit_training before get_peft_model, because it freezes all parameters"
            fixes.append(advice("prepare_model_for_kbit_training", how))
        finding = _finding(trace, refused, frozen, "the adapter is frozen", fixes)
        why = "backward raises" if refused else "the step trains nothing"
        return replace(finding, message=f"no parameter is trainable: {why}")
    operands = (operand for call in trace.calls for operand in call.operands)
    used = {operand.origin.name for operand in operands if operand.origin.kind == "parameter"}
    if not any(used.intersection((weight.name, *weight.tied)) for weight in weights):
        named = _named(weights)
        how = "train modules that the forward uses, and enable the adapters (model.enable_adapter_layers())"
        if unseen_towers(trace):
            how = "train on rows with images or audio, or add adapters to the language model"
        return _finding(trace, refused, weights, f"the forward does not use {named}", (advice(named, how),))
    how = "compute the loss outside of torch.no_grad(), and without detach(), .data, tolist() or numpy()"
    cause = "the loss is computed from detached values"
    return _finding(trace, refused, weights, cause, (advice("loss", how),))
