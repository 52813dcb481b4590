"""A pytest fixture that checks a model or a library: `isotype_check(model, inputs, …)` fails the test if the check
has an error.

pytest loads the fixture if isotype is installed (entry point `pytest11`).
"""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def isotype_check() -> Callable[..., Any]:
    """Return a function that calls `isotype.check`. It fails the test with the whole report if a finding is an error.

    The function has the arguments of `isotype.check` and returns the report. With `fail_on="warning"`, a warning also
    fails the test.

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
