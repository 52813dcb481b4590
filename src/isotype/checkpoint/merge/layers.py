"""Merges adapters into their layers in float32, and rounds once. One block of the model is in memory at a time."""

from __future__ import annotations

import copy
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isotype.checkpoint import damage
from isotype.checkpoint.adapter import Adapter, deferred_base, fill, inject, load_base
from isotype.checkpoint.block_streaming import Block
from isotype.checkpoint.checkpoint import open_checkpoint
from isotype.checkpoint.merge.report import WeightLoss, rounding_loss
from isotype.checkpoint.stored_weights import StoredWeights, blank_model
from isotype.checkpoint.values import held_weight
from isotype.compat.torch import own_parameters
from isotype.compat.transformers import never_saved, without_bars
from isotype.core.dtypes import GGUF_BLOCKS, GGUF_TYPES, dtype_name, parse_dtype
from isotype.core.errors import PrecisionError, Problem, UsageError
from isotype.core.formats import FOUR_BITS, QUANTIZATIONS
from isotype.core.names import base_name
from isotype.core.pretrained import pretrained
from isotype.model.quantize import quantize_4bit, quantize_int8
from isotype.model.walk import kind_of
from isotype.precision.policy import PrecisionPolicy, is_pinned

_MERGEABLE, _BESIDE = "an adapter that PEFT can merge", "use it together with its base"


