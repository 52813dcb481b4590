"""Load a checkpoint so that every weight is stored as the policy says."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.deferred import DeferredBlocks
from isotype.checkpoint.formats.config import model_class as class_of
from isotype.checkpoint.formats.gguf_tokenizer import tokenizer_copy
from isotype.checkpoint.formats.headers import CheckpointHeaders
from isotype.checkpoint.formats.hub import commit_of
from isotype.checkpoint.opened import Checkpoint, config_of, open_checkpoint, require_complete_gguf
from isotype.checkpoint.streaming import can_stream, headers_of, stream
from isotype.checkpoint.values.unpack import Packing, packing_of
from isotype.compat.hub import asking
from isotype.compat.transformers import DTYPE_PLAN, LOAD, is_auto_class, pin, pinned, pinned_strictly, rename
from isotype.compat.transformers import subclass as loading_class
from isotype.core.errors import CheckpointError, PrecisionError, Problem
from isotype.model.enforce import contradiction, enforce_model
from isotype.model.finite import not_finite, refuse
from isotype.model.range_boundaries import float32_by_ranges
from isotype.precision.facts import ModelFacts
from isotype.precision.policy import PrecisionPolicy


def load(
    path: str | Path,
    policy: PrecisionPolicy,
    *,
    model_class: type | None = None,
    device_map: Any = None,
    deferred: DeferredBlocks | None = None,
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
        deferred: takes the weights of blocks that are to be read when their block is needed; none by default.
        **kwargs: passed on to `from_pretrained` (`revision`, `attn_implementation`, `trust_remote_code`, …).

    Raises:
        CheckpointError: `path` is no checkpoint, holds a format that cannot be loaded as asked, tensors of other
            shapes than its config says, or values that are not finite.
        PrecisionError: the checkpoint is saved quantized in another format than the policy's storage.
    """
    checkpoint = open_checkpoint(path, kwargs.pop("revision", None))
    return load_checkpoint(
        checkpoint, policy, model_class=model_class, device_map=device_map, deferred=deferred, **kwargs
    )


def load_checkpoint(
    checkpoint: Checkpoint,
    policy: PrecisionPolicy,
    *,
    model_class: type | None = None,
    device_map: Any = None,
    deferred: DeferredBlocks | None = None,
    **kwargs: Any,
) -> Any:
    """`load` of a checkpoint that is open."""
    source, facts = checkpoint.source, checkpoint.facts
    _check_saved_format(facts, policy)
    headers = checkpoint.headers if checkpoint.gguf else None
    config = copy.deepcopy(config_of(checkpoint))
    packing = packing_of(config)
    name: Path | str | None = source
    keywords = dict(kwargs)
    if headers is not None or (facts.quantization is not None and facts.quantization.dequantized):
        forget_quantization(config)
        keywords = {key: value for key, value in kwargs.items() if not _took(config, key, value)}
        keywords["config"] = config
    if headers is not None:
        name, keywords["state_dict"] = None, {}  # weights "in memory": transformers looks for no file
    if isinstance(source, str) and checkpoint.revision is not None:
        keywords["revision"] = checkpoint.revision
    keywords.setdefault("quantization_config", wanted_quantization(policy, saved_format(facts)))
    if keywords["quantization_config"] is None:
        del keywords["quantization_config"]
    cls = concrete_class(config, model_class)
    broken: dict[str, str] = {}
    streaming = _streaming(
        cls, policy, checkpoint.name, broken, headers=headers, packing=packing, deferred=deferred
    )
    with without_bars(), asking(source):
        model = streaming.from_pretrained(
            name, dtype=policy.plain, device_map=device_map or _default_device_map(policy), **keywords
        )
    model.__class__ = cls
    refuse(checkpoint.name, broken)
    if policy.trainable == "lora":
        model.requires_grad_(False)
    note_quantization(model, policy)
    if headers is not None:
        model.name_or_path = checkpoint.name  # an adapter names its base by this
        rename(model.config, checkpoint.name)
    if isinstance(source, str):
        model.loaded_commit = commit_of(source, checkpoint.revision)  # an adapter remembers it
    enforce_model(model, policy)
    return model


def _check_saved_format(facts: ModelFacts, policy: PrecisionPolicy) -> None:
    saved = saved_format(facts)
    if saved not in (None, policy.storage):
        raise contradiction(f"{facts.source}, saved in {saved},", policy)


