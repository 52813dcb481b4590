"""Values of a GGUF file's tensors: blocks unpacked by gguf, in the order that transformers' models have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from isotype.checkpoint.formats.headers import CheckpointHeaders
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.mapping.gguf_names import gguf_names
from isotype.checkpoint.mapping.weight_map import Source

_PIECE = 1 << 17
"""Elements that are unpacked at a time: they and what gguf computes on the way stay in the caches."""

Turn = Callable[[Source, Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]


def unpack_blocks(header: TensorHeader, raw: torch.Tensor) -> torch.Tensor:
    """float32 values of a block-quantized tensor, bit by bit those of `gguf.quants.dequantize`.

    Args:
        header: of the tensor; its `dtype_name` is ggml's name of the type.
        raw: its bytes.
    """
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[header.dtype_name]
    columns = header.shape[-1] if header.shape else 1
    rows = max(1, header.elements // columns)
    blocks = raw.numpy().reshape(rows, -1)
    values = np.empty((rows, columns), np.float32)
    step = max(1, _PIECE // columns)

    def piece(first: int) -> None:
        values[first : first + step] = dequantize(blocks[first : first + step], kind)

    with ThreadPoolExecutor(max(1, min(torch.get_num_threads(), rows // (4 * step)))) as pool:
        list(pool.map(piece, range(0, rows, step)))  # a list: errors are raised here
    return torch.from_numpy(values).view(header.shape)


def turning(model: Any, headers: CheckpointHeaders) -> Turn | None:
    """The conversion of the tensors of a GGUF file: transformers' own `TensorProcessor` for the architecture; of other files none.

    Args:
        model: of transformers; it may lie on the meta device.
        headers: of the checkpoint.
    """
    if headers.format != "gguf":
        return None
    from transformers import modeling_gguf_pytorch_utils as gguf

    architecture, config = headers.architecture, model.config.to_dict()
    processor = gguf.TENSOR_PROCESSORS.get(architecture, gguf.TensorProcessor)(config=config)
    names = dict(gguf_names(model, architecture))

    def turn(source: Source, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # Experts are put together in the dict; everything else is returned.
        tensors: dict[str, torch.Tensor] = {}
        for tensor, _ in source.tensors:
            result = processor.process(
                weights=values[tensor.name].float().numpy(),
                name=tensor.weight.name,
                tensor_key_mapping=names,
                parsed_parameters={"tensors": tensors, "config": config},
            )
            if result.name is not None:
                tensors[source.target] = torch.from_numpy(np.ascontiguousarray(result.weights))
        return tensors

    return turn
