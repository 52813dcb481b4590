"""A GGUF file's names of tensors, and a model's for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def gguf_names(model: Any, architecture: str) -> Mapping[str, str]:
    """From a GGUF file's names, `.weight` and `.bias` included, to those of the model's state.

    What transformers' `get_gguf_hf_weights_map` gives, without its walk over all modules, each with a table of its own:
    that takes seconds. gguf knows the names in base models and in parts of models too, so the first parts of a name are
    left out until the rest is known; the fewest win.

    Args:
        model: of transformers; it may lie on the meta device.
        architecture: llama.cpp's name of it, `general.architecture` of the file.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import modeling_gguf_pytorch_utils as gguf

    processor = gguf.TENSOR_PROCESSORS.get(architecture, gguf.TensorProcessor)(config=model.config.to_dict())
    arch = next((arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if arch is None:
        return {}
    known = get_tensor_name_map(arch, model.config.get_text_config().num_hidden_layers)
    names: dict[str, tuple[int, str]] = {}
    for name in model.state_dict():
        parts = name.split(".")
        for skipped in range(len(parts)):
            outer = "".join(f"{part}." for part in parts[:skipped])
            inner = processor.preprocess_name(".".join(parts[skipped:]))
            stem, dot, last = inner.rpartition(".")
            suffix = dot + last if last in ("weight", "bias") else ""
            own = known.get_name(stem if suffix else inner)
            into: dict[str, str] = {}
            if own is not None:
                into[own + suffix] = outer + inner
            else:
                processor.perform_fallback_tensor_mapping(into, suffix, outer, inner)
            for each, target in into.items():
                if each not in names or skipped < names[each][0]:
                    names[each] = (skipped, target)
    return {each: target for each, (_, target) in names.items()}
