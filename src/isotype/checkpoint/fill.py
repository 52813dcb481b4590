"""Fills a model's tensors one at a time from mapped files, and converts them to the model's dtypes and formats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from isotype.checkpoint.formats.mapped import BUFFER, MappedFiles, staged
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.mapping.match import aliases
from isotype.checkpoint.mapping.stored import StoredTensor, blank_tensors
from isotype.checkpoint.mapping.weight_map import CONVERSION_ERRORS, FROM_GGUF, Source, WeightMap, converted
from isotype.checkpoint.values import ConvertGguf, dense
from isotype.compat.torch import EXTRA_STATE, own_parameters
from isotype.core.console import Bar
from isotype.core.formats import FORMATS, MXFP4
from isotype.core.names import grouped
from isotype.model.boundary_choice import float32_by_ranges
from isotype.model.enforce import dtypes_to_load
from isotype.model.experts.quantize import place_quantized
from isotype.model.experts.stack import codes_of, place_stack, quantized_stack, saved_stack, shape_of
from isotype.model.finite import not_finite
from isotype.model.fitted import quantize_by
from isotype.model.quantize import quantize_int8
from isotype.model.quantized import replaces_conv1d
from isotype.model.walk import places
from isotype.precision.policy import PrecisionPolicy, is_pinned


@dataclass(frozen=True)
class Placement:
    """The device, dtype and format in which each tensor of a model is stored.

    Attributes:
        dtypes: dtype of each float tensor by name; for a quantized weight, the dtype before quantization.
        quantized: names of the weights of bitsandbytes layers.
        convert_gguf: function that converts a GGUF file's tensors; None for other files.
        modules: a module's name before PEFT added adapters -> module; empty if the model has no adapters.
        stacks: name of a quantized, stacked expert weight -> its quantization format.
        double_quant: True if the constants of `stacks` are quantized, too.
        moments: weight name -> second moments of the layer's input channels; only formats in `FITTED` use moments.
    """

    dtypes: Mapping[str, torch.dtype]
    quantized: frozenset[str]
    device: Callable[[str], Any] = lambda name: "cpu"
    convert_gguf: ConvertGguf | None = None
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)
    double_quant: bool = False
    moments: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def owner(self, model: nn.Module, name: str) -> nn.Module:
        path = name.rpartition(".")[0]
        return self.modules[path] if path in self.modules else model.get_submodule(path)


def dtypes_of(
    model: nn.Module, policy: PrecisionPolicy, quantized: Collection[str], pinned: Sequence[str]
) -> dict[str, torch.dtype]:
    """Return `Placement.dtypes` of a model under a policy; tensors that match a `pinned` pattern stay in float32."""
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


def fill(
    model: nn.Module,
    weights: WeightMap,
    placement: Placement,
    *,
    shown: bool = True,
    staging: int | None = None,
) -> tuple[set[str], dict[str, str]]:
    """Fill a model's tensors from a checkpoint; tensors that the checkpoint lacks stay unchanged.

    Peak memory is the filled model plus the largest tensor. Stacked experts are read one by one if they are quantized. A
    tensor that needs no conversion stays memory-mapped. For weights on a GPU, a thread reads ahead into two additional
    buffers in pinned memory.

    Args:
        model: a model on the meta device whose quantized layers are bitsandbytes layers.
        staging: bytes of a read buffer; by default, `BUFFER` for weights on a GPU, and no buffers on the CPU.

    Returns:
        The names of the filled tensors, and name -> problem for each parameter that is not finite.
    """
    files = MappedFiles()
    sources = list({id(source): source for source in weights.sources.values()}.values())
    filled: set[str] = set()
    broken: dict[str, str] = {}
    bar = Bar("loading", shown)
    bar.total = len(sources)
    pinned = _to_gpu(sources, placement)
    size = staging or (BUFFER if pinned else None)
    read = _mapped(sources, files) if size is None else _staged(sources, files, placement, size, pinned)
    with closing(bar), closing(read):
        for source, tensors in read:
            placed = _place(model, source, tensors, placement)
            filled.update(placed)
            broken |= not_finite(_values_to_check(model, placed, placement))
            if tensors is files and not any(files.holds(value) for value in placed.values()):
                files.release(_headers(source))
            bar.advance()
    return filled, broken


def _to_gpu(sources: Sequence[Source], placement: Placement) -> bool:
    return any(torch.device(placement.device(source.target)).type in ("cuda", "xpu") for source in sources)


def _mapped(sources: Sequence[Source], files: MappedFiles) -> Generator[tuple[Source, Tensors], None, None]:
    for source, after in zip(sources, [*sources[1:], None], strict=True):
        if after is not None:
            files.ahead(_headers(after))
        yield source, files


def _staged(
    sources: Sequence[Source], files: MappedFiles, placement: Placement, size: int, pinned: bool
) -> Generator[tuple[Source, Tensors], None, None]:
    """Yield (source, buffer with all tensors of the source); without such a buffer, yield (source, mapped files)."""
    # A weight that is saved quantized may use the tensor's memory without a copy, and a reused buffer would overwrite it.
    saved = {id(source) for source in sources if not pinned and _is_saved(source, placement)}
    work = [(source, () if id(source) in saved else tuple(_headers(source))) for source in sources]
    with closing(staged(work, size, pinned=pinned)) as read:
        for source, tensors in read:
            buffered = tensors is not None and tensors.at.keys() >= {*_headers(source)}
            yield source, tensors if tensors is not None and buffered else files


def _is_saved(source: Source, placement: Placement) -> bool:
    first, _ = source.tensors[0]
    if first.form == MXFP4:
        return placement.stacks.get(source.target) == MXFP4 and first.problem is None
    saved = first.form in FORMATS and bool(first.constants) and first.scheme is None
    return saved and (source.target in placement.quantized or source.target in placement.stacks)


def _headers(source: Source) -> Iterator[TensorHeader]:
    for tensor, _ in source.tensors:
        yield from tensor.parts


def _place(model: nn.Module, source: Source, files: Tensors, placement: Placement) -> dict[str, torch.Tensor]:
    target = source.target
    first, _ = source.tensors[0]
    if _is_saved(source, placement):
        saved = _saved(model, target, first, files, placement)
        return {target: saved if target in placement.stacks else _put(model, target, saved, placement)}
    dtype = placement.dtypes.get(target, torch.float32)
    if target in placement.stacks and set(source.shapes) <= {target}:
        return {target: _placed_stack(model, target, _parts(model, source, files, placement), placement)}
    tensors = read_source(model, source, files, dtype, placement.convert_gguf)
    return {name: place(model, name, value, placement) for name, value in tensors.items()}


def place(model: nn.Module, name: str, value: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Cast or quantize a dense tensor, set the result as the model's tensor `name`, and return the result."""
    if name in placement.stacks:
        return _placed_stack(model, name, [value], placement)
    return _put(model, name, _stored(model, name, value, placement), placement)


