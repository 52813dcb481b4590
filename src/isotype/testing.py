"""A pytest fixture that guards a model or a library: `isotype_check(model, inputs, …)` fails the test on an error.

pytest finds it by itself once isotype is installed (entry point `pytest11`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def isotype_check() -> Callable[..., Any]:
    """`isotype.check` that fails the test with the whole report where a finding is an error.

    Takes what `isotype.check` takes and `fail_on="error"`, `"warning"` for findings that only cost, and returns the
    report.

        def test_my_layer_keeps_dtypes(isotype_check):
            isotype_check(MyModel().bfloat16(), {"x": torch.randn(2, 8, dtype=torch.bfloat16)}, device="t4")
    """

    def check(*args: Any, fail_on: str = "error", **kwargs: Any) -> Any:
        import isotype

        report = isotype.check(*args, **kwargs)
        if report.errors or (fail_on == "warning" and report.warnings):
            pytest.fail(str(report), pytrace=False)
        return report

    return check
