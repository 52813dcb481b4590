"""A script runs with the same `__builtins__` as under python."""

from __future__ import annotations

import pytest

from isotype.cli.run import _execute
from isotype.preflight.script.family import Options


@pytest.mark.parametrize("module", [False, True])
def test_builtins_are_the_module(tmp_path, monkeypatch, capsys, module):
    (tmp_path / "tells.py").write_text("print(type(__builtins__).__name__, __name__)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    target = "tells" if module else str(tmp_path / "tells.py")
    monkeypatch.chdir(tmp_path)
    _execute(Options(target, module, (), 1, None, 0.0, False))
    assert capsys.readouterr().out == "module __main__\n"