def _parts(model: nn.Module, source: Source, files: Tensors, placement: Placement) -> Iterator[torch.Tensor]:
    """Yield a stacked weight expert by expert, or the whole weight if it cannot be divided.

    The memory of an expert is freed before the next expert is read.
    """
    name, dtype, convert_gguf = source.target, placement.dtypes[source.target], placement.convert_gguf
    shape = shape_of(placement.owner(model, name), name.rpartition(".")[2])
    for row in range(shape[0]):
        part = rows_of(model, source, name, shape, row, row + 1) or source
        values = read_source(model, part, files, dtype, convert_gguf).get(name)
        if part is not source and (values is None or values.shape != (1, *shape[1:])):
            part, values = source, read_source(model, source, files, dtype, convert_gguf)[name]
        assert values is not None
        yield values
        if isinstance(files, MappedFiles):
            files.release(_headers(part))
        if part is source:
            return


def _placed_stack(
    model: nn.Module, name: str, parts: Iterable[torch.Tensor], placement: Placement
) -> torch.Tensor:
    return place_quantized(
        placement.owner(model, name),
        name.rpartition(".")[2],
        parts,
        placement.stacks[name],
        placement.dtypes[name],
        double_quant=placement.double_quant,
        device=placement.device(name),
    )


def _values_to_check(
    model: nn.Module, placed: Mapping[str, torch.Tensor], placement: Placement
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in placed.items():
        stack = quantized_stack(placement.owner(model, name), name.rpartition(".")[2])
        if stack is not None:
            yield from ((name, constants) for constants in stack.factors())
        elif isinstance(value, nn.Parameter):
            yield name, value


def _put(model: nn.Module, name: str, value: torch.Tensor, placement: Placement) -> torch.Tensor:
    leaf = name.rpartition(".")[2]
    module: Any = placement.owner(model, name)
    if leaf == EXTRA_STATE:
        module.set_extra_state(value)
        return value
    if leaf in own_parameters(module) and not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=value.is_floating_point())
    setattr(module, leaf, value)
    return value


