"""Training settings that have no effect

**What it means.** A setting of the training has no effect, or another effect than its author expects. There are these cases:

- A trainable parameter has a gradient, but no optimizer updates this parameter. The same happens in a second `trainer.train()` after the
  model has changed, because it uses the optimizer of the first.
- Code sets `requires_grad` on a module, or misspells the attribute. The value is then a plain Python attribute that torch never reads.
- Code gives a config a misspelled argument. Quantization configs and model configs of transformers accept any argument, and the intended
  argument keeps its default.
- Some of the names in PEFT's `target_modules` or `modules_to_save` match no module.
- Linear layers have adapters, but stacked experts (one parameter for all experts) do not. PEFT's `all-linear` adapts the experts of
  Qwen3-MoE, but not the experts of gpt-oss. The rule reports experts without adapters only as a note, because this may be intended.
- The outputs of an embedding require gradients (`enable_input_require_grads()`), but the layers above it have no trained weight: a frozen
  vision tower, or the layers below the first one with an adapter. The backward then runs through these layers without effect.
- Gradient checkpointing is enabled, but the model is in eval mode. `from_pretrained` returns models in eval mode. Layers of transformers
  use gradient checkpointing only in training mode.

**Why it is bad.** No error is raised, but a parameter that should be trained never changes, or a parameter that should be frozen changes.
The gradients of parameters without an optimizer cost memory and time, and so does a backward through frozen layers. In eval mode, the
backward keeps all activations, and dropout is off.

**An example that costs**

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.fc = nn.Linear(512, 10)                            # the optimizer still holds the old layer
    model.encoder.requires_grad = False                      # freezes nothing

**Repaired**

    model.fc = nn.Linear(512, 10)
    model.encoder.requires_grad_(False)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)

**What is not reported.** The rule ignores parameters that have a master copy which an optimizer updates. `isotype check` knows only the
optimizer of a trainer (`trainer.optimizer`) and the argument `optimizer=`. Only `isotype run` reports gradient checkpointing in eval mode,
because `isotype check` does not see calls of `eval()`. A backward without effect is reported from 1 % of the step's FLOPs.

**How safe is the fix?** The fix is safe: you edit the code so that the setting has the effect that it describes. If more parameters are
trained, the step takes more memory. `model.train()` also enables dropout.

**Seen in** microsoft/nni #4521; zjunlp/HVPNeT #5; CSCYQJ/MICCAI23-ProtoContra-SFDA #18; udacity/deep-learning-v2-pytorch #12;
huggingface/diffusers #4733; huggingface/trl #6773, #6775; bghira/SimpleTuner #766; huggingface/diffusers #9850; huggingface/peft #1303;
modelscope/ms-swift #10214.
"""

import math
import re
from functools import partial

from isotype.core.names import EXPERT, distinct_names, grouped, in_module, listed, plural, short, with_parents
from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit import costs
from isotype.rules.kit.findings import Findings, advice, finding_at, finding_of
from isotype.rules.kit.weight_sets import count, counted, is_frozen_base, names, trained
from isotype.rules.kit.words import and_others

_LAYER = re.compile(r".*?\.\d+(?=\.|$)")


