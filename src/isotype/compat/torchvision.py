"""torchvision (0.20 to 0.29): its Python code with a torch for which its compiled operators were not built."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from isotype.compat.imports import when_imported

_NAMED_AT_IMPORT = ("nms", "qnms")
"""Operators whose shapes torchvision registers on import, even if they are not loaded."""
_declared: list[Any] = []  # a declaration lives as long as its torch.library.Library


@contextmanager
def importable() -> Iterator[None]:
    """Run `make_importable` before transformers is imported, which imports torchvision even for text models."""
    if "transformers" in sys.modules:
        make_importable()
        yield
        return
    leave = when_imported("transformers", make_importable)
    try:
        yield
    finally:
        leave()


def make_importable() -> None:
    """Let `import torchvision` succeed if its operators do not load: PyPI's CUDA wheel with a CPU build of
    torch.

    Its import needs two operators by name; they are declared without kernels. No image processor calls them;
    if one is called, torch raises.
    """
    if "torchvision" in sys.modules or find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        library: Any = import_module("torch").library.Library("torchvision", "FRAGMENT")
        for name in _NAMED_AT_IMPORT:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
        import_module("torchvision")
