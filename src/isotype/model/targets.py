"""Chooses the layers for `all-linear`, and describes the weights that get no adapters.

`all-linear` leaves out routers. It also omits layers whose weight the model uses without calling the layer, because
adapters on these layers would have no effect. Examples are `F.linear(x, self.out_proj.weight)` and Mamba's fused scans.
All layers that the user names get adapters.
"""

import copy
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from isotype.compat.peft import all_linear, without_peft
from isotype.compat.torch import runs_without_gradients
from isotype.core.errors import UsageError
from isotype.core.names import (
    EXPERT,
    grouped,
    in_module,
    listed,
    names_one_of,
    plain_name,
    plural,
    with_parents,
)
from isotype.model.boundary import original_class, sharing
from isotype.model.experts.layer import DOWN, is_experts_wrapper, layout_of, outermost
from isotype.model.experts.stack import held_stack, quantized_stack, seen_dense
from isotype.model.modes import result_of
from isotype.model.parts import LANGUAGE, PARTS, Parts, unread_layers
from isotype.model.read_weights import layers_read
from isotype.model.walk import is_tuner_layer, kind_of, places, repeats_of

_ENDS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "Model": "FEATURE_EXTRACTION",
}
"""End of a transformers class's name -> PEFT's task type."""
TRAINED_WHOLE = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
"""PEFT's task type -> names of the modules that PEFT trains and saves with every adapter."""


def task_of(config: Any) -> str | None:
    task: str | None = getattr(config.task_type, "value", config.task_type)
    return task


def task_type_of(model: Any) -> str | None:
    """Return PEFT's task type for a model's class; None for a model without `input_ids` (speech, images)."""
    cls = type(model)
    takes = inspect.signature(cls.forward).parameters.keys()
    if not cls.__module__.startswith("transformers.") or not {"input_ids", "inputs_embeds"} <= takes:
        return None
    task = next((task for end, task in _ENDS.items() if cls.__name__.endswith(end)), None)
    if "labels" not in takes or task not in (None, "FEATURE_EXTRACTION"):
        return task
    if not hasattr(model, "prepare_inputs_for_generation"):
        return None
    return "SEQ_2_SEQ_LM" if "decoder_input_ids" in takes else "CAUSAL_LM"


def remember_drawn(model: Any, names: Collection[str]) -> None:
    """Store the names of parameters that no checkpoint file has in `model.drawn_parameters`. Adapters save them."""
    in_files = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name not in names}
    model.drawn_parameters = tuple(n for n, p in model.named_parameters() if id(p) not in in_files)


def save_drawn(model: Any, config: Any) -> tuple[str, ...]:
    """Add modules whose weights are in no checkpoint file to `modules_to_save`. Return a sentence on these modules.

    Raise UsageError if such a weight shares a module with other weights, or if adapters of this type cannot save modules.
    """
    drawn = getattr(model, "drawn_parameters", ())
    saved = list(getattr(config, "modules_to_save", None) or ())
    saved += TRAINED_WHOLE.get(task_of(config) or "", ())
    new, stuck = [], []
    for name in drawn:
        path = _module_of(model, name, set(drawn))
        if names_one_of(path, saved):
            continue
        if path and hasattr(config, "modules_to_save"):
            new.append(path)
            saved.append(path)
        else:
            stuck.append(name)
    if stuck:
        what = f"{listed(stuck)}: random values from the load, in no module that the adapter can save"
        expected = "weights that are in the checkpoint or in the adapter"
        fix = "model.save_pretrained(DIRECTORY) before add_lora, and load the model from DIRECTORY"
        raise UsageError.of("weights that are in no file would be lost", what, expected, fix)
    if not new:
        return ()
    config.modules_to_save = [*(config.modules_to_save or ()), *new]
    return (f"{listed(new)}: not in the checkpoint, so they are trained whole and saved with the adapter",)


