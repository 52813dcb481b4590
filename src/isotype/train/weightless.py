"""The model that a training command would train, adapters and all, without a byte of weights."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from isotype.checkpoint.blank import NoDraws
from isotype.checkpoint.weightless import model_config, skeleton, skipped_modules, store
from isotype.core.errors import PrecisionError, UsageError
from isotype.model.adapters import add_lora
from isotype.model.fold import fold as fold_layers
from isotype.precision.policy import PrecisionPolicy
from isotype.train.models import check_module_names, first_sentence

_NUMBER = re.compile(r"(^|\.)\d+(\\?\.|$)|\\d|\[\d|\(\d")


def weightless_model(
    source: Any,
    policy: PrecisionPolicy,
    *,
    model_class: Any = None,
    lora: Any = None,
    fold: bool = False,
    revision: str | None = None,
    attn_implementation: str | None = None,
    **settings: Any,
) -> Any:
    """What `isotype.load` and `isotype.add_lora` would give under `policy`, every tensor on the meta device.

    Args:
        source: a transformers config, a checkpoint directory, its config.json, a GGUF file, `embedded:NAME` or a
            hub id; weights are not read.
        policy: from `isotype.resolve_precision`.
        model_class: a transformers model class or auto class; by default the class that the config names.
        lora: a `peft.LoraConfig` or the arguments of one; None for no adapters.
        fold: whether equal layers are folded (see `isotype.model.fold`): before adapters are made, except where
            layers are chosen by their numbers.
        revision: branch, tag or commit of a hub id.
        attn_implementation: as in `from_pretrained`.
        **settings: fields of the config to set, such as `num_labels`.

    Raises:
        CheckpointError: there is no config, or its class does not fit it.
        PrecisionError: adapters under a policy that trains every weight.
        UsageError: an adapter that cannot be made on this model.
    """
    if lora is not None and policy.trainable == "full":
        raise PrecisionError.of(
            "no adapter under a policy that trains every weight",
            "trainable='full'",
            "trainable='lora'",
            "resolve the policy with trainable='lora'",
        )
    config = model_config(source, revision=revision)
    model = skeleton(
        config, policy, model_class=model_class, attn_implementation=attn_implementation, **settings
    )
    with _adapter_arguments():
        lora = _lora_config(model, lora)
    early = fold and not _chosen_by_number(skipped_modules(config), lora)
    if early:
        fold_layers(model)
    model = store(model, policy)
    if lora is not None:
        model = _adapted(model, policy, lora)
    return fold_layers(model) if fold and not early else model


def _lora_config(model: Any, lora: Any) -> Any:
    if not isinstance(lora, Mapping):
        return lora
    from peft import LoraConfig

    causal = {"task_type": "CAUSAL_LM"} if hasattr(model, "prepare_inputs_for_generation") else {}
    return LoraConfig(**{"target_modules": "all-linear", **causal, **lora})


def _chosen_by_number(skipped: Iterable[str], lora: Any) -> bool:
    """Whether the quantizer or PEFT treats layers differently by their numbers."""
    if lora is None:
        names: list[str] = []
    elif getattr(lora, "layers_to_transform", None) is not None:
        return True
    else:
        names = [*(getattr(lora, "rank_pattern", None) or ()), *(getattr(lora, "alpha_pattern", None) or ())]
        for field in ("target_modules", "modules_to_save", "exclude_modules", "target_parameters"):
            value = getattr(lora, field, None) or ()
            names += [value] if isinstance(value, str) else list(value)
    return any(_NUMBER.search(name) for name in (*skipped, *names))


def _adapted(model: Any, policy: PrecisionPolicy, lora: Any) -> Any:
    check_module_names(model, lora)
    with _adapter_arguments(), torch.device("meta"), NoDraws(), warnings.catch_warnings():
        # What cannot be adapted as asked is in the model's `adapter_notes` too.
        warnings.simplefilter("ignore", UserWarning)
        return add_lora(model, policy, lora)


@contextmanager
def _adapter_arguments() -> Iterator[None]:
    """PEFT's word on the user's own arguments: a regex that matches nothing, a layer it cannot adapt."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        raise UsageError.of(
            "the adapter cannot be made as asked",
            first_sentence(error),
            "arguments that PEFT can adapt this model by",
            "see --lora_*",
        ) from error