@dataclass(frozen=True)
class Rounding:
    """The dtypes in which the parameters of the merged model are stored.

    Attributes:
        target: dtype of all parameters that are neither in `pinned` nor in `in_base`.
        pinned: patterns of the names of parameters that stay float32.
        in_base: name -> dtype, for each parameter that keeps its dtype from the files of the base.
        written: the merged model, opened from its files to measure the errors of the weights; None until the files exist.
        instead: command-line arguments that the error message for a float16 overflow recommends.
        tied: names of the tied embeddings of the base. Their equal values are rounded to equal values.
    """

    target: torch.dtype
    pinned: tuple[str, ...] = ()
    in_base: Mapping[str, torch.dtype] = field(default_factory=dict)
    written: WrittenModel | None = None
    instead: str = "--dtype bfloat16 or float32"
    tied: tuple[str, ...] = ()

    def loss(
        self, name: str, before: torch.Tensor, merged: torch.Tensor, stored: torch.Tensor | None = None
    ) -> WeightLoss:
        """Return the rounding loss of a merged parameter. It is measured on the files of `written` or, without these, on `stored`."""
        if self.written is None:
            stored = self._unbiased(name, merged) if stored is None else stored
            return rounding_loss(name, before, merged, stored, self.dtype(name))
        values, dtype, form = self.written.read(name)
        loss = rounding_loss(name, before, merged, values, dtype)
        if form is None:
            return loss
        same = codes(before.float(), form) == codes(merged.float(), form)
        return replace(loss, vanished=int((same & (before.float() != merged.float()).flatten()).sum()))

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32 if is_pinned(name, self.pinned) else self.in_base.get(name, self.target)

    def rounded(
        self, tensors: Mapping[str, torch.Tensor], changed: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Round each tensor to the dtype of its file. Round tensors in `changed` stochastically.

        Raise PrecisionError on overflow.
        """
        result, problems = {}, []
        for name, value in tensors.items():
            dtype = self.dtype(name)
            rounded = self._unbiased(name, value) if name in changed else value.to(dtype)
            result[name] = rounded if value.is_floating_point() else value
            if dtype == torch.float16 != value.dtype and not torch.isfinite(result[name]).all():
                what = f"{name}: values up to {float(value.float().abs().max()):.4g}"
                problems.append(Problem(what, "at most 65504", f"set {self.instead}"))
        if problems:
            raise PrecisionError("float16 cannot represent the merged weights", problems)
        return result

    def _unbiased(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return unbiased(self.tied[0] if name in self.tied else name, values, self.dtype(name))


class Merging:
    """A merge of an adapter into a base model, part by part.

    Args:
        one_dtype: True to use `target` even for tensors whose dtype in the files of the base is not the most common dtype.
        written: files of an earlier merge with the same arguments, to measure the errors of the weights; else None.

    Attributes:
        model: the base; the merged model has its class and config.
        notes: differences from the base, in sentences.
        weights: rounding loss of each parameter that the adapter changes. It is complete after the iteration over `parts`.
    """

    def __init__(
        self,
        adapter: Adapter,
        policy: PrecisionPolicy,
        target: torch.dtype,
        *,
        one_dtype: bool = False,
        written: WrittenModel | None = None,
        instead: str = Rounding.instead,
    ) -> None:
        dense = dense_policy(policy)
        # A dense base is merged on the CPU, which has more memory; a quantized base stays on the device of its codes.
        policy = policy if policy.quantized else replace(policy, device="cpu")
        self._deferred = deferred_base(adapter)
        self.model = load_base(adapter, policy, self._deferred)
        adapter = without_part(self.model, adapter, policy)
        self._deferred.dequantize(self.model, dense.plain)
        tied = _untie(self.model)
        self._blocks = self._deferred.blocks
        self._names = _stored_names(self.model)
        names = {id(value): name for name, value in self.model.named_parameters(remove_duplicate=False)}
        self._tied = tuple(names[key] for key in tied)
        self._peft = inject(self.model, adapter, dense)
        if not hasattr(self._peft.base_model, "merge_and_unload"):
            kind = type(self._peft.base_model).__name__
            what = f"{adapter.directory}: a {kind}, which PEFT cannot merge"
            raise UsageError.of("this adapter cannot be merged", what, _MERGEABLE, _BESIDE)
        # Copies of the base's parameters that the adapter's file replaces (`bias="all"`).
        prefix = getattr(self._peft.base_model, "prefix", "lora_")
        trained = ((n, p) for n, p in self._peft.named_parameters() if p.requires_grad)
        others = (prefix, *_MERGED_OTHERWISE)
        before_training = {n: p.detach().clone() for n, p in trained if not any(part in n for part in others)}
        fill(self._peft, adapter)
        stored = {} if one_dtype else self._deferred.other_dtypes
        self._rounding = Rounding(target, dense.pinned, stored, written, instead, self._tied)
        self._untouched = set(stored) - adapter.shapes.keys()
        self.weights: tuple[WeightLoss, ...] = ()
        self.notes: list[str] = []
        replaced = _replaced(self._peft, before_training)
        self._changed = frozenset(replaced)
        self._outside = self._merged(None)
        losses = (self._rounding.loss(name, before, after) for name, (before, after) in replaced.items())
        self.weights += tuple(loss for loss in losses if loss.entries)
        if self._tied:
            self._tie_again(*self._tied)
        self.model.config.dtype = target

    @property
    def shapes(self) -> dict[str, torch.Tensor]:
        """A meta tensor for each parameter and buffer of the merged model, by name, in the order of `parts`."""
        shapes = {}
        for name in sorted(self._names, key=lambda name: name not in self._outside):
            value = self._names[name]
            dtype = self._rounding.dtype(name) if value.is_floating_point() else value.dtype
            shapes[name] = torch.empty(value.shape, dtype=dtype, device="meta")
        return shapes

    def parts(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the tensors of the merged model by name: first the tensors outside of its blocks, then each block.

        The tensors of a part are freed before the next part is merged. The parts can be iterated only once.

        Raises:
            UsageError: PEFT cannot merge this kind of adapter.
            PrecisionError: float16 cannot represent a weight.
            CheckpointError: the base's files are damaged.
        """
        yield self._outside
        self._outside = {}
        uses = Counter(id(p) for block in self._blocks for p in set(block.module.parameters()))
        for block in self._blocks:
            self._deferred.read(block)
            yield self._merged(block)
            self._deferred.drop(block)
            for parameter in block.module.parameters():
                if uses[id(parameter)] == 1:  # the blocks of a VB-LoRA share its vectors
                    parameter.data = parameter.data.new_empty(0)
        self.weights = tuple(sorted(self.weights, key=lambda weight: weight.name))

    def measured(self) -> tuple[WeightLoss, ...]:
        """Iterate over all `parts`, and return the complete `weights`."""
        for _ in self.parts():
            pass
        return self.weights

    def _merged(self, block: Block | None) -> dict[str, torch.Tensor]:
        """Merge the layers of a block, or the layers outside of blocks if `block` is None. Return the tensors by name."""
        prefix, root = ("", self._peft) if block is None else (f"{block.name}.", block.module)
        elsewhere = tuple(f"{other.name}." for other in self._blocks) if block is None else ()
        for path, layer in tuner_layers(root):
            name = base_name(f"{prefix}{path}")
            if name.startswith(elsewhere):
                continue
            self._untouched -= {f"{name}.{leaf}" for leaf, _ in layer.get_base_layer().named_parameters()}
            self.weights += tuple(_merge_layer(name, layer, self._rounding))
        wanted = {name for name in self._names if name.startswith(prefix) and not name.startswith(elsewhere)}
        tensors: dict[str, torch.Tensor] = {}
        named = root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False)
        for path, value in chain(*named):
            name = base_name(f"{prefix}{path}")
            # A module that was trained as a whole has an old and a trained copy: the trained copy is used.
            if name in wanted and (name not in tensors or ".modules_to_save." in path):
                tensors[name] = value.detach()
        for name in self._untouched & wanted:
            stored = self._deferred.stored.read(name)
            if stored.shape == tensors[name].shape:  # training may have added tokens to an embedding
                tensors[name] = stored
        in_order = {name: tensors[name] for name in self._names if name in wanted}
        return self._rounding.rounded(in_order, self._changed)

    def _tie_again(self, first: str, *others: str) -> None:
        """Tie embeddings that have equal values after the merge. If the values differ, add a note."""
        equal = all(torch.equal(self._outside[first], self._outside[name]) for name in others)
        config = self.model.config
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = equal
        if equal:
            for name in others:
                del self._outside[name], self._names[name]
            return
        self.notes.append(
            "the base ties input and output embeddings, and the adapter changes them differently: the merged model "
            "stores both (tie_word_embeddings is false)"
        )


