"""torchvision (0.20 to 0.29): makes its import succeed even if its compiled operators are for another torch."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from isotype.compat.imports import when_imported

_NAMED_AT_IMPORT = ("nms", "qnms")
"""Operators that torchvision needs during its import, even if they could not be loaded."""
_declared: list[Any] = []  # an operator stays declared as long as its torch.library.Library exists


@contextmanager
def importable() -> Iterator[None]:
    """Call `make_importable` if transformers is imported in the `with` block, because it imports torchvision."""
    with ExitStack() as after:
        if "transformers" in sys.modules:
            make_importable()
        else:
            after.callback(when_imported("transformers", make_importable))
        yield


def make_importable() -> None:
    """Let `import torchvision` succeed if its operators cannot be loaded, as with PyPI's CUDA wheel and a CPU torch.

    The import needs two operators, which no image processor calls. isotype declares them without kernels.
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
