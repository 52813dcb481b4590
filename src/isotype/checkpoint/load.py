"""Load a checkpoint so that every weight is stored as the policy says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.complete import require_complete_gguf
from isotype.checkpoint.facts import facts_of
from isotype.checkpoint.finite import not_finite, refuse
from isotype.checkpoint.formats.config import model_class as class_of
from isotype.checkpoint.formats.gguf import dense_copy
from isotype.checkpoint.formats.hub import commit_of
from isotype.checkpoint.locate import resolve_source
from isotype.checkpoint.streaming import can_stream, stream
from isotype.core.errors import CheckpointError, Problem
from isotype.model.enforce import contradiction, enforce_model
from isotype.model.range_boundaries import float32_by_ranges
from isotype.precision.facts import ModelFacts
from isotype.precision.policy import PrecisionPolicy


def load(
    path: str | Path,
    policy: PrecisionPolicy,
    *,
    model_class: type | None = None,
    device_map: Any = None,
    **kwargs: Any,
) -> Any:
    """Load the model at `path` under `policy`.

    Quantized, pinned and plain weights take the dtypes the policy names; a checkpoint that is saved quantized
    has its quantization states, constants and compute dtype brought along. The policy is left on the model as
    the attribute `precision_policy`.

    Args:
        path: checkpoint directory, GGUF file, hub id or `embedded:smollm2`.
        policy: from `isotype.resolve_precision`.
        model_class: a transformers model class or auto class; by default the class that the config names.
        device_map: as in `from_pretrained`; by default the policy's device when it is here.
        **kwargs: passed on to `from_pretrained` (`revision`, `attn_implementation`, `trust_remote_code`, …).

    Raises:
        CheckpointError: `path` is no checkpoint, holds a format that cannot be loaded as asked, tensors of other
            shapes than its config says, or values that are not finite.
        PrecisionError: the checkpoint is saved quantized in another format than the policy's storage.
    """
    source = dense_source(path, policy.plain)
    config_arguments = {k: kwargs[k] for k in ("revision", "trust_remote_code") if k in kwargs}
    import transformers

    config = transformers.AutoConfig.from_pretrained(source, **config_arguments)
    facts = facts_of(source, revision=kwargs.get("revision"))
    _check_saved_format(facts, policy)
    if "quantization_config" not in kwargs:
        saved = facts.quantization.format if facts.quantization else None
        kwargs["quantization_config"] = wanted_quantization(policy, saved)
    if kwargs["quantization_config"] is None:
        del kwargs["quantization_config"]
    cls = concrete_class(config, model_class)
    broken: dict[str, str] = {}
    with without_bars():
        model = _streaming(cls, policy, path, broken).from_pretrained(
            source, dtype=policy.plain, device_map=device_map or _default_device_map(policy), **kwargs
        )
    model.__class__ = cls
    refuse(path, broken)
    if policy.trainable == "lora":
        model.requires_grad_(False)
    note_quantization(model, policy)
    if str(source) != str(path) and not Path(path).is_dir():
        # An adapter names its base by this; a folder in a cache would not outlive the cache.
        model.name_or_path = model.config._name_or_path = str(path)
    if isinstance(source, str):
        model.loaded_commit = commit_of(source, kwargs.get("revision"))  # an adapter remembers it
    enforce_model(model, policy)
    return model


def _check_saved_format(facts: ModelFacts, policy: PrecisionPolicy) -> None:
    saved = facts.quantization.format if facts.quantization else None
    fits = not policy.quantized if saved == "mxfp4" else saved in (None, policy.storage)
    if not fits:
        raise contradiction(f"{facts.source}, saved in {saved},", policy)


def dense_source(path: str | Path, dtype: torch.dtype) -> Path | str:
    """A directory or hub id that `from_pretrained` reads; a GGUF file is dequantized into a cache first."""
    source = resolve_source(path)
    if isinstance(source, Path) and source.suffix == ".gguf":
        require_complete_gguf(source)  # transformers draws what is missing, and the copy would look complete
        return dense_copy(source, dtype)
    return source


def concrete_class(config: Any, model_class: type | None = None) -> Any:
    """The model class for `config`: the auto class's choice, or the one that the config itself names.

    Raises:
        CheckpointError: the config names no class that transformers has.
    """
    if model_class is not None and not hasattr(model_class, "_model_mapping"):
        return model_class
    found = class_of(config, model_class)
    if found is not None:
        return found
    raise CheckpointError(
        "no model class for this checkpoint",
        [
            Problem(
                f"model_type {config.model_type!r} with architectures {config.architectures}",
                f"a class of {getattr(model_class, '__name__', 'transformers')}",
                "give model_class=, or a checkpoint of an architecture that transformers knows",
            )
        ],
    )


def pinning(cls: Any, policy: PrecisionPolicy | None = None) -> Any:
    """A subclass that keeps every pinned parameter in float32 while it is being loaded, and all that `policy` keeps in
    float32 because of value ranges.

    transformers casts the patterns of `_keep_in_fp32_modules` to bfloat16 when bfloat16 is asked for; rounding
    them and casting back would not bring the digits back, so the choice is made before the first byte is read.
    """

    def post_init(self: Any) -> None:
        super(subclass, self).post_init()
        # The quantizer skips the modules named here; a strict pin must not be quantized either.
        strict = {name.removesuffix(".weight") for name in self._keep_in_fp32_modules_strict}
        self._keep_in_fp32_modules = self._keep_in_fp32_modules | strict

    def dtype_plan(self: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
        if dtype == torch.float32:
            return {}
        names = self._keep_in_fp32_modules | self._keep_in_fp32_modules_strict
        if policy is not None:
            names |= float32_by_ranges(self, policy)
        return dict.fromkeys(names, torch.float32)

    subclass: Any = type(cls.__name__, (cls,), {"post_init": post_init, "_get_dtype_plan": dtype_plan})
    subclass.__module__ = cls.__module__
    return subclass


def _streaming(cls: Any, policy: PrecisionPolicy, source: object, broken: dict[str, str]) -> Any:
    """`pinning(cls, policy)` whose weights are streamed; `broken` takes the names of those that are not finite."""

    def load_weights(model: Any, state_dict: Any, files: Any, settings: Any, *rest: Any, **more: Any) -> Any:
        if can_stream(state_dict, files, settings):
            info, found = stream(model, source, files, settings, policy)
            loaded = info, None
        else:
            loaded = super(subclass, subclass)._load_pretrained_model(
                model, state_dict, files, settings, *rest, **more
            )
            # Not the buffers: a mask may well hold infinity.
            found = not_finite(model.named_parameters())
        broken.update(found)
        return loaded

    subclass: Any = type(
        cls.__name__, (pinning(cls, policy),), {"_load_pretrained_model": staticmethod(load_weights)}
    )
    subclass.__module__ = cls.__module__
    return subclass


def wanted_quantization(policy: PrecisionPolicy, saved: str | None) -> Any:
    """transformers' quantization config for `policy`; `saved`: the format that the checkpoint comes in, or None."""
    if saved == "mxfp4":
        from transformers import Mxfp4Config

        return Mxfp4Config(dequantize=True)
    if saved is not None or not policy.quantized:
        return None
    from transformers import BitsAndBytesConfig

    if policy.storage == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=policy.storage,
        bnb_4bit_compute_dtype=policy.compute,
        bnb_4bit_use_double_quant=policy.double_quant,
        bnb_4bit_quant_storage=policy.quant_storage,
    )


def _default_device_map(policy: PrecisionPolicy) -> Any:
    if torch.cuda.is_available() and policy.device != "cpu":
        return {"": torch.cuda.current_device()}
    return None


def note_quantization(model: nn.Module, policy: PrecisionPolicy) -> None:
    """The config that is saved with the model says the compute dtype that is really in force."""
    config = getattr(model.config, "quantization_config", None)
    if config is not None and hasattr(config, "bnb_4bit_compute_dtype"):
        config.bnb_4bit_compute_dtype = policy.compute


@contextmanager
def without_bars() -> Iterator[None]:
    """transformers' progress bars off, and on again afterwards if they were."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