def dense_policy(policy: PrecisionPolicy) -> PrecisionPolicy:
    """Return the policy of the dequantized base. Adapters stay in float32, so that they are not rounded."""
    eight = "int8" in (policy.storage, *(layer.storage for layer in policy.layers))
    plain = torch.float32 if eight else policy.plain
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
    """Change a quantized base as OLoRA's initialisation does. Return the adapter with PEFT's default initialisation."""
    if not policy.quantized or getattr(adapter.config, "init_lora_weights", None) != "olora":
        return adapter
    inject(model, adapter, policy).base_model.unload()
    config = copy.copy(adapter.config)
    config.init_lora_weights = True
    return replace(adapter, config=config)


def _untie(model: Any) -> list[int]:
    """Separate tied embeddings, so that each can be merged. Return their ids, with the id of the input embedding
    first.

    The list is empty if input and output embeddings are not tied. A model with encoder and decoder may tie other
    embeddings, too.
    """
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    if last is None or first.weight is not last.weight:
        return []
    shared = first.weight
    others = [m for m in model.modules() if m is not first and own_parameters(m).get("weight") is shared]
    for module in others:
        module.weight = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
    return [id(shared), *(id(module.weight) for module in others)]


def _stored_names(model: Any) -> dict[str, torch.Tensor]:
    """Return name -> meta tensor, for each tensor of the model's checkpoint. A shared tensor has only one name."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    state = model.state_dict(keep_vars=True)
    first_names: dict[int, str] = {}
    for name, value in sorted(state.items(), key=lambda item: item[0] in tied):
        first_names.setdefault(id(value), name)
    names = set(first_names.values()) - never_saved(model)
    held = ((n, v) for n, v in state.items() if n in names and isinstance(v, torch.Tensor))
    return {name: torch.empty(v.shape, dtype=v.dtype, device="meta") for name, v in held}


_MERGED_OTHERWISE = ("modules_to_save", "trainable_tokens")
"""Parts of the names of trained parameters that are not copies of parameters of the base."""


def tuner_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    modules = list(module.named_modules())
    return ((name, layer) for name, layer in modules if isinstance(layer, BaseTunerLayer))


def merge_in_float32(name: str, layer: Any) -> None:
    """Merge one PEFT layer in place. Raise UsageError if PEFT cannot merge this kind of adapter."""
    for parameter in layer.get_base_layer().to(torch.float32).parameters():
        parameter.data = parameter.data.clone()  # HiRA writes into the weight
    try:
        layer.merge(safe_merge=True)
    except (NotImplementedError, ValueError) as error:
        what = f"{name}: {error}"
        raise UsageError.of("this adapter cannot be merged", what, _MERGEABLE, _BESIDE) from error


def _merge_layer(name: str, layer: Any, rounding: Rounding) -> list[WeightLoss]:
    named = ((f"{name}.{leaf}", parameter) for leaf, parameter in layer.get_base_layer().named_parameters())
    before = {full: parameter.data for full, parameter in named}
    merge_in_float32(name, layer)  # LN tuning replaces the base layer
    after = {f"{name}.{leaf}": parameter for leaf, parameter in layer.get_base_layer().named_parameters()}
    rounded = rounding.rounded({full: parameter.data for full, parameter in after.items()}, after)
    losses = [rounding.loss(full, before[full], after[full].data, rounded[full]) for full in after]
    for full, parameter in after.items():
        parameter.data = rounded[full]
    return [loss for loss in losses if loss.entries]


def _replaced(
    peft_model: Any, before_training: Mapping[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return name -> (base values, trained values) for biases and `modules_to_save`, which were trained directly."""
    from peft.utils import ModulesToSaveWrapper

    parameters = dict(peft_model.named_parameters())
    held = ((name, before) for name, before in before_training.items() if name in parameters)
    pairs = {base_name(name): (before, parameters[name].data) for name, before in held}
    for name, module in peft_model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            after = dict(module.modules_to_save[module.active_adapter].named_parameters())
            for leaf, before in module.original_module.named_parameters():
                if leaf in after:
                    pairs[f"{base_name(name)}.{leaf}"] = (before.data, after[leaf].data)
    return pairs