def _module_of(model: Any, name: str, drawn: set[str]) -> str:
    """Return the name of the largest module that contains the parameter `name`, but no parameter outside of `drawn`; else ""."""
    path, best = name.rpartition(".")[0], ""
    while path:
        module = model.get_submodule(path)
        if any(f"{path}.{key}" not in drawn for key, _ in module.named_parameters()):
            break
        best = best if isinstance(module, (nn.ModuleList, nn.ModuleDict)) else path
        path = path.rpartition(".")[0]
    return best


_UNABLE = ("use_dora", "lora_bias", "init_lora_weights")
"""Settings with values that PEFT does not support for adapters on parameters (`ParamWrapper`)."""
_OF_WEIGHTS = ("orthogonal", "olora", "pissa")
"""Unsupported `init_lora_weights`: PEFT (0.21) reads the layer's `weight`, which stacked experts do not have."""


@dataclass(frozen=True)
class Targets:
    """The targets in the config of an adapter, and the reasons why other layers are not targets.

    Attributes:
        wide: True if the config's targets are `all-linear`.
        unable: settings of the config that PEFT does not support for stacked experts. It is empty if no target is stacked.
        reads: layer without an adapter -> the class that uses its weight without calling it.
        excluded: layer in a part of the model without adapters -> the reason.
    """

    wide: bool = False
    unable: tuple[str, ...] = ()
    reads: Mapping[str, str] = field(default_factory=dict)
    excluded: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Adapt:
    """The parts of a model that get adapters (names in `isotype.model.parts`), and the reasons why other parts get none."""

    parts: tuple[str, ...] = PARTS
    why: str = "adapt= does not name the part of the model that contains these layers"


def _is_unable(config: Any, name: str) -> bool:
    value = getattr(config, name, None)
    return str(value).startswith(_OF_WEIGHTS) if name == "init_lora_weights" else bool(value)


def choose_targets(model: Any, config: Any, adapt: Adapt | None = None) -> Targets:
    """Set a config's targets to the layers that get adapters. Raise UsageError if `adapt` excludes all layers."""
    if not getattr(config, "target_modules", None):
        return Targets()
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    base = without_peft(model)
    wide = str(config.target_modules).lower() == "all-linear"
    converted = copy.deepcopy(config)
    with seen_dense(base):
        convert_peft_config_for_transformers(converted, base, None)
        if wide:
            converted.target_parameters = _with_experts(base, converted.target_parameters)
    before, after = (set(getattr(c, "target_parameters", None) or ()) for c in (config, converted))
    experts = after - before
    unable = tuple(name for name in _UNABLE if experts and _is_unable(config, name))
    if unable:
        config.target_modules = converted.target_modules or config.target_modules
    elif experts:
        converted.target_parameters = {name for name in after if not wide or name != "gate.weight"}
        config.target_modules = converted.target_modules
        config.target_parameters = converted.target_parameters
        if not wide:  # PEFT doubles the rank for gate and up, which are one parameter
            config.rank_pattern, config.alpha_pattern = converted.rank_pattern, converted.alpha_pattern
    excluded = _excluded(base, adapt)
    if not wide:
        if adapt is not None:
            _narrow(base, config, excluded, adapt)
        return Targets(unable=unable, excluded=excluded)
    if adapt is not None and LANGUAGE not in adapt.parts:
        config.target_parameters = None
    whole = TRAINED_WHOLE.get(task_of(config) or "", ())  # PEFT does not wrap a layer twice
    linear, reads = all_linear(copy.deepcopy(config), base), layers_read(base)
    layers = {
        name
        for name in linear - reads.keys() - excluded.keys()
        if not any(f".{name}.".endswith(f".{module}.") for module in whole)
        and not _routes(base, name)
        and (isinstance(converted.target_modules, str) or check_target_module_exists(converted, name))
    }
    if not layers:
        raise _nothing_left(base, adapt)
    if layers != linear:
        config.target_modules = layers
    return Targets(True, unable, {name: cls for name, cls in reads.items() if name not in excluded}, excluded)


