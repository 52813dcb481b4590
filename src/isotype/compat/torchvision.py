"""torchvision (0.20 to 0.29): its Python code beside a torch that its compiled operators are not made for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from isotype.compat.imports import when_imported

_NAMED_AT_IMPORT = ("nms", "qnms")
"""Operators that torchvision's import registers shapes for, whether or not they were loaded."""
_declared: list[Any] = []  # a declaration goes with its torch.library.Library


@contextmanager
def importable() -> Iterator[None]:
    """Within it `make_importable` comes before transformers, which imports torchvision wherever it is installed, for text models, too."""
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
    """Let `import torchvision` succeed where its compiled operators do not load: PyPI's wheel, made for CUDA, beside a torch for CPUs.

    The two that its import asks for by name are declared without a kernel. No processor of pictures calls them; of what does torch says
    that there is none.
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
