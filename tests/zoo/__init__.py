"""The zoo: every architecture the preflight is held against, tiny and random, ready for a real training step.

`ARCHITECTURES` goes through the whole causal-LM mapping of transformers and a choice of vision-language models,
classifiers and encoder-decoders. What of the mapping cannot run is in `LEFT_OUT`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from isotype.precision.policy import is_pinned
from tests.zoo import causal, classification, encoder_decoder, vision
from tests.zoo.shrink import tiny_config

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Architecture:
    """One architecture of transformers in a tiny configuration.

    Attributes:
        name: the model type; with `-vl`, `-cls` or `-s2s` behind it outside of causal language models.
        family: `causal`, `vision-language`, `classification` or `encoder-decoder`.
        build: from a dtype to the model as `from_pretrained` would load it: pinned parameters stay float32.
        batch: `batch(rows=2, dtype=torch.float32)`: a fixed batch with labels, float inputs in `dtype`.
    """

    name: str
    family: str
    build: Callable[[torch.dtype], nn.Module]
    batch: Callable[..., Batch]


def _build(class_name: str, model_type: str, settings: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    cls = getattr(transformers, class_name)
    own = dict(settings)
    config = tiny_config(own.pop("model_type", model_type), own)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = cls._from_config(config, dtype=dtype)
    pins = set(model._keep_in_fp32_modules_strict)
    if dtype == torch.float16:
        pins |= set(model._keep_in_fp32_modules)
    for name, parameter in model.named_parameters():
        if is_pinned(name, tuple(pins)):
            parameter.data = parameter.data.float()
    loaded: nn.Module = model.train()
    return loaded


def _architectures() -> dict[str, Architecture]:
    found = []
    for name, cls in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name not in causal.LEFT_OUT:
            build = partial(_build, cls, name, causal.SETTINGS.get(name, {}))
            found.append(Architecture(name, "causal", build, causal.batch))
    for name, model in vision.MODELS.items():
        cls = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name]
        build = partial(_build, cls, name, model.settings)
        found.append(Architecture(f"{name}-vl", "vision-language", build, partial(vision.batch, model)))
    for name, settings in classification.SETTINGS.items():
        cls = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[name]
        build = partial(_build, cls, name, settings)
        found.append(Architecture(f"{name}-cls", "classification", build, classification.batch))
    for name, (settings, batch) in encoder_decoder.MODELS.items():
        build = partial(_build, encoder_decoder.class_name(name), name, settings)
        found.append(Architecture(f"{name}-s2s", "encoder-decoder", build, batch))
    return {architecture.name: architecture for architecture in found}


ARCHITECTURES: dict[str, Architecture] = _architectures()
LEFT_OUT: dict[str, str] = causal.LEFT_OUT
