"""Adds adapters to a model under a precision policy. PEFT creates the adapters, and the policy sets their dtypes."""

import json
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isotype.compat.hub import asking
from isotype.compat.peft import kind_of_adapter, without_peft
from isotype.compat.transformers import rename
from isotype.core.arguments import wrong_choice
from isotype.core.errors import PrecisionError, UsageError
from isotype.core.names import base_name, listed
from isotype.core.threads import undisturbed
from isotype.model.boundary import original_class
from isotype.model.enforce import enforce_model, policy_of
from isotype.model.experts.stack import seen_dense
from isotype.model.parts import ALL, PARTS, read_parts
from isotype.model.targets import (
    TRAINED_WHOLE,
    Adapt,
    choose_targets,
    refuse_quantized,
    save_drawn,
    task_of,
    task_type_of,
    what_is_adapted,
)
from isotype.model.walk import is_tuner_layer, places
from isotype.precision.policy import PrecisionPolicy


@undisturbed
def add_lora(
    model: Any,
    policy: PrecisionPolicy,
    config: Any = None,
    *,
    adapter_name: str = "default",
    adapt: str | Sequence[str] | Adapt | None = None,
    **lora_kwargs: Any,
) -> Any:
    """Add a LoRA adapter (DoRA: `use_dora=`, rsLoRA: `use_rslora=`) whose parameters have the policy's master dtype.

    The base weights are frozen and keep their dtypes. No weight is upcast. If the model already has adapters, the new
    adapter becomes the active adapter, unlike after PEFT's `add_adapter`. `model.set_adapter` activates another
    adapter. `save_pretrained` also saves the policy, in the folder of every adapter.

    Args:
        model: a model loaded with `isotype.load`, or any model that PEFT supports.
        config: a `peft.LoraConfig` or another PEFT config. The default is `LoraConfig(**lora_kwargs)` for all linear layers.
        adapt: parts of a multimodal model that get adapters: `"language"`, `"projector"`, `"vision"`, `"audio"`, several of
            these (`"language,projector"`, or a list), or `"all"`. By default, every part with target layers gets adapters.
        **lora_kwargs: fields of `peft.LoraConfig` (`r`, `lora_alpha`, `target_modules`, `bias`, …).

    Returns:
        The PEFT model. The attribute `adapter_notes` of the model (a tuple of sentences) names the weights that could
        not be adapted as requested. `add_lora` also warns with these sentences.

    Raises:
        UsageError: both `config` and `lora_kwargs` are set, or the model lacks a part in `adapt`.
        PrecisionError: the policy trains every weight, or the storage format of the policy is not the format of the model.
    """
    import peft

    if policy.trainable == "full":
        headline = "the policy trains every weight, so it has no adapters"
        fix = "resolve the policy with trainable='lora'"
        raise PrecisionError.of(headline, "trainable='full'", "trainable='lora'", fix)
    config = _config(model, config, lora_kwargs)
    remember_base(model, config)
    notes = (*getattr(model, "adapter_notes", ()), *save_drawn(model, config))
    refuse_quantized(model, config)
    targets = choose_targets(model, config, _adapt(adapt))
    rate = _take_dropout(config)
    with seen_dense(model):
        if isinstance(model, peft.PeftModel):
            model.add_adapter(adapter_name, config)
            model.set_adapter(adapter_name)
        else:
            model.requires_grad_(False)
            with warnings.catch_warnings():
                # PEFT 0.21 reads this attribute of transformers (5.23) by its former name (`PeftModel.__init__`).
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
                model = peft.get_peft_model(model, config, adapter_name=adapter_name)
    if rate:
        _set_dropout(model, adapter_name, rate)
    left_out = what_is_adapted(model, targets, config)
    model.adapter_notes = (*notes, *left_out)
    if left_out and (targets.unable or targets.reads):
        warnings.warn("; ".join(left_out), stacklevel=2)
    save_policy_too(model)
    problems = []
    if undefined := _magnitudes_again(model, adapter_name):
        rows = f"some weight rows of {listed(undefined, 2)} are zero: DoRA divides by their norm, so the outputs are NaN"
        problems.append(f"{rows}; adapt no such layers, or omit use_dora")
    if partial := _computed_in_part(model, adapter_name):
        what = f"PEFT computes {listed(partial, 2)} without the bias, or without a step after an embedding's lookup"
        problems.append(f"{what}: a merged model has other outputs; train the layer whole (modules_to_save)")
    for problem in problems:
        model.adapter_notes += (problem,)
        warnings.warn(problem, stacklevel=2)
    enforce_model(model, policy)
    return model


