"""Workers of pytest-xdist in a fresh clone: each prepares a part of the files, and all read the results from disk.

Alone, each worker would rewrite the assertions of every test file (5 s), and parse every module of isotype for the
constants that hypothesis draws (2 s).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from _pytest.assertion import rewrite
from _pytest.assertion.rewrite import assertstate_key
from hypothesis.internal.constants_ast import constants_from_module, is_local_module_file

_Item = TypeVar("_Item")


def share(config: pytest.Config, items: Sequence[_Item]) -> Sequence[_Item]:
    """This worker's part of `items`; nothing where one process runs the tests, or a part of them is asked for."""
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    if not worker or [Path(path).resolve() for path in config.args] != [Path(__file__).parent]:
        return ()
    return items[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]


def rewrite_assertions(config: pytest.Config) -> None:
    """Before the test files are imported: write what pytest would write when it imports them."""
    for path in share(config, sorted(Path(__file__).parent.rglob("test_*.py"))):
        compiled = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if not compiled.exists() and rewrite.try_makedirs(compiled.parent):
            digest, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[assertstate_key], code, digest, compiled)


def read_constants(config: pytest.Config) -> None:
    """When all modules are imported, and before hypothesis looks for their constants."""
    modules = {getattr(module, "__file__", None): module for module in list(sys.modules.values())}
    local = sorted(file for file in modules if file is not None and is_local_module_file(file))
    for file in share(config, local):
        constants_from_module(modules[file])
