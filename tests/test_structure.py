"""The figures of tools/structure.py, on a small package whose figures can be counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.patches import Patched, patched
from tools.private_names import private_names, refusal
from tools.sources import Sources, read_sources
from tools.structure import WALKS, borders, wing_of
from tools.walk import walk

FILES = {
    "preflight/check.py": """
        from isotype.records.request import Request
        from isotype.trace.step import trace
        def check(model, name):
            request = Request(model, name)
            return request.run(trace)
        """,
    "records/request.py": """
        from dataclasses import dataclass
        from isotype.trace.step import trace, count
        @dataclass
        class Request:
            model: object
            name: str
            def run(self, function):
                carried(self)
                return trace(self.model, count(self.name))
        def carried(request: Request):
            return None
        """,
    "trace/step.py": """
        from isotype.checkpoint.load import load
        def trace(what, number):
            return load(str(what))
        def count(name):
            return len(name)
        """,
    "checkpoint/load.py": "def load(path):\\n    return unread(path.parent)\\ndef unread(path):\\n    return 1\\n",
}


def written(root: Path, files: dict[str, str]) -> Sources:
    """A package `isotype` of these files, parsed."""
    import textwrap

    for name, text in files.items():
        path = root / "isotype" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).replace("\\n", "\n"), encoding="utf-8")
    return read_sources(root)


def test_a_value_is_followed_through_records_methods_and_conversions(tmp_path: Path) -> None:
    result = walk(written(tmp_path, FILES), "isotype.preflight.check:check", "model")
    assert result.stops == [
        ("isotype.checkpoint.load:load", "path"),
        ("isotype.checkpoint.load:unread", "path"),
        ("isotype.preflight.check:check", "model"),
        ("isotype.records.request:Request.run", "self"),
        ("isotype.trace.step:trace", "what"),
    ]
    assert len(result.files) == 4


def test_a_parameter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no parameter nothing"):
        walk(written(tmp_path, FILES), "isotype.preflight.check:check", "nothing")


def test_what_crosses_between_the_wings(tmp_path: Path) -> None:
    sources = written(tmp_path, FILES)
    crossing = {pair: names for pair, names in borders(sources).items() if names}
    assert crossing == {("judge", "loader"): {"isotype.checkpoint.load:load": ("isotype.trace.step",)}}
    assert wing_of("isotype.report.check.text") == "judge"
    assert wing_of("isotype.report.html") == "cellar"
    with pytest.raises(ValueError, match=r"isotype\.attic is in no wing"):
        wing_of("isotype.attic")


def test_every_walk_begins_where_the_package_has_a_function() -> None:
    sources = read_sources()
    assert [start for start, _ in WALKS.values() if start not in sources.functions] == []
    assert [name for name in sources.modules if not wing_of(name)] == []


BREACH = """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from transformers import Trainer

    class Mine(Trainer):
        def _save_checkpoint(self, model, trial):
            return super()._save_checkpoint(model, trial)

    class Ours:
        def _own(self):
            return self._kept

        def __init__(self):
            self._kept = torch.ops.aten._softmax.default

    def look(tensor, model):
        name = "torch._dynamo"
        return tensor._cdata, torch._C._nn, getattr(model, "_hf_hook"), Ours()._own(), name
    """


def test_private_names_outside_of_compat_are_refused(tmp_path: Path) -> None:
    sources = written(tmp_path, {"trace/breach.py": BREACH, "compat/torch.py": BREACH})
    names = private_names(sources)
    assert [(each.line, each.name) for each in names] == [
        (3, "torch._subclasses.fake_tensor.FakeTensor"),
        (7, "._save_checkpoint"),
        (8, "._save_checkpoint"),
        (18, "torch._dynamo"),
        (19, "._cdata"),
        (19, "._hf_hook"),
        (19, "torch._C._nn"),
    ]
    text = refusal(names)
    assert text.startswith("src/isotype/trace/breach.py:3: torch._subclasses.fake_tensor.FakeTensor\n")
    assert text.endswith("7 private names of other libraries outside of src/isotype/compat")
    assert refusal([]) == ""


def test_patches_are_counted_with_the_tests_that_exist(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("def test_one() -> None: ...\n", encoding="utf-8")
    page = tmp_path / "compat.md"
    page.write_text(
        "# Places\n\n## lib\n\n### a\n\n- Test: `tests/test_it.py::test_one`\n\n### b\n\n- Test: `tests/test_it.py::no`\n",
        encoding="utf-8",
    )
    found = patched(tmp_path / "tests", page)
    assert found == (Patched("a", "tests/test_it.py::test_one"), Patched("b", ""))


FOLLOWED = {
    "room/run.py": """
        from isotype.room.keeper import Keeper, Plain
        def run(value, other):
            keeper = Keeper(value)
            hidden(keeper, other)
            other.only_here(value)
            other.append(value)
        def hidden(keeper, other):
            return None
        """,
    "room/keeper.py": """
        from isotype.room.helper import Helper
        class Keeper:
            def __init__(self, value):
                self.kept, self.helper = value, None
                self.helper = Helper()
            def on_step_end(self):
                self.helper.take(self.kept)
            def on_log(self):
                return 1
        class Plain:
            pass
        """,
    "room/helper.py": """
        class Helper:
            def take(self, what):
                return what.name
        class Other:
            def only_here(self, value):
                return value.name
            def append(self, value):
                return value.name
        """,
}
"""A callback that another library calls, an attribute whose class only its constructor tells, a method that nothing types."""


def test_attributes_of_self_and_untyped_methods_of_the_folder_are_followed(tmp_path: Path) -> None:
    result = walk(written(tmp_path, FOLLOWED), "isotype.room.run:run", "value")
    assert {stop for stop in result.stops if stop[0] != "isotype.room.run:run"} == {
        ("isotype.room.helper:Helper.take", "what"),
        ("isotype.room.helper:Other.only_here", "value"),  # and not `append`, which is a list's
        ("isotype.room.keeper:Keeper.__init__", "value"),
        ("isotype.room.keeper:Keeper.on_step_end", "self"),
    }


def test_a_climb_is_a_result_in_another_module(tmp_path: Path) -> None:
    files = {
        "room/run.py": "from isotype.room.up import up\ndef run(value):\n    return up(value)\n",
        "room/up.py": "def up(value):\n    return same(value)\ndef same(value):\n    return value\n",
    }
    result = walk(written(tmp_path, files), "isotype.room.run:run", "value")
    assert result.climbs == [("isotype.room.up:up", "isotype.room.run")]
