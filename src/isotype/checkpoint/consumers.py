"""Predicts the effect of another program on each tensor of an adapter: the program applies, changes, ignores or
refuses the tensor.

The rules follow the source code of these programs' loaders on 2026-11-27:

- `peft` 0.21: `set_peft_model_state_dict` and `LoraLayer`;
- `vllm` 0.28: vllm/lora/peft_helper.py, lora_model.py and utils.py. vLLM accepts a tensor if the last part of the name
  of its module (`q_proj`) is also the last part of the name of a linear layer. If no module has the full name of the
  tensor, vLLM then ignores the tensor (https://github.com/vllm-project/vllm/issues/34186, /48019, /41754);
- `llama.cpp`: convert_lora_to_gguf.py, and `llama_adapter_lora_weight::get_scale` (the scale is alpha / rank, even
  for rsLoRA).
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from peft.utils.other import get_pattern_key
from safetensors import safe_open

from isotype.checkpoint.adapter import Adapter, read_adapter
from isotype.checkpoint.checkpoint import open_checkpoint
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.weightless import skeleton
from isotype.core.errors import UsageError
from isotype.core.names import base_name, grouped, starred, unwrapping
from isotype.model.parts import LANGUAGE, Parts

Effect = Literal["applied", "changed", "ignored", "refused", "unknown"]
"""`changed`: the program applies the tensor, but scales it differently from the training."""

_SUFFIX = re.compile(r"\.(lora_[AB]\.weight|lora_embedding_[AB])$")
_STACKED = re.compile(r"\.experts$")
_OTHER_MODEL = "use the model that the adapter was trained on"
_MERGE = "merge the adapter (`isotype merge`), and load the whole model"


@dataclass(frozen=True)
class Consumer:
    """A program that loads adapters.

    Attributes:
        refuses: options of adapter_config.json that the program refuses -> the reason.
        unplaced: effect on a tensor for which the model has no module.
        other: effect on a tensor that is not a LoRA matrix; None if the program applies such tensors.
        stacked: effect on adapters of stacked experts, and the reason; None if the program applies these adapters.
        towers: True if the program applies adapters outside of the language model (towers and projectors).
        scale: function (config's alpha, config's r, layer's r, is rsLoRA) -> scale; None for PEFT's scale.
        rank: largest rank that the program loads by default; 0 for no limit.
        flag: option that raises the limit of `rank`.
    """

    refuses: Mapping[str, str] = field(default_factory=dict)
    unplaced: Effect = "refused"
    other: Effect | None = "refused"
    stacked: tuple[Effect, str] | None = None
    towers: bool = False
    scale: Callable[[float, int, int, bool], float] | None = None
    rank: int = 0
    flag: str = ""


CONSUMERS: Mapping[str, Consumer] = {
    "peft": Consumer(unplaced="ignored", other=None, towers=True),
    "vllm": Consumer(
        {
            "use_dora": "vLLM has no DoRA",
            "modules_to_save": "vLLM does not load fully trained modules",
            "trainable_token_indices": "vLLM does not load separately trained token embeddings",
        },
        unplaced="ignored",
        stacked=("unknown", "vLLM loads adapters of stacked experts only for the models in its list"),
        scale=lambda alpha, r, _, rslora: alpha / (math.sqrt(r) if rslora else r),
        rank=16,
        flag="--max-lora-rank",
    ),
    "llama.cpp": Consumer(
        {"use_dora": "llama.cpp's converter reads only lora_A and lora_B"},
        stacked=("refused", "llama.cpp's converter knows no tensor with this name"),
        scale=lambda alpha, _, rank, __: alpha / rank,
    ),
}


@dataclass(frozen=True)
class Use:
    """The effect that a program has on the adapter of a module. In the module's name, `*` stands for any layer
    number.

    `why` is a clause with the reason, or "" if the program applies the tensors.
    """

    module: str
    tensors: int
    effect: Effect
    why: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Fit:
    """Prediction of how the program `consumer` uses an adapter with `model`. `notes` contains options that the program needs."""

    adapter: str
    consumer: str
    model: str
    uses: tuple[Use, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(use.effect == "applied" for use in self.uses)


def fit_of(directory: str | Path, consumer: str, model: str | Path | None = None) -> Fit:
    """Predict how another program uses an adapter with a model. The model's weights are not read.

    `consumer` is a key of `CONSUMERS`. `model` is the model that the program loads. The default is the adapter's base.
    Raises CheckpointError if the adapter or the model does not exist, and UsageError if neither `model` nor the adapter
    names a model.
    """
    adapter, rules = read_adapter(directory), CONSUMERS[consumer]
    source = adapter.base if model is None else model
    if source is None:
        expected, fix = "the model that the program loads", f"--for {consumer} MODEL"
        raise UsageError.of("no base model", f"the adapter {directory}, which names no base", expected, fix)
    checkpoint = open_checkpoint(source, adapter.revision if model is None else None)
    base = skeleton(checkpoint.model_config, torch.float32)
    judge = _Judge(adapter, rules, dict(base.named_modules()), Parts(base), _modules_with_zero_b(adapter))
    judged = [(starred(module_of(tensor.name)), judge.use(tensor)) for tensor in adapter.headers.tensors]
    same = grouped(judged, lambda use: use).items()
    uses = tuple(Use(module, len(rows), *use) for (module, use), rows in same)
    rank = max((judge.rank(tensor) for tensor in adapter.headers.tensors), default=0)
    flags = (f"rank {rank}: start vLLM with {rules.flag} {rank}",) if 0 < rules.rank < rank else ()
    return Fit(str(directory), consumer, f"{source} ({type(base).__name__})", uses, flags)


def module_of(name: str) -> str:
    return _SUFFIX.sub("", base_name(name))


@dataclass(frozen=True)
class _Judge:
    adapter: Adapter
    rules: Consumer
    modules: Mapping[str, Any]
    parts: Parts
    zeros: frozenset[str]

    def use(self, tensor: TensorHeader) -> tuple[Effect, str, str]:
        """Return (effect, reason, fix) for one tensor of the adapter: what the program does with the tensor, why, and what to do."""
        config, rules, module = self.adapter.config, self.rules, module_of(tensor.name)
        for option, why in rules.refuses.items():
            if getattr(config, option, None):
                return "refused", why, _MERGE
        if how := unwrapping(tensor.name):
            return rules.unplaced, "its name in the file is not the name of the module", how
        if not _SUFFIX.search(tensor.name):
            other = rules.other
            return ("applied", "", "") if other is None else (other, "it is not a LoRA matrix", _MERGE)
        stacked = _STACKED.search(module)
        if stacked and rules.stacked is not None:
            return *rules.stacked, _MERGE
        place = self.modules.get(module)
        if place is None:
            return rules.unplaced, "the model has no module of this name", _OTHER_MODEL
        weight = getattr(place, "weight", None)
        sides = tuple(weight.shape) if isinstance(weight, torch.Tensor) else ()
        if not stacked and not any(side in sides for side in tensor.shape):
            why = f"its shape {list(tensor.shape)} does not fit a {type(place).__name__}"
            return "refused", why, _OTHER_MODEL
        part = self.parts.of(module)
        if not rules.towers and part != LANGUAGE:
            return "ignored", f"the program applies no adapters to the {part} of a model", _MERGE
        return self._scaled(tensor, module)

    def _scaled(self, tensor: TensorHeader, module: str) -> tuple[Effect, str, str]:
        config = self.adapter.config
        rank, alpha = self.rank(tensor), _of_pattern(config.alpha_pattern, module, config.lora_alpha)
        trained = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        scale = self.rules.scale
        applied = trained if scale is None else scale(config.lora_alpha, config.r, rank, config.use_rslora)
        if not applied or module in self.zeros:
            return "ignored", "its scale is 0" if not applied else "its B is zero", "train it"
        if not math.isclose(trained, applied):
            return (
                "changed",
                f"the program scales it by {applied:.3g}, but the training by {trained:.3g}",
                _MERGE,
            )
        return "applied", "", ""

    def rank(self, tensor: TensorHeader) -> int:
        """Return the LoRA rank of the tensor's layer, or 0 if the tensor is not a LoRA matrix."""
        config, module = self.adapter.config, module_of(tensor.name)
        return int(_of_pattern(config.rank_pattern, module, config.r)) if _SUFFIX.search(tensor.name) else 0


def _of_pattern(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    values = pattern or {}
    return values.get(get_pattern_key(values.keys(), module), default)


def changes_nothing(adapter: Adapter) -> bool:
    """Return True if an adapter has no effect, because all its tensors belong to LoRA layers whose matrix B is zero."""
    without_effect = _modules_with_zero_b(adapter)
    modules = (
        module_of(tensor.name).removesuffix(".lora_magnitude_vector") for tensor in adapter.headers.tensors
    )
    return without_effect.issuperset(modules)


def _modules_with_zero_b(adapter: Adapter) -> frozenset[str]:
    names = [tensor.name for tensor in adapter.headers.tensors]
    with safe_open(adapter.headers.tensors[0].file, "pt") as file:
        matrices = (name for name in names if name.endswith(("lora_B.weight", "lora_embedding_B")))
        return frozenset(module_of(name) for name in matrices if not bool(file.get_tensor(name).any()))
