"""Merge adapters into their layers: in float32, rounded once, one block of the model in memory at a time."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.adapter import Adapter, fill, inject, load_base, waiting
from isotype.checkpoint.deferred import Block, outermost_blocks
from isotype.checkpoint.merge.report import WeightLoss, rounding_loss
from isotype.checkpoint.merge.rounding import WrittenModel, codes, unbiased
from isotype.compat.transformers import never_saved
from isotype.core.dtypes import dtype_name
from isotype.core.errors import PrecisionError, Problem, UsageError
from isotype.core.names import base_name
from isotype.precision.policy import PrecisionPolicy, is_pinned

_MERGEABLE, _BESIDE = "an adapter that PEFT can merge", "use it beside its base"


@dataclass(frozen=True)
class Rounding:
    """The dtype that each parameter of the merged model is stored in.

    Attributes:
        pinned: patterns of names that stay float32.
        own: names that keep their dtype in the base's files.
        written: the written model to compare with; None before it is written.
        instead: arguments for another dtype than float16, for the message about overflow.
    """

    target: torch.dtype
    pinned: tuple[str, ...] = ()
    own: Mapping[str, torch.dtype] = field(default_factory=dict)
    written: WrittenModel | None = None
    instead: str = "--dtype bfloat16 or float32"

    def loss(
        self, name: str, before: torch.Tensor, merged: torch.Tensor, stored: torch.Tensor | None = None
    ) -> WeightLoss:
        """Return the loss of a merged parameter by rounding, or in the written model."""
        if self.written is None:
            stored = unbiased(name, merged, self.wanted(name)) if stored is None else stored
            return rounding_loss(name, before, merged, self.wanted(name), stored)
        dtype, values = self.written.values(name)
        loss = rounding_loss(name, before, merged, dtype, values)
        form = self.written.form_of(name, values)
        if form is None:
            return loss
        same = codes(before.float(), form) == codes(merged.float(), form)
        return replace(loss, vanished=int((same & (before.float() != merged.float()).flatten()).sum()))

    def wanted(self, name: str) -> torch.dtype:
        return torch.float32 if is_pinned(name, self.pinned) else self.own.get(name, self.target)

    def rounded(
        self, tensors: Mapping[str, torch.Tensor], changed: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Round float tensors to their stored dtypes; those `changed` by training without bias.

        Raises:
            PrecisionError: float16 cannot represent some; each is named.
        """
        result, outside = {}, []
        for name, value in tensors.items():
            wanted = self.wanted(name)
            to = unbiased(name, value, wanted) if name in changed else value.to(wanted)
            result[name] = to if value.is_floating_point() else value
            if wanted == torch.float16 != value.dtype and not torch.isfinite(result[name]).all():
                outside.append((name, float(value.float().abs().max())))
        if outside:
            fix = f"give {self.instead}"
            problems = [Problem(f"{n}: values up to {most:.4g}", "at most 65504", fix) for n, most in outside]
            raise PrecisionError("float16 cannot hold the merged weights", problems)
        return result