def _stored(model: nn.Module, name: str, value: torch.Tensor, placement: Placement) -> torch.Tensor:
    device = placement.device(name)
    if name in placement.quantized:
        layer, dtype = placement.owner(model, name), placement.dtypes[name]
        return _quantized_parameter(layer, value.to(device), dtype, placement.moments.get(name))
    dtype = placement.dtypes.get(name, value.dtype) if value.is_floating_point() else value.dtype
    value = value.to(device, dtype)
    # Copy a part of a split tensor, so that it can be saved alone and the rest of the storage is freed.
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def _quantized_parameter(
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
        codes, state = quantize_by(
            moments,
            value.to(dtype).contiguous(),
            old.quant_type,
            blocksize=old.blocksize,
            double_quant=old.compress_statistics,
            storage=old.quant_storage,
        )
        settings |= {"quant_state": state, "bnb_quantized": True}
        layer.quant_state = state
    parameter: torch.Tensor = type(old)(codes, requires_grad=False, **settings)
    return parameter


def _saved(
    model: nn.Module, name: str, tensor: StoredTensor, files: Tensors, placement: Placement
) -> torch.Tensor:
    layer: Any = placement.owner(model, name)
    device = placement.device(name)
    weight = files.tensor(tensor.weight)
    constants = {part.name: files.tensor(part) for part in tensor.constants}
    if name in placement.stacks:
        leaf = name.rpartition(".")[2]
        codes, stack = saved_stack(weight, constants, layer, leaf, placement.dtypes[name], device)
        place_stack(layer, leaf, codes, stack)
        return codes_of(layer, leaf)
    old = layer.weight
    if tensor.form == "int8":
        scales = next(value for key, value in constants.items() if key.endswith(".SCB"))
        parameter = type(old)(weight, requires_grad=False, **(vars(old) | {"SCB": scales})).to(device)
    else:
        parameter = type(old).from_prequantized(
            data=weight, quantized_stats=constants, requires_grad=False, device=device, module=layer
        )
    return parameter  # type: ignore[no-any-return]


class Tensors(Protocol):
    def tensor(self, header: TensorHeader) -> torch.Tensor: ...


def read_source(
    model: Any, source: Source, files: Tensors, dtype: torch.dtype, convert_gguf: ConvertGguf | None
) -> dict[str, torch.Tensor]:
    """Read the tensors of a source, convert them, and return the resulting dense tensors of the model by name.

    Args:
        dtype: dtype for the values of quantized tensors; other tensors keep their stored dtype.
        convert_gguf: function that converts a GGUF file's tensors; None for other files.
    """
    values = {tensor.name: dense(tensor, files.tensor, dtype) for tensor, _ in source.tensors}
    if source.conversion is not FROM_GGUF:
        return converted(model, source, values)
    assert convert_gguf is not None
    return convert_gguf(source, values)


def rows_of(model: Any, source: Source, name: str, shape: torch.Size, start: int, stop: int) -> Source | None:
    """Return the part of a source from which rows `start` to `stop` of the tensor `name` can be made.

    If each row is made from separate tensors (a row is an expert), the part contains the tensors of these rows.
    Otherwise, the part contains these rows of every source tensor. Returns None if neither part makes these rows.
    """
    rows = torch.Size((stop - start, *shape[1:]))
    by_pattern = grouped(source.tensors, lambda pair: pair[1]).values()
    if source.conversion not in (None, FROM_GGUF) and all(len(tensors) == shape[0] for tensors in by_pattern):
        some = tuple(tensor for tensors in by_pattern for tensor in tensors[start:stop])
        part = replace(source, tensors=some, shapes={name: rows})
        if _makes(model, part, name, rows):
            return part
    # A conversion may permute the rows of a matrix, but not experts.
    if len(shape) != 3 and source.conversion is not None:
        return None
    sliced = _sliced(replace(source, shapes={name: rows}), shape[0], start, stop)
    return sliced if sliced is not None and _makes(model, sliced, name, rows) else None


def _makes(model: Any, source: Source, name: str, shape: torch.Size) -> bool:
    if source.conversion is FROM_GGUF:  # the shape is checked after the conversion
        return True
    try:
        return converted(model, source, blank_tensors(t for t, _ in source.tensors))[name].shape == shape
    except CONVERSION_ERRORS:
        return False


def _sliced(source: Source, rows: int, start: int, stop: int) -> Source | None:
    """Return a source with only rows `start` to `stop` of each tensor; None if a tensor cannot be divided into rows."""

    def cut(header: TensorHeader) -> TensorHeader:
        size = header.bytes // rows
        shape, begin = (stop - start, *header.shape[1:]), header.begin + start * size
        return replace(header, shape=shape, bytes=size * (stop - start), begin=begin)

    tensors = []
    for tensor, pattern in source.tensors:
        alike = all(p.begin and p.shape[:1] == (rows,) and p.bytes % rows == 0 for p in tensor.parts)
        if not alike or tensor.problem is not None or (tensor.constants and tensor.scheme is None):
            return None
        scheme = tensor.scheme
        if scheme is not None:
            if scheme.transposed:  # rows of the weight are columns in the file
                return None
            scheme = replace(
                scheme,
                shape=(stop - start, *scheme.shape[1:]),
                scale=cut(scheme.scale),
                zero=scheme.zero and cut(scheme.zero),
                second=scheme.second and cut(scheme.second),
            )
        constants = tuple(map(cut, tensor.constants))
        part = replace(tensor, weight=cut(tensor.weight), constants=constants, scheme=scheme)
        tensors.append((part, pattern))
    return replace(source, tensors=tuple(tensors))
