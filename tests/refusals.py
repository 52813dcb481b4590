"""What is said where something is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refused(error: type[Exception], function: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """The message of the error that a call raises."""
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    return str(caught.value)
