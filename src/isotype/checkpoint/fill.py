"""Fills the tensors of a model one at a time from mapped files, and converts them to the model's dtypes and formats."""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.formats.mapped import MappedFiles, Tensors, staged
from isotype.checkpoint.mapping.match import aliases
from isotype.checkpoint.mapping.stored import StoredTensor
from isotype.checkpoint.mapping.weight_map import Source
from isotype.checkpoint.stored_weights import StoredWeights
from isotype.compat.torch import EXTRA_STATE, own_parameters
from isotype.core.console import with_bar
from isotype.core.formats import FORMATS, MXFP4
from isotype.model.boundary_choice import float32_by_ranges
from isotype.model.enforce import dtypes_to_load
from isotype.model.experts.quantize import place_quantized, store_blank
from isotype.model.experts.stack import codes_of, place_stack, quantized_stack, saved_stack, shape_of
from isotype.model.finite import not_finite
from isotype.model.quantize import quantize_4bit, quantize_int8
from isotype.model.quantized import replaces_conv1d
from isotype.model.walk import places
from isotype.precision.policy import PrecisionPolicy, is_pinned

Reading = Generator[tuple[Source, Tensors], None, None]
"""Generator of (source, reader of its tensors)."""


class Filler:
    """Fills a model's tensors from a checkpoint, in the dtypes and formats of a policy.

    The constructor replaces stacked experts by blank codes in the order of the model, because names in an adapter's
    file depend on this order. `fill` places weights in another order.

    Args:
        stored: the weights of a model on the meta device whose quantized layers are bitsandbytes layers.
        quantized: names of the weights of bitsandbytes layers.
        pinned: patterns for the names of tensors that stay in float32.
        stacks: name of a quantized, stacked expert weight -> its quantization format.
        device: function that returns the device of a tensor from the tensor's name.

    Attributes:
        dtypes: dtype of each float tensor by name. For a quantized weight, this is the dtype before quantization.
    """

    def __init__(
        self,
        stored: StoredWeights,
        policy: PrecisionPolicy,
        quantized: Collection[str],
        pinned: Sequence[str],
        stacks: Mapping[str, str],
        device: Callable[[str], Any],
    ) -> None:
        self.stored, self.quantized, self.stacks, self.device = stored, quantized, stacks, device
        self.dtypes = dtypes_of(stored.model, policy, quantized, pinned)
        self._policy = policy
        store_blank(stored.model, stacks, policy)
        # PEFT may rename modules before a deferred weight is read.
        self._modules = dict(stored.model.named_modules(remove_duplicate=False))

    def owner(self, name: str) -> tuple[Any, str]:
        """Return the module that contains the tensor `name`, and the name of the tensor in this module."""
        path, _, leaf = name.rpartition(".")
        return self._modules[path], leaf

    def fill(self, sources: Mapping[str, Source], shown: bool = True) -> tuple[set[str], dict[str, str]]:
        """Fill tensors from `sources`, a part of `stored.sources`. Other tensors stay unchanged.

        Peak memory is the size of the filled model plus the largest tensor. Stacked experts are read one by one if they
        are quantized. A tensor that needs no conversion stays memory-mapped. For weights on a GPU, a thread reads ahead
        into two additional buffers in pinned memory.

        Returns:
            The names of the filled tensors, and name -> problem for each parameter that is not finite.
        """
        files = MappedFiles()
        work = list({id(source): source for source in sources.values()}.values())
        filled: set[str] = set()
        broken: dict[str, str] = {}
        read = self._staged(work, files) if any(map(self._on_gpu, work)) else _mapped(work, files)
        with closing(read):
            for source, tensors in with_bar(read, "loading", len(work), shown):
                placed = self._read(source, tensors)
                filled.update(placed)
                broken |= not_finite(self._values_to_check(placed))
                if tensors is files and not any(files.holds(value) for value in placed.values()):
                    files.release(source.headers)
        return filled, broken

    def place(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Cast or quantize a dense tensor, set the result as the model's tensor `name`, and return the result."""
        if name in self.stacks:
            return self._place_stack(name, [value])
        device = self.device(name)
        if name in self.quantized:
            moments = self._policy.moments_of(name.removesuffix(".weight"))
            layer, _ = self.owner(name)
            return self._put(name, _quantized(layer, value.to(device), self.dtypes[name], moments))
        dtype = self.dtypes.get(name, value.dtype) if value.is_floating_point() else value.dtype
        value = value.to(device, dtype)
        # Copy a part of a split tensor, so that it can be saved alone and the rest of the storage is freed.
        return self._put(name, value if value.untyped_storage().nbytes() == value.nbytes else value.clone())

    def _on_gpu(self, source: Source) -> bool:
        return torch.device(self.device(source.target)).type in ("cuda", "xpu")

    def _staged(self, sources: Sequence[Source], files: MappedFiles) -> Reading:
        """Yield (source, buffer with all its tensors), or (source, mapped files) if no buffer contains them."""
        # On the CPU, a weight in its saved format is used without a copy. A reused buffer would overwrite it.
        kept = {id(source) for source in sources if self._keeps_format(source) and not self._on_gpu(source)}
        work = [(source, () if id(source) in kept else source.headers) for source in sources]
        with closing(staged(work)) as read:
            for source, tensors in read:
                buffered = tensors is not None and tensors.at.keys() >= {*source.headers}
                yield source, tensors if tensors is not None and buffered else files

    def _keeps_format(self, source: Source) -> bool:
        first, _ = source.tensors[0]
        if first.form == MXFP4:
            return self.stacks.get(source.target) == MXFP4 and first.problem is None
        saved = first.form in FORMATS and bool(first.constants) and first.scheme is None
        return saved and (source.target in self.quantized or source.target in self.stacks)

    def _read(self, source: Source, files: Tensors) -> dict[str, torch.Tensor]:
        target = source.target
        if self._keeps_format(source):
            return {target: self._place_saved(target, source.tensors[0][0], files)}
        if target in self.stacks and set(source.shapes) <= {target}:
            return {target: self._place_stack(target, self._parts(source, files))}
        tensors = self.stored.read_source(source, files, self.dtypes.get(target, torch.float32))
        return {name: self.place(name, value) for name, value in tensors.items()}

    def _parts(self, source: Source, files: Tensors) -> Iterator[torch.Tensor]:
        """Yield a stacked weight expert by expert, or the whole weight if it cannot be divided."""
        name = source.target
        shape, dtype = shape_of(*self.owner(name)), self.dtypes[name]
        for row in range(shape[0]):
            values, part = self.stored.read_part(source, name, shape, range(row, row + 1), files, dtype)
            yield values
            if isinstance(files, MappedFiles):  # frees an expert before the next is read
                files.release(part.headers)
            if part is source:
                return

    def _place_stack(self, name: str, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """Quantize the experts of a stacked weight, set the weight `name`, and return its codes."""
        options = {"double_quant": self._policy.double_quant, "device": self.device(name)}
        return place_quantized(*self.owner(name), parts, self.stacks[name], self.dtypes[name], **options)

    def _place_saved(self, name: str, tensor: StoredTensor, files: Tensors) -> torch.Tensor:
        """Set a weight that the files store in the format of the model's weight `name`, and return it."""
        layer, leaf = self.owner(name)
        device, weight = self.device(name), files.tensor(tensor.weight)
        constants = {part.name: files.tensor(part) for part in tensor.constants}
        if name in self.stacks:
            place_stack(layer, leaf, *saved_stack(weight, constants, layer, leaf, self.dtypes[name], device))
            return codes_of(layer, leaf)
        old = layer.weight
        if tensor.form == "int8":
            scales = next(value for key, value in constants.items() if key.endswith(".SCB"))
            parameter = type(old)(weight, requires_grad=False, **(vars(old) | {"SCB": scales})).to(device)
        else:
            parameter = type(old).from_prequantized(
                data=weight, quantized_stats=constants, requires_grad=False, device=device, module=layer
            )
        return self._put(name, parameter)

    def _put(self, name: str, value: torch.Tensor) -> torch.Tensor:
        module, leaf = self.owner(name)
        if leaf == EXTRA_STATE:
            module.set_extra_state(value)
            return value
        if leaf in own_parameters(module) and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, requires_grad=value.is_floating_point())
        setattr(module, leaf, value)
        return value

    def _values_to_check(self, placed: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in placed.items():
            stack = quantized_stack(*self.owner(name))
            if stack is not None:
                yield from ((name, constants) for constants in stack.factors())
            elif isinstance(value, nn.Parameter):
                yield name, value


def _mapped(sources: Sequence[Source], files: MappedFiles) -> Reading:
    for source, after in zip(sources, [*sources[1:], None], strict=True):
        if after is not None:
            files.ahead(after.headers)
        yield source, files


def _quantized(
    layer: Any, value: torch.Tensor, dtype: torch.dtype, moments: torch.Tensor | None
) -> torch.Tensor:
    if replaces_conv1d(layer):
        value = value.T
    old = layer.weight
    settings = dict(vars(old))
    if type(old).__name__ == "Int8Params":
        codes, scales = quantize_int8(value)
        settings |= {"CB": codes, "SCB": scales}
    else:
        codes, state = quantize_4bit(
            value.to(dtype).contiguous(),
            old.quant_type,
            blocksize=old.blocksize,
            double_quant=old.compress_statistics,
            storage=old.quant_storage,
            moments=moments,
        )
        settings |= {"quant_state": state, "bnb_quantized": True}
        layer.quant_state = state
    parameter: torch.Tensor = type(old)(codes, requires_grad=False, **settings)
    return parameter


def dtypes_of(
    model: nn.Module, policy: PrecisionPolicy, quantized: Collection[str], pinned: Sequence[str]
) -> dict[str, torch.dtype]:
    """Return `Filler.dtypes` of a model under a policy. Tensors that match a `pinned` pattern stay in float32."""
    wanted = dtypes_to_load(model, tuple(places(model)), policy)
    dtypes = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            dtype = torch.float32 if is_pinned(name, pinned) else value.dtype
            dtypes[name] = dtype if policy.keep_frozen else wanted.get(value, dtype)  # type: ignore[call-overload]
    # int8 has a float32 scale for each row, so it keeps the digits of weights that are small for float16.
    int8 = {name for name in quantized if policy.storage_of(name.removesuffix(".weight")) == "int8"}
    wide = float32_by_ranges(model, policy) | int8
    dtypes |= {name: torch.float32 if name in wide else policy.plain for name in quantized}
    # transformers ties weights after the load, so the values that are loaded must be exact for all their modules.
    tied = (name for name, others in aliases(model).items() if torch.float32 in map(dtypes.get, others))
    return dtypes | dict.fromkeys(tuple(tied), torch.float32)
