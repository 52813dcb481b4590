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
- Gradient checkpointing is enabled, but the model is in eval mode. `from_pretrained` returns models in eval mode. Layers of transformers
  use gradient checkpointing only in training mode.

**Why it is bad.** No error is raised, but a parameter that should be trained never changes, or a parameter that should be frozen changes.
The gradients of parameters without an optimizer cost memory and time. In eval mode, the backward keeps all activations, and dropout is off.

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
because `isotype check` does not see calls of `eval()`.

**How safe is the fix?** The fix is safe: you edit the code so that the setting has the effect that it describes. If more parameters are
trained, the step takes more memory. `model.train()` also enables dropout.

**Seen in** microsoft/nni #4521; zjunlp/HVPNeT #5; CSCYQJ/MICCAI23-ProtoContra-SFDA #18; udacity/deep-learning-v2-pytorch #12;
huggingface/diffusers #4733; huggingface/trl #6773, #6775; bghira/SimpleTuner #766; huggingface/diffusers #9850; huggingface/peft #1303.
"""

import math
from functools import partial

from isotype.core.names import EXPERT, distinct_names, grouped, listed, plural
from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, finding_of
from isotype.rules.kit.weight_sets import count, counted, is_frozen_base, names, trained
from isotype.rules.kit.words import and_others


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