def saved_format(facts: ModelFacts) -> str | None:
    """The quantization that a checkpoint is saved in and that its weights keep."""
    quantization = facts.quantization
    return None if quantization is None or quantization.dequantized else quantization.format


def forget_quantization(config: Any) -> None:
    """Take out of a config (and those inside of it) how the checkpoint was quantized: the model is dense."""
    for each in (config, config.get_text_config()):
        vars(each).pop("quantization_config", None)


def _took(config: Any, name: str, value: Any) -> bool:
    """Whether an argument of `from_pretrained` is a field of the config, which then has it."""
    if not hasattr(config, name) or name in ("attn_implementation", "experts_implementation"):
        return False
    setattr(config, name, value)
    return True


def tokenizer_source(checkpoint: Checkpoint) -> Path | str:
    """The directory or hub id from which transformers loads the tokenizer and the config of a model.

    Those of a GGUF file are written into a cache first.
    """
    if isinstance(checkpoint.source, Path) and checkpoint.source.suffix == ".gguf":
        require_complete_gguf(checkpoint)
        return tokenizer_copy(checkpoint.source)
    return checkpoint.source


def concrete_class(config: Any, model_class: type | None = None) -> Any:
    """The model class for `config`: the auto class's choice, or the one that the config itself names.

    Raises:
        CheckpointError: the config names no class that transformers has.
    """
    if model_class is not None and not is_auto_class(model_class):
        return model_class
    cls = class_of(config, model_class)
    if cls is not None:
        return cls
    raise CheckpointError.of(
        "no model class for this checkpoint",
        f"model_type {config.model_type!r} with architectures {config.architectures}",
        f"a class of {getattr(model_class, '__name__', 'transformers')}",
        "give model_class=, or a checkpoint of an architecture that transformers knows",
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
        strict = {name.removesuffix(".weight") for name in pinned_strictly(self)}
        pin(self, pinned(self) | strict)

    def dtype_plan(self: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
        if dtype == torch.float32:
            return {}
        names = pinned(self) | pinned_strictly(self)
        if policy is not None:
            names |= float32_by_ranges(self, policy)
        return dict.fromkeys(names, torch.float32)

    subclass = loading_class(cls, **{"post_init": post_init, DTYPE_PLAN: dtype_plan})
    return subclass


def _streaming(
    cls: Any,
    policy: PrecisionPolicy,
    source: object,
    broken: dict[str, str],
    *,
    headers: CheckpointHeaders | None = None,
    packing: Packing,
    deferred: DeferredBlocks | None = None,
) -> Any:
    """`pinning(cls, policy)` whose weights are streamed: from `headers`, else from the files that transformers finds.

    `broken` takes the names of parameters that are not finite.
    """

    def load_weights(model: Any, state_dict: Any, files: Any, settings: Any, *rest: Any, **more: Any) -> Any:
        if headers is not None:
            info, infinite = stream(model, headers, settings, policy, packing, deferred)
            loaded = info, None
        elif can_stream(state_dict, files, settings):
            info, infinite = stream(model, headers_of(source, files), settings, policy, packing, deferred)
            loaded = info, None
        else:
            if policy.layers:
                raise _not_mixed(source)
            theirs = getattr(super(subclass, subclass), LOAD)
            loaded = theirs(model, state_dict, files, settings, *rest, **more)
            # Not the buffers: a mask may well hold infinity.
            infinite = not_finite(model.named_parameters())
        broken.update(infinite)
        return loaded

    subclass = loading_class(pinning(cls, policy), **{LOAD: staticmethod(load_weights)})
    return subclass


def _not_mixed(source: object) -> PrecisionError:
    problem = Problem(
        f"{source} with a device map to disk, or weights in memory, under a policy of mixed storage",
        "weights that are read from files, each into its layer's format",
        "load it without these, or with quantization nf4",
    )
    return PrecisionError("a mixed base cannot be loaded so", [problem])


def _default_device_map(policy: PrecisionPolicy) -> Any:
    if torch.cuda.is_available() and policy.device != "cpu":
        return {"": torch.cuda.current_device()}
    return None


def wanted_quantization(policy: PrecisionPolicy, saved: str | None) -> Any:
    """transformers' quantization config for `policy`; `saved`: the format that the checkpoint comes in, or None."""
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