# Bytes of a GGUF block before its codes of 4 or 8 bits.
_SCALES = {"q8_0": 2, "q5_1": 8, "q5_0": 6, "q4_1": 4, "q4_0": 2}
_DROPPED = {torch.bfloat16: 16, torch.float16: 13}  # bits of float32's mantissa


def unbiased(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 values to 16 bits, up or down at random, so that the mean error is 0. Cast all other values.

    Rounding to nearest would lose every update that is smaller than half of a rounding step of the 16-bit weight.
    Stochastic rounding keeps such updates on average (Gupta et al., https://arxiv.org/abs/1502.02551). The random
    numbers depend only on the weight's name.
    """
    dropped = _DROPPED.get(dtype)
    if dropped is None or values.dtype != torch.float32:
        return values.to(dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    bits = torch.randint(1 << dropped, values.shape, generator=generator, dtype=torch.int32)
    bits += values.contiguous().view(torch.int32)
    return bits.bitwise_and_(-1 << dropped).view(torch.float32).to(dtype)


def as_stored(name: str, layer: nn.Module, values: torch.Tensor, form: str) -> torch.Tensor:
    """Return a merged float32 parameter rounded to a float dtype, a bitsandbytes format or GGUF blocks."""
    if form in QUANTIZATIONS:
        return _in_bitsandbytes(layer, values, form)
    if form not in GGUF_BLOCKS:
        return unbiased(name, values, parse_dtype(form))
    if values.ndim < 2 or values.shape[-1] % 32:
        return values
    import gguf

    kind = gguf.GGMLQuantizationType[form.upper()]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(values.contiguous().numpy(), kind), kind))


def _in_bitsandbytes(layer: nn.Module, values: torch.Tensor, form: str) -> torch.Tensor:
    transposed = type(layer).__name__ == "Conv1D"
    if values.ndim != 2 or not (transposed or isinstance(layer, nn.Linear)):
        return values
    result = damage.rounded((values.T if transposed else values).contiguous(), form)
    return result.T.contiguous() if transposed else result


def codes(values: torch.Tensor, form: str) -> torch.Tensor:
    """Quantize a float32 matrix to a format. Return its 4-bit or 8-bit codes in a flat tensor, with one code per element."""
    if form == "int8":
        return quantize_int8(values)[0].flatten()
    if form in FOUR_BITS:
        packed = quantize_4bit(values.contiguous(), form)[0].flatten()
    else:
        import gguf

        kind = gguf.GGMLQuantizationType[form.upper()]
        _, size = gguf.GGML_QUANT_SIZES[kind]
        stored = torch.from_numpy(gguf.quantize(values.contiguous().numpy(), kind)).view(-1, size)
        packed = stored[:, _SCALES[form] :].flatten()
        if form == "q8_0":
            return packed
    return torch.stack([packed >> 4, packed & 15], 1).flatten()


class WrittenModel:
    """A merged model with weights in the format `stored`, which is opened from its directory or GGUF file (`path`).

    transformers loads a directory. A GGUF file is read tensor by tensor, because transformers would load the whole file in
    float32.
    """

    def __init__(self, model_class: Any, path: Path, stored: str | None) -> None:
        self._stored = stored
        if stored in GGUF_TYPES:
            checkpoint = open_checkpoint(path)
            checkpoint.require_complete_gguf()
            model = blank_model(checkpoint.model_config)
            self._weights = StoredWeights(model, checkpoint.require_headers())
            self._tied: Mapping[str, str] = model.all_tied_weights_keys
            return
        with without_bars():
            self._model = pretrained(model_class, path, dtype="auto")

    @torch.no_grad()
    def read(self, name: str) -> tuple[torch.Tensor, torch.dtype | None, str | None]:
        """Return the float32 values of a parameter, its stored dtype (None for codes), and the format of codes, if known."""
        if self._stored in GGUF_TYPES:
            name = name if name in self._weights.shapes else self._tied[name]
            stored = self._weights.stored(name)
            form = stored.form.lower() if stored.form.lower() in GGUF_BLOCKS else None
            return self._weights.read(name).float(), stored.weight.dtype, form
        owner, _, leaf = name.rpartition(".")
        layer = self._model.get_submodule(owner)
        if leaf == "weight" and kind_of(layer) in ("linear4bit", "linear8bit"):
            return held_weight(layer, torch.float32), None, self._stored
        value = self._model.get_parameter(name).detach()
        return value.to("cpu", torch.float32), value.dtype, None