class Merging:
    """A base model and its adapter, about to be merged.

    Attributes:
        model: the base; its class and config are those of the merged model.
        notes: differences from the base, in sentences.
        weights: rounding loss of each parameter that the adapter changes, once all parts were taken.
    """

    def __init__(
        self,
        adapter: Adapter,
        base: str,
        policy: PrecisionPolicy,
        target: torch.dtype,
        revision: str | None = None,
        *,
        one_dtype: bool = False,
        written: WrittenModel | None = None,
        instead: str = Rounding.instead,
    ) -> None:
        """`one_dtype`: also for tensors that the base's files store in another dtype than most of them. `written`:
        the model written by an earlier, equal merge, which `weights` then describes. `instead`: as in `Rounding`.
        """
        dense = dense_policy(policy)
        # An unquantized base is only added to, and the CPU is where that has room.
        here = policy if policy.quantized else replace(policy, device="cpu")
        self._deferred = waiting(adapter)
        self.model = load_base(adapter, base, here, revision=revision, deferred=self._deferred)
        adapter = without_part(self.model, adapter, here)
        self._deferred.dequantize(self.model, dense.plain)
        tied = _untie(self.model)
        self._blocks = self._deferred.blocks or tuple(Block(*each) for each in outermost_blocks(self.model))
        self._names = _stored_names(self.model)
        self._tied = _embedding_names(self.model, self._names) if tied else None
        self._peft = inject(self.model, adapter, dense)
        if not hasattr(self._peft.base_model, "merge_and_unload"):
            kind = type(self._peft.base_model).__name__
            what = f"{adapter.directory}: a {kind}, which PEFT has no merge for"
            raise UsageError.of("this adapter cannot be merged", what, _MERGEABLE, _BESIDE)
        own = _own_trained(self._peft)
        fill(self._peft, adapter)
        self._rounding = Rounding(
            target, dense.pinned, {} if one_dtype else self._deferred.stored_otherwise(), written, instead
        )
        self._untouched = set(self._rounding.own) - {base_name(each.name) for each in adapter.headers.tensors}
        self.weights: tuple[WeightLoss, ...] = ()
        self.notes: list[str] = []
        replaced = _replaced(self._peft, own)
        self._changed = frozenset(replaced)
        self._outside = self._merged(None)
        self.weights += tuple(_losses(replaced, self._rounding))
        if self._tied is not None:
            self._tie_again(*self._tied)
        self.model.config.dtype = target

    @property
    def shapes(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer of the merged model, in the order of `parts`: shape and dtype, without values."""
        order = sorted(self._names, key=lambda name: name not in self._outside)
        shapes = {}
        for name in order:
            value = self._names[name]
            dtype = self._rounding.wanted(name) if value.is_floating_point() else value.dtype
            shapes[name] = torch.empty(value.shape, dtype=dtype, device="meta")
        return shapes

    def parts(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the tensors of the merged model by name, in parts: first those outside of its blocks, then each
        block.

        A part's tensors are freed when the next is requested. It can be iterated once.

        Raises:
            UsageError: PEFT cannot merge this kind of adapter.
            PrecisionError: float16 cannot represent a weight.
            CheckpointError: the base's files are damaged.
        """
        yield self._outside
        self._outside = {}
        for block in self._blocks:
            self._deferred.read(block)
            yield self._merged(block)
            self._deferred.drop(block)
            for parameter in block.module.parameters():
                parameter.data = parameter.data.new_empty(0)
        self.weights = tuple(sorted(self.weights, key=lambda weight: weight.name))

    def measured(self) -> tuple[WeightLoss, ...]:
        """Return `weights` after a pass over `parts`, with its errors."""
        for _ in self.parts():
            pass
        return self.weights

    def _merged(self, block: Block | None) -> dict[str, torch.Tensor]:
        """Merge the layers of a block and collect its tensors; without a block, those outside of blocks."""
        prefix, root = ("", self._peft) if block is None else (f"{block.name}.", block.module)
        elsewhere = tuple(f"{each.name}." for each in self._blocks) if block is None else ()
        for own, layer in tuner_layers(root):
            name = base_name(f"{prefix}{own}")
            if name.startswith(elsewhere):
                continue
            self._untouched -= {f"{name}.{each}" for each, _ in layer.get_base_layer().named_parameters()}
            self.weights += tuple(_merge_layer(name, layer, self._rounding))
        wanted = {name for name in self._names if name.startswith(prefix) and not name.startswith(elsewhere)}
        tensors: dict[str, torch.Tensor] = {}
        for own, value in (*_all(root, "named_parameters"), *_all(root, "named_buffers")):
            name = base_name(f"{prefix}{own}")
            # Of a module that was trained whole, the trained copy.
            if name in wanted and (name not in tensors or ".modules_to_save." in own):
                tensors[name] = value.detach()
        missing = wanted - set(tensors)
        if missing:
            raise RuntimeError(f"tensors that were lost on the way: {sorted(missing)[:3]}")
        for name in self._untouched & wanted:
            stored = self._deferred.as_stored(name)
            if stored.shape == tensors[name].shape:  # a vocabulary may have grown
                tensors[name] = stored
        return self._rounding.rounded(
            {name: tensors[name] for name in self._names if name in tensors}, self._changed
        )

    def _tie_again(self, first: str, last: str) -> None:
        """Tie the embeddings if they are still equal after the merge; else note that they are separate weights."""
        equal = torch.equal(self._outside[first], self._outside[last])
        config = self.model.config
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = equal
        if equal:
            del self._outside[last], self._names[last]
            return
        self.notes.append(
            "the base ties input and output embeddings, and the adapter changes them differently: the merged model "
            "stores both (tie_word_embeddings is false)"
        )


def dense_policy(policy: PrecisionPolicy) -> PrecisionPolicy:
    """Return the policy of the dequantized base: float32 masters, so that the adapter is read unrounded."""
    eight = "int8" in (policy.storage, *(layer.storage for layer in policy.layers))
    plain = torch.float32 if eight else policy.compute
    return replace(
        policy,
        storage=dtype_name(plain),
        compute=plain,
        master=torch.float32,
        device="cpu",
        double_quant=False,
        layers=(),
        experts="",
        pinned=policy.pinned if plain != torch.float32 else (),
    )


def without_part(model: Any, adapter: Adapter, policy: PrecisionPolicy) -> Adapter:
    """Subtract OLoRA's part from a quantized base, as OLoRA does; return the adapter for the rest."""
    if not policy.quantized or getattr(adapter.config, "init_lora_weights", None) != "olora":
        return adapter
    inject(model, adapter, policy).base_model.unload()
    config = copy.copy(adapter.config)
    config.init_lora_weights = True
    return replace(adapter, config=config)


def _untie(model: Any) -> bool:
    """Give the output embeddings their own weight, so that each can be merged; return True if they were tied."""
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    if last is None or first.weight is not last.weight:
        return False
    last.weight = nn.Parameter(first.weight.detach().clone(), requires_grad=first.weight.requires_grad)
    return True


def _embedding_names(model: Any, stored: Collection[str]) -> tuple[str, str]:
    names = {id(value): name for name, value in _all(model, "named_parameters") if name in stored}
    first, last = (
        names[id(each.weight)] for each in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    return first, last


def _all(module: nn.Module, which: str) -> Iterator[tuple[str, torch.Tensor]]:
    tensors: Iterator[tuple[str, torch.Tensor]] = getattr(module, which)(remove_duplicate=False)
    return tensors


def _stored_names(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors in a checkpoint of a model, without values, shared ones under one name."""
    left_out = never_saved(model)
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    kept: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, value in sorted(state.items(), key=lambda each: each[0] in tied):
        kept.setdefault(id(value), name)
    names = set(kept.values()) - left_out
    return {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta")
        for name, value in state.items()
        if name in names and isinstance(value, torch.Tensor)
    }


def tuner_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return ((name, each) for name, each in list(module.named_modules()) if isinstance(each, BaseTunerLayer))


def merge_in_float32(name: str, layer: Any) -> None:
    """Merge one PEFT layer, in place; raise UsageError if PEFT cannot merge this kind of adapter."""
    layer.get_base_layer().to(torch.float32)
    try:
        layer.merge(safe_merge=True)
    except (NotImplementedError, ValueError) as error:
        raise UsageError.of(
            "this adapter cannot be merged", f"{name}: {error}", _MERGEABLE, _BESIDE
        ) from error


def _merge_layer(name: str, layer: Any, rounding: Rounding) -> list[WeightLoss]:
    before = {each: parameter.data for each, parameter in layer.get_base_layer().named_parameters()}
    merge_in_float32(name, layer)
    after = {f"{name}.{each}": parameter for each, parameter in layer.get_base_layer().named_parameters()}
    rounded = rounding.rounded({full: parameter.data for full, parameter in after.items()}, after)
    losses = [
        rounding.loss(full, before[full.removeprefix(f"{name}.")], parameter.data, rounded[full])
        for full, parameter in after.items()
    ]
    for full, parameter in after.items():
        parameter.data = rounded[full]
    return [loss for loss in losses if loss.entries]


def _own_trained(peft_model: Any) -> dict[str, torch.Tensor]:
    """Return copies of the base's own parameters that the adapter's file replaces (`bias="all"`), by name."""
    prefix = getattr(peft_model.base_model, "prefix", "lora_")
    return {
        name: parameter.detach().clone()
        for name, parameter in peft_model.named_parameters()
        if parameter.requires_grad and prefix not in name and "modules_to_save" not in name
    }


def _replaced(
    peft_model: Any, own: Mapping[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the fully trained weights, biases and `modules_to_save`, before and after."""
    from peft.utils import ModulesToSaveWrapper

    parameters = dict(peft_model.named_parameters())
    pairs = {
        base_name(name): (before, parameters[name].data) for name, before in own.items() if name in parameters
    }
    for name, module in peft_model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            after = dict(module.modules_to_save[module.active_adapter].named_parameters())
            for each, before in module.original_module.named_parameters():
                if each in after:
                    pairs[f"{base_name(name)}.{each}"] = (before.data, after[each].data)
    return pairs


def _losses(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], rounding: Rounding) -> list[WeightLoss]:
    losses = [rounding.loss(name, before, after) for name, (before, after) in pairs.items()]
    return [loss for loss in losses if loss.entries]
