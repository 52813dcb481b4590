"""The packaged model as a folder of dense weights, which the peers of a benchmark can load."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from isotype.core.cache import default_cache_dir


def dense_folder(model: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A directory with the weights of a GGUF model in `dtype` and its tokenizer; made once, in isotype's cache."""
    from transformers import AutoTokenizer

    import isotype
    from isotype.checkpoint.checkpoint import open_checkpoint

    target = (
        default_cache_dir() / "benchmarks" / f"{model.replace(':', '-')}-{str(dtype).removeprefix('torch.')}"
    )
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "model"
        isotype.load(model, isotype.resolve_precision(model, dtype, device="cpu")).save_pretrained(made)
        AutoTokenizer.from_pretrained(open_checkpoint(model).tokenizer_source()).save_pretrained(made)
        made.rename(target)
    return target
