from __future__ import annotations

from isotype.rules.ist903_seen_before import find as later_tokens
from isotype.rules.ist907_other_rows import find
from tests.rules.samples import leak, reached


def test_statistics_of_the_batch_are_a_warning() -> None:
    (finding,) = find(reached(leak("other row", module="norm", kind="BatchNorm1d")))
    assert (finding.severity, finding.module) == ("warning", "norm")
    assert finding.message == "a row's predictions depend on the other rows of the batch"
    assert finding.cause == "BatchNorm1d mixes the rows of the batch"


def test_a_module_that_mixes_rows_and_tokens_is_one_error() -> None:
    both = reached(leak("other row", module="norm"), leak("later token", module="norm"))
    (finding,) = find(both)
    assert (finding.severity, finding.message) == (
        "error",
        "a row's predictions depend on the other rows of the batch, and on later tokens of the same row",
    )
    assert not list(later_tokens(both))


def test_packed_rows_are_another_rule() -> None:
    assert not list(find(reached(leak("packed row"))))
