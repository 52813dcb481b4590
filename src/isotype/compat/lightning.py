"""Lightning (2.1 to 2.6): its check that a script calls `fabric.backward`, and its logs. This file does not import Lightning."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from isotype.compat.replaced import replaced


@contextmanager
def lightning_traced() -> Iterator[None]:
    """In the `with` block, `loss.backward()` raises no error for a model that Fabric has wrapped, and a `LightningModule` logs nothing."""
    with ExitStack() as stack:
        for package in ("lightning.fabric", "lightning_fabric", "lightning.pytorch", "pytorch_lightning"):
            wrappers, modules = (sys.modules.get(f"{package}.{name}") for name in ("wrappers", "core.module"))
            stack.enter_context(replaced(wrappers, "_in_fabric_backward", True))
            for name in ("log", "log_dict"):
                module = getattr(modules, "LightningModule", None)
                stack.enter_context(replaced(module, name, lambda *_, **__: None))
        yield