def _excluded(base: Any, adapt: Adapt | None) -> dict[str, str]:
    """Return layer name -> reason, for layers in parts without adapters and layers that a loss cannot train."""
    parts, chosen = Parts(base), adapt or Adapt()
    untrained = dict((*unread_layers(base), *_without_gradients(base), *_of_other_shape(base)))
    if not parts.towers and LANGUAGE not in chosen.parts:
        raise _nothing_left(base, adapt)
    excluded = {}
    for place in places(base) if parts.towers or untrained else ():
        name = plain_name(place.name)
        reasons = (why for block, why in untrained.items() if in_module(name, block))
        if parts.towers and parts.of(name) not in chosen.parts:
            excluded[name] = chosen.why
        elif reason := next(reasons, ""):
            excluded[name] = reason
    return excluded


def _without_gradients(base: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of each module whose forward turns its layers' gradients off, such as an attention indexer."""
    for name, module in base.named_modules():
        if module._modules and runs_without_gradients(type(module).forward):
            yield name, f"{type(module).__name__} runs without gradients, so an adapter would not be trained"


def _of_other_shape(base: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of each linear layer with a forward for other shapes, such as a grouped layer."""
    for name, module in base.named_modules():
        cls = original_class(module)
        if (
            kind_of(module) != "linear"
            or not isinstance(module, nn.Linear)
            or cls.forward is nn.Linear.forward
        ):
            continue
        if module.weight.itemsize == 1 or _routes(base, name):  # float8 kernels do not run on meta
            continue
        weights = {key: p.to("meta", torch.float32) for key, p in module.named_parameters(recurse=False)}
        x = torch.empty(1, module.in_features, dtype=torch.float32, device="meta")
        result = result_of(partial(cls.forward, sharing(module, weights)), x)
        if getattr(result, "shape", None) != (1, module.out_features):
            yield name, f"{cls.__name__} has other shapes than a linear layer, so PEFT's forward would fail"


def _narrow(base: Any, config: Any, excluded: Mapping[str, str], adapt: Adapt) -> None:
    from peft.tuners.tuners_utils import check_target_module_exists

    named = {plain_name(place.name) for place in places(base) if not place.tuner}
    named = {name for name in named if check_target_module_exists(config, name)}
    if named & excluded.keys():
        config.target_modules = named - excluded.keys()
    if LANGUAGE not in adapt.parts:
        config.target_parameters = None
    if named and not config.target_modules:
        raise _nothing_left(base, adapt)


def _nothing_left(base: Any, adapt: Adapt | None) -> UsageError:
    chosen, parts = (adapt or Adapt()).parts, Parts(base)
    has = listed(sorted({parts.of(name) for name, _ in base.named_parameters()}))
    expected, fix = f"one of the model's parts ({has}) with targets", "name another part, or omit adapt"
    return UsageError.of("nothing to adapt", f"adapters on {listed(chosen)} alone", expected, fix)


def train_parts(model: Any, adapt: Adapt | None) -> Any:
    """Freeze the weights outside of `adapt`'s parts. Return the model. Raise UsageError if no weight is left."""
    if adapt is None:
        return model
    parts, chosen = Parts(model), adapt.parts
    weights = [(parts.of(name), parameter) for name, parameter in model.named_parameters()]
    if not {part for part, _ in weights} & set(chosen):
        what, fix = f"--adapt {','.join(chosen)}", "name a part of the model, or leave --adapt out"
        raise UsageError.of("no weights to train", what, listed(sorted({part for part, _ in weights})), fix)
    for part, parameter in weights:
        if part not in chosen:
            parameter.requires_grad_(False)
    return model


def _with_experts(base: Any, names: Iterable[str] | None) -> set[str]:
    """Return `names` and the names of all expert weights that can have adapters."""
    targets = set(names or ())
    for path, module in outermost(base):
        layout = layout_of(module)
        for name in () if layout is None else (layout.up, DOWN):
            full = f"{path}.{name}"
            if not any(f".{full}".endswith(f".{target}") for target in targets):
                targets.add(f"{path.rpartition('.')[2]}.{name}")
    return targets


@dataclass(frozen=True)
class _Weight:
    kind: str
    name: str
    size: int
    count: int
    adapted: bool
    reader: str | None


ADAPTED = "adapters are on "
"""First words of the note in `adapter_notes` that names the weights with adapters."""
_LINEAR, _STACKED, _ROUTER = "linear layer", "stacked expert weight", "router"


def what_is_adapted(model: Any, targets: Targets, config: Any) -> tuple[str, ...]:
    """Return sentences on weights with and without adapters. There are no sentences if every named weight has an adapter."""
    weights = list(_weights(model, targets)) if targets.wide or targets.unable else []
    total = sum(weight.size * weight.count for weight in weights)
    without = [w for w in weights if not w.adapted and (targets.wide or w.kind == _STACKED)]
    reasons = grouped(without, lambda weight: (weight.kind, _reason(weight, targets, config)))
    size = _size_on_experts(model) if targets.wide else ()
    if not reasons:
        return size
    adapted = grouped([w for w in weights if w.adapted], lambda weight: weight.kind)
    on = [_counted(adapted[kind], total) for kind in (_LINEAR, _STACKED, _ROUTER) if kind in adapted]
    off = [f"{_counted(rows, total)}: {reason}" for (_, reason), rows in reasons.items()]
    return (f"{ADAPTED}{' and '.join(on) or 'nothing'}; not on {'; not on '.join(off)}", *size)


def _size_on_experts(model: Any) -> tuple[str, ...]:
    """Return a sentence on the size of experts' adapters. These adapters often have more values than all others."""
    values, experts, layers, base = 0, 0, 0, model.get_base_model()
    ranks: set[int] = set()
    repeats = repeats_of(base)
    for place in places(base):
        wrapper: Any = place.module
        if not is_experts_wrapper(wrapper):
            continue
        names, times = wrapper.active_adapters, repeats[place.name]
        parts = (part[name].weight for part in (wrapper.lora_A, wrapper.lora_B) for name in names)
        values += sum(part.numel() for part in parts) * times
        layers += times if wrapper.base_layer is wrapper.get_base_layer() else 0
        experts, ranks = wrapper.num_experts, ranks | {wrapper.r[name] for name in names}
    if not values:
        return ()
    rank = f"rank {' or '.join(map(str, sorted(ranks)))}"
    in_layers = f"for each of {experts} experts in {plural(layers, 'layer')}"
    return (f"adapters of experts hold {values:,} values: {rank} {in_layers}",)


def _reason(weight: _Weight, targets: Targets, config: Any) -> str:
    if weight.reader is not None:
        return f"{weight.reader} reads the weights of these layers without calling the layers, so an adapter would have no effect"
    if weight.kind == _ROUTER and weight.name not in targets.excluded:
        return "routers get adapters only if the targets name them"
    if weight.name in targets.excluded:
        return targets.excluded[weight.name]
    if weight.kind == _LINEAR:
        return "PEFT would adapt them as experts, because of their names"
    if targets.unable:
        settings = " and ".join(f"{name} {getattr(config, name)}" for name in targets.unable)
        return f"PEFT cannot adapt them with {settings}"
    return "they are parameters, not linear layers, so name them in target_parameters"


def _counted(weights: list[_Weight], total: int) -> str:
    size = sum(weight.size * weight.count for weight in weights)
    names = ", ".join(sorted({weight.name.rpartition(".")[2] for weight in weights}))
    noun = plural(sum(weight.count for weight in weights), weights[0].kind)
    share = 100 * size / total
    return f"{noun} ({names}: {share:.{2 if share < 99 else 4}g} % of all values)"


def _weights(model: Any, targets: Targets) -> Iterator[_Weight]:
    """Yield the weights of linear layers, routers and experts. The head, and modules that PEFT has copied, are omitted."""
    base, adapted = model.get_base_model(), set()
    repeats = repeats_of(base)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    for place in places(base):
        module: Any = place.module
        name = plain_name(place.name)
        if is_tuner_layer(module):
            adapted.add((id(module.get_base_layer()), getattr(module, "parameter_name", "weight")))
            continue
        if place.adapter or module is head or ".original_module" in place.name:
            continue
        for key in getattr(module, "parametrizations", ()):
            if (stack := quantized_stack(module, key)) is not None:
                size, has_adapter = stack.shape.numel(), (id(module), key) in adapted
                yield _Weight(_STACKED, f"{name}.{key}", size, repeats[place.name], has_adapter, None)
        for key, value in module.named_parameters(recurse=False):
            kind = _kind(base, place.name, module, key, value)
            if kind is not None:
                state = getattr(value, "quant_state", None)
                size = value.numel() if state is None else state.shape.numel()
                full = name if key == "weight" else f"{name}.{key}"
                has_adapter, reader = (id(module), key) in adapted, targets.reads.get(name)
                yield _Weight(kind, full, size, repeats[place.name], has_adapter, reader)


def _kind(base: Any, name: str, module: Any, key: str, value: Any) -> str | None:
    if key == "weight" and value.ndim == 2 and _routes(base, name):
        return _ROUTER
    if key == "weight" and (isinstance(module, nn.Linear) or hasattr(module, "nx")):
        return _LINEAR
    cls = type(module).__name__
    experts = EXPERT.search(cls + name) and value.is_floating_point() and "bias" not in key
    layer = isinstance(module, (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d))
    stacked = value.ndim == 3 or (value.ndim == 2 and "expert" in cls.lower())
    return _STACKED if experts and stacked and not layer else None


def _routes(base: Any, name: str) -> bool:
    """Return True if a layer is a router, because of its name or its parent's name, or because it has an output for each expert."""
    around = [*map(base.get_submodule, with_parents(name))]
    experts = [m for m in around[1:4] if any("expert" in child.lower() for child, _ in m.named_children())]
    words = [type(module).__name__ for module in around] + name.split(".")
    if any("router" in word.lower() for word in words):
        return bool(experts) or any(map(EXPERT.search, words))
    return bool(experts) and getattr(around[0], "out_features", None) in _counts(experts[0])


def _counts(block: Any) -> set[int]:
    lists = [child for child in block.children() if isinstance(child, (nn.ModuleList, nn.ModuleDict))]
    stacked = (p for child in block.children() for p in child.parameters(recurse=False) if p.ndim == 3)
    quantized = (held_stack(part) for child in block.children() for part in child.modules())
    counts = {len(modules) for modules in lists if len(modules) > 1} | {p.shape[0] for p in stacked}
    return counts | {stack.shape[0] for stack in quantized if stack is not None}


def trained_heads(base: Any) -> tuple[str, ...]:
    """Return the linear layers that PEFT trains as a whole if an adapter has the task type of the model."""
    heads = TRAINED_WHOLE.get(task_type_of(base) or "", ())
    linear = (name for name, module in base.named_modules() if type(module) is nn.Linear)
    return tuple(name for name in linear if names_one_of(name, heads))


def refuse_quantized(model: Any, config: Any) -> None:
    """Raise UsageError if an adapter with this config trains a quantized layer as a whole."""
    whole = [*(getattr(config, "modules_to_save", None) or ()), *TRAINED_WHOLE.get(task_of(config) or "", ())]
    quantized = (place.name for place in places(model) if place.kind in ("linear4bit", "linear8bit"))
    if layers := [name for name in quantized if names_one_of(name, whole)]:
        what = f"{listed(layers)}: quantized, and trained whole (modules_to_save, or the head of the adapter's task)"
        expected = "a layer with float weights, because packed codes cannot be trained"
        fix = "load the model with isotype.load from float weights, and add an adapter to the layer, or omit the layer"
        raise UsageError.of("quantized layers cannot be trained whole", what, expected, fix)