def find(trace: Trace) -> Findings:
    warning = partial(Finding, "warning")
    how = "create the optimizer with all parameters to train, after the last change of the model; freeze the others (requires_grad_(False)) to save memory"
    if trace.idle_step:
        number, line = trace.idle_step
        cause = f"none of the optimizer's {plural(number, 'parameter')} has a gradient anymore: other parameters are trained now, as after set_adapter(), or the model was replaced"
        message = "the optimizer's steps change nothing"
        fixes = (advice("optimizer", how),)
        yield warning(message, phase="optimizer", source=line, cause=cause, fixes=fixes)
    if trace.unheld:
        weights = [trace.owners[name] for name in trace.unheld]
        old = f"{trace.setup.optimizer} holds {plural(trace.orphans, 'parameter')} of modules that did not run with gradients: the modules were copied or replaced later, belong to another model, or ran in torch.no_grad()"
        message = f"no optimizer updates {count(weights)} of {count(trained(trace))} trainable parameters"
        cause = old if trace.orphans else f"no optimizer holds {and_others(names(weights))}"
        yield warning(message, phase="optimizer", cause=cause, fixes=(advice("optimizer", how),))
    wrong = [weight for weight in trace.weights if weight.set_on and weight.set_on[1] != weight.trainable]
    for (attribute, value), weights in grouped(wrong, lambda weight: weight.set_on or ("", False)).items():
        how = f"call requires_grad_({value}), or set `requires_grad` of each parameter"
        yield warning(
            f"{attribute} = {value} has no effect: {counted(weights, 'parameter', 'stay')} {'frozen' if value else 'trainable'}",
            module=weights[0].module,
            cause=f"{attribute} is a plain Python attribute, which torch never reads",
            fixes=(advice(attribute, how),),
        )
    for config, argument, meant, line in trace.misspelt:
        yield warning(
            f"{argument}, an argument of {config}, has no effect",
            source=line,
            cause=f"{config} has no argument of this name and raises no error; {meant} keeps its default",
            fixes=(advice(argument, f"replace {argument} by {meant}"),),
        )
    if trace.unmatched:
        yield warning(
            f"names of modules that the adapter should train match no module: {', '.join(trace.unmatched)}",
            cause="PEFT raises no error for a name that matches no module, if another name in target_modules or modules_to_save matches",
            fixes=(advice("target_modules", "use names from model.named_modules()"),),
        )
    if trace.idle_checkpoints:
        yield warning(
            "gradient checkpointing has no effect: the model is in eval mode",
            cause=f"{listed(trace.idle_checkpoints, 1)}: gradient_checkpointing is True, but training is False",
            fixes=(advice("train", "call model.train() before the first step, which also enables dropout"),),
        )
    yield from _backward_of_frozen(trace)
    stacks = [w for w in trace.weights if len(w.shape) == 3 and EXPERT.search(w.name) and is_frozen_base(w)]
    frozen = [weight for weight in stacks if ".base_layer." not in weight.name]
    if frozen and any(weight.adapter for weight in trace.weights):
        values = sum(math.prod(weight.shape) * weight.repeats for weight in frozen)
        targets = ", ".join(distinct_names(".".join(weight.name.split(".")[-2:]) for weight in frozen))
        how = f"add these names to LoraConfig.target_parameters: {targets}"
        yield finding_of(
            "note",
            f"{counted(frozen, 'stacked expert weight', 'have')} no adapter: {values:,} values stay frozen",
            frozen,
            cause="stacked experts are parameters, not linear layers",
            fixes=(advice("target_parameters", how),),
        )


def _backward_of_frozen(trace: Trace) -> Findings:
    """Yield a finding about a backward below all trained weights, which runs because code makes activations require gradients."""
    required = [call for call in trace.calls if call.op == "torch.Tensor.requires_grad_"]
    trainable = {(name, weight.shape): weight for name, weight in trace.owners.items() if weight.trainable}
    forward, backward = ([c for c in trace.calls if c.phase == phase] for phase in ("forward", "backward"))
    uses = (c for c in forward if any((o.origin.name, o.shape) in trainable for o in c.operands))
    used = {call.module for call in uses} | {weight.module for weight in trainable.values()}
    last = max((number for number, call in enumerate(backward) if call.module in used), default=None)
    if not required or last is None:
        return
    layers = set(map(_layer, used))
    idle = [call for call in backward[last + 1 :] if call.flops and _layer(call.module) not in layers]
    share = costs.flops_share(trace, idle)
    if share >= 0.01:
        parents = set(with_parents(idle[-1].module))
        start = max(required, key=lambda call: len(parents.intersection(with_parents(call.module))))
        part = max(set.intersection(*(set(with_parents(call.module)) for call in (start, *idle))), key=len)
        how = f"run the frozen part without gradients: {part}.forward = torch.no_grad()({part}.forward)"
        if any(in_module(module, part) for module in used):
            how = "do not call enable_input_require_grads(), which gradient checkpointing with use_reentrant=False does not need"
        yield finding_at(
            "warning",
            f"{100 * share:.0f} % of the FLOPs are a backward through frozen layers, which trains nothing",
            idle,
            cause=f"the output of {start.module} is made to require a gradient at {short(start.source)}, but no weight is trained before {idle[0].module}",
            notes=("the activations of these layers also stay in memory for the backward",),
            fixes=(advice("requires_grad", how),),
        )


def _layer(module: str) -> str:
    """Return the outermost layer (`model.layers.0`) with a module. Without a layer, return the module around it."""
    return match[0] if (match := _LAYER.match(module)) else module.rpartition(".")[0]