def _adapt(parts: str | Sequence[str] | Adapt | None) -> Adapt | None:
    if parts is None or isinstance(parts, Adapt):
        return parts
    try:
        return Adapt(read_parts(parts))
    except ValueError as error:
        problem = wrong_choice(f"adapt {error}", str(error), (*PARTS, ALL))
        raise UsageError("no such part of a model", [problem]) from error


def _take_dropout(config: Any) -> float:
    """If a config has target parameters, set its dropout to 0, because PEFT 0.21 requires this. Return the former dropout, or 0."""
    rate = getattr(config, "lora_dropout", 0)
    if not rate or not getattr(config, "target_parameters", None):
        return 0.0
    config.lora_dropout = 0.0
    return float(rate)


def _set_dropout(model: Any, adapter_name: str, rate: float) -> None:
    for layer in model.modules():
        if is_tuner_layer(layer) and adapter_name in getattr(layer, "lora_dropout", ()):
            layer.lora_dropout[adapter_name] = torch.nn.Dropout(rate).train(layer.training)


def remember_base(model: Any, config: Any) -> None:
    """Store the base model's absolute path, or the commit of the base model on the hub, in an adapter's config."""
    base = without_peft(model)
    name, settings = getattr(base, "name_or_path", None), getattr(base, "config", None)
    if not name or settings is None:
        return
    if Path(name).exists():
        base.name_or_path = str(Path(name).resolve())
        rename(settings, base.name_or_path)
    elif config.revision is None:
        config.revision = getattr(base, "loaded_commit", None)


@torch.no_grad()
def _magnitudes_again(model: Any, adapter_name: str) -> list[str]:
    """Recompute the initial magnitudes of DoRA's linear layers in float32. Return the layers with a magnitude of zero.

    PEFT 0.21 rounds the norms to the dtype of the base weight (`DoraLinearLayer.update_layer`), and they may overflow
    in this dtype.
    """
    undefined = []
    for place in places(model):
        layer: Any = place.module
        if not is_tuner_layer(layer) or adapter_name not in getattr(layer, "lora_magnitude_vector", ()):
            continue
        if adapter_name in layer.lora_A:  # PEFT keeps an embedding's adapters in other attributes
            magnitude = layer.lora_magnitude_vector[adapter_name]
            magnitude.update_layer(
                base_layer=layer.get_base_layer(),
                lora_A=layer.lora_A[adapter_name].weight.float(),
                lora_B=layer.lora_B[adapter_name].weight.float(),
                scaling=layer.scaling[adapter_name],
            )
            if not magnitude.weight.is_meta and bool((magnitude.weight == 0).any()):
                undefined.append(base_name(place.name))
    return undefined


def _computed_in_part(model: Any, adapter_name: str) -> list[str]:
    """Return the adapted embeddings and output layers whose forward PEFT (0.21) replaces by a lookup or a product.

    For trained tokens (`TrainableTokensLayer`), PEFT omits the bias of a tied output layer. Of an embedding's
    forward, PEFT runs only the lookup and `embed_scale`. LoRA on an embedding is added after the other steps, but is
    merged before them.
    """
    layers = []
    for place in places(model):
        layer: Any = place.module
        kinds = ("trainable_tokens_delta", "lora_embedding_A")
        if is_tuner_layer(layer) and any(adapter_name in getattr(layer, kind, ()) for kind in kinds):
            base = layer.get_base_layer()
            lookup = original_class(base).forward is nn.Embedding.forward or hasattr(base, "embed_scale")
            if not lookup and getattr(base, "bias", base) is not None:
                layers.append(base_name(place.name))
    return layers


