"""The package from outside: its public names, and what importing it does not do."""

from __future__ import annotations

import json

import pytest

import isotype
from tests.processes import printed, run

HEAVY = ("transformers", "bitsandbytes", "peft", "trl", "accelerate", "datasets", "rich", "torch.cuda.amp")


def test_every_public_name_can_be_had():
    for name in isotype.__all__:
        assert getattr(isotype, name).__name__ == name
    assert set(isotype.__all__) <= set(dir(isotype))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'isotype' has no attribute 'nope'"):
        _ = isotype.nope


def test_importing_loads_no_model_library_and_no_more_of_torch():
    # benchmarks/import_time.py says what that comes to in seconds.
    code = (
        "import json, sys, torch; before = set(sys.modules); import isotype; "
        "print(json.dumps(sorted(m for m in set(sys.modules) - before)))"
    )
    new = json.loads(printed(code))
    assert [name for name in new if name.split(".")[0] in HEAVY] == []
    assert [name for name in new if not name.startswith("isotype")] == []


def _print_changes() -> None:
    from tests.imported import changes

    print(changes())


def test_importing_patches_nothing():
    done = run(_print_changes)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
