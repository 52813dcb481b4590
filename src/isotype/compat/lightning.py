"""Lightning Fabric (2.1 to 2.6): its check that a script calls `fabric.backward`. This file does not import Lightning."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from isotype.compat.replaced import replaced


@contextmanager
def as_in_fabric_backward() -> Iterator[None]:
    """In the `with` block, `loss.backward()` raises no error for the loss of a model that Fabric has wrapped."""
    with ExitStack() as stack:
        for package in ("lightning.fabric", "lightning_fabric"):
            wrappers = sys.modules.get(f"{package}.wrappers")
            stack.enter_context(replaced(wrappers, "_in_fabric_backward", True))
        yield