def _config(model: Any, config: Any, lora_kwargs: dict[str, Any]) -> Any:
    if config is not None and lora_kwargs:
        settings = f"config=… and {', '.join(lora_kwargs)}"
        fix = "put them into the LoraConfig, or omit the config"
        raise UsageError.of("adapter settings given twice", settings, "one of the two", fix)
    if config is not None:
        return config
    import peft

    lora_kwargs.setdefault("target_modules", "all-linear")
    lora_kwargs.setdefault("task_type", task_type_of(without_peft(model)))
    return peft.LoraConfig(**lora_kwargs)


def unmatched(model: Any) -> tuple[str, ...]:
    """Return the names in PEFT's `target_modules` and `modules_to_save` that match no module of `model`."""
    peft_configs = (vars(module).get("peft_config") for module in model.modules())
    configs = [config for by_name in peft_configs if isinstance(by_name, dict) for config in by_name.values()]
    asked = [getattr(c, key, None) or () for c in configs for key in ("target_modules", "modules_to_save")]
    wanted = {name for names in asked if not isinstance(names, str) for name in names}
    for config in configs:
        wanted.difference_update(TRAINED_WHOLE.get(task_of(config) or "", ()))  # PEFT names every usual head
    modules = [f".{name}" for name, _ in model.named_modules()] if wanted else []
    return tuple(sorted(n for n in wanted if not any(module.endswith(f".{n}") for module in modules)))


def adapter_words(model: Any) -> tuple[str, ...]:
    """Return a phrase for each PEFT adapter of a model, with its kind, rank, alpha and targets."""
    configs = getattr(model, "peft_config", None) or {}
    words = []
    for config in configs.values():
        kind = kind_of_adapter(config).replace("LORA", "LoRA")
        kind = "DoRA" if getattr(config, "use_dora", False) else kind
        rank = f" r {config.r}" if hasattr(config, "r") else ""
        scale = f" alpha {config.lora_alpha:g}" if getattr(config, "lora_alpha", None) else ""
        targets = getattr(config, "target_modules", None) or ()
        named = targets
        if not isinstance(targets, str):
            names = [*targets, *(getattr(config, "target_parameters", None) or ())]
            named = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
        words.append(f"{kind}{rank}{scale}" + (f" on {named}" if named else ""))
    return tuple(words)


@contextmanager
def _offline_if_unreachable(model: Any) -> Iterator[bool]:
    """Keep PEFT from waiting for an unreachable hub in the `with` block. Yield True if embeddings must be saved.

    On each save, PEFT (0.21) reads the config of the base model from the hub. Without this config, PEFT assumes that the
    vocabulary is unchanged. Therefore this function compares the size of the vocabulary with the size in the cached config.
    """
    configs = getattr(model, "peft_config", None) or {}
    named = [config.base_model_name_or_path for config in configs.values()]
    base = next((name for name in named if name and ":" not in name and not Path(name).exists()), None)
    with asking(base) as why, warnings.catch_warnings():
        if not why:
            yield False
            return
        from huggingface_hub import try_to_load_from_cache

        warnings.filterwarnings("ignore", message="Unable to fetch remote file|Could not find a config file")
        revision = next(iter(configs.values())).revision
        cached = try_to_load_from_cache(str(base), "config.json", revision=revision)
        before = json.loads(Path(cached).read_text()).get("vocab_size") if isinstance(cached, str) else None
        yield before is not None and before != getattr(model.config, "vocab_size", before)


def save_policy_too(model: Any) -> None:
    """Make `save_pretrained` also write the policy into the folder of the weights, or into the folder of each adapter."""
    if "save_pretrained" in vars(model):
        return

    def save_pretrained(self: Any, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        with _offline_if_unreachable(self) as resized:
            more = {"save_embedding_layers": True} if resized else {}
            type(self).save_pretrained(self, save_directory, *args, **more | kwargs)
        policy = policy_of(self)
        if policy is None or not kwargs.get("is_main_process", True):
            return
        # PEFT writes the adapter "default" into the folder itself, and every other adapter into a subfolder.
        names = kwargs.get("selected_adapters") or getattr(self, "peft_config", None) or ["default"]
        for name in names:
            policy.save(Path(save_directory) / ("" if name == "default" else name))

    model.save_pretrained = types.MethodType(save_pretrained, model)
