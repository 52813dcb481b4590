"""Terminals of 40 columns, of ASCII, in the C locale: nothing is cut in mid-word, nothing raises."""

from __future__ import annotations

import ast
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import isotype
from isotype.cli.main import main
from isotype.core.files import write_whole
from isotype.core.terminal import (
    _NEAREST,
    as_typed,
    lost_output,
    outlive_output,
    print_the_nearest,
    printed_command,
)
from isotype.precision.policy import PrecisionPolicy
from isotype.report.html import write_report
from isotype.report.text import fitting, wrapped
from isotype.train.describe import show_policy

PICTURES = ("charts.py", "html.py", "palette.py")
"""Modules (by the end of their names) that write HTML and SVG, not terminals."""


def ascii_stream(monkeypatch: pytest.MonkeyPatch, name: str) -> io.BytesIO:
    written = io.BytesIO()
    monkeypatch.setattr(sys, name, io.TextIOWrapper(written, encoding="ascii", write_through=True))
    return written


def texts(path: Path) -> str:
    """The string literals of a module that has characters beyond ASCII, without its docstrings."""
    written = path.read_text(encoding="utf-8")
    if written.isascii() and not re.search(r"\\[xuUN]", written):
        return ""
    tree = ast.parse(written)
    spoken = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }  # a string that is a statement is a docstring
    return "".join(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in spoken
    )


def test_every_character_that_is_printed_has_its_nearest_ascii() -> None:
    root = Path(isotype.__file__).parent
    lacking = {
        (path.name, character)
        for path in root.rglob("*.py")
        if not path.name.endswith((*PICTURES, "terminal.py"))
        for character in texts(path)
        if not character.isascii() and character not in _NEAREST and character != "\N{NO-BREAK SPACE}"
    }
    assert not lacking


def test_a_longer_ascii_text_takes_its_room_from_the_gap_before_the_next_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = ascii_stream(monkeypatch, "stdout")
    print_the_nearest()
    print("base we…    nf4\na → b  nf4\nend …")
    assert written.getvalue().decode() == "base we...  nf4\na -> b  nf4\nend ...\n"


def test_a_file_name_that_is_not_utf_8_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8", write_through=True))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written, encoding="utf-8", write_through=True))
    assert main(["inspect", "caf\udce9"]) == 2
    assert b"caf?" in written.getvalue()


def test_what_the_locale_could_not_decode_is_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    assert as_typed("w1 é".encode().decode("ascii", "surrogateescape")) == "w1 é"
    assert as_typed("w1 é") == "w1 é"
    assert as_typed("caf\udce9") == "caf\N{REPLACEMENT CHARACTER}"


def test_a_question_on_a_pipe_in_the_c_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\n".encode()), encoding="ascii"))
    print_the_nearest()
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    assert as_typed(sys.stdin.readline()) == "é\n"


@contextmanager
def no_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.TextIOWrapper]:
    """Standard output on a pipe whose reader has gone."""
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "__stdout__", stream)
        yield stream
    monkeypatch.undo()


def test_a_command_that_makes_files_outlives_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    with no_reader(monkeypatch) as stream:
        outlive_output(raises=False)
        Console().print("one")
        assert lost_output() == ("standard output could not be written: Broken pipe",)
        Console().print("two")
        os.write(stream.fileno(), b"of a child or of code in C")
        assert lost_output() == ("standard output could not be written: Broken pipe",)


def test_a_command_whose_result_is_its_output_fails_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with no_reader(monkeypatch):
        with pytest.raises(SystemExit, match="1"):  # rich's
            main(["explain", "IST101"])
        print("this goes nowhere", flush=True)


def test_streams_of_others_stay_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    written = ascii_stream(monkeypatch, "stdout")
    stream = sys.stdout
    outlive_output(raises=False)
    assert sys.stdout is stream
    assert lost_output() == ()
    assert written.getvalue() == b""


# ------------------------------------------------------------------------------------------------- 40 columns

POLICY = PrecisionPolicy(
    compute=torch.bfloat16,
    storage="nf4",
    reasons={"compute": "the checkpoint was trained in it and this device runs it natively " * 3},
)


def policy_lines(width: int, encoding: str = "utf-8") -> list[str]:
    written = io.BytesIO()
    file = io.TextIOWrapper(written, encoding=encoding, write_through=True)
    show_policy(Console(file=file, width=width), POLICY)
    return written.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("width", [80, 110])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_long_reasons_leave_the_dtypes_in_the_policy_table(width: int, encoding: str) -> None:
    lines = policy_lines(width, encoding)
    assert lines[1].split() == ["role", "dtype", "reason"]
    assert max(map(len, lines)) <= width
    row = next(line for line in lines if line.startswith("matmuls "))
    shown = row.split("bfloat16")[1].split()
    assert set(shown[:-1]) <= set(POLICY.reasons["compute"].split())
    assert shown[-1] == ("…" if encoding == "utf-8" else "...")


def test_the_policy_in_40_columns_has_every_dtype_and_every_word() -> None:
    lines = policy_lines(40)
    assert max(map(len, lines)) <= 40
    for role, dtype, reason in POLICY.rows():
        assert role in "\n".join(lines)
        assert any(line.split() == ["dtype", *dtype.split()] for line in lines)
        assert reason.strip() in " ".join(" ".join(lines).replace("reason", "").split())


def test_a_dotted_name_is_broken_at_its_dots() -> None:
    table = Table("tensor", "bytes")
    table.add_row(Text("model.layers.0.post_attention_layernorm.weight"), "1")
    file = io.StringIO()
    console = Console(file=file, width=30)
    console.print(fitting(table, console))
    assert [line.rstrip() for line in file.getvalue().splitlines()] == [
        "model.layers.0.",
        "post_attention_layernorm.",
        "weight",
        "  bytes  1",
    ]


def test_a_table_omits_columns_rather_than_break_a_name() -> None:
    name = "model.layers.*.post_attention_layernorm.weight"

    def heads(width: int) -> list[str]:
        table = Table(box=None, pad_edge=False)
        table.add_column("tensors", no_wrap=True)
        for column in ("conversion", "shape", "bytes"):
            table.add_column(column, no_wrap=column != "conversion")
        table.add_row(name, "renamed, dequantized", "576 × 576", "5.93 MiB")
        file = io.StringIO()
        console = Console(file=file, width=width)
        console.print(fitting(table, console, dropped=("shape", "bytes")))
        lines = file.getvalue().splitlines()
        assert any(name in line for line in lines)
        return lines[0].split()

    assert heads(110) == heads(77) == ["tensors", "conversion", "shape", "bytes"]
    assert heads(76) == ["tensors", "conversion", "bytes"]
    assert heads(62) == ["tensors", "conversion"]
    assert heads(59) == [name]  # a line for each cell


def lines_of(text: str, width: int) -> list[str]:
    return wrapped(text, Console(width=width, force_terminal=True)).split("\n")


def test_sentences_are_wrapped_under_their_first_word() -> None:
    assert lines_of("  - --device t4 is not here\n    expected  a device that is in this machine", 30) == [
        "  - --device t4 is not here",
        "    expected  a device that is",
        "              in this machine",
    ]
    assert lines_of("  --model_name_or_path MODEL   a directory, or a hub id", 24) == [
        "  --model_name_or_path MODEL",
        "      a directory, or a",
        "      hub id",
    ]
    assert lines_of("/a/path/that/is/longer/than/the/terminal", 24) == [
        "/a/path/that/is/longer/than/the/terminal"
    ]


def test_a_log_file_gets_its_lines_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert wrapped("a b " * 50, Console(file=io.StringIO(), width=40)) == "a b " * 50


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["sft", "--help"],
        ["stf"],
        ["inspect", "nowhere"],
        ["sft", "--model_name_or_path", "nowhere", "--dtype", "bfloat16", "--fp16"],
    ],
)
def test_no_word_is_cut_in_40_columns(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    main(argv)
    whole = "".join(capsys.readouterr())
    monkeypatch.setenv("COLUMNS", "40")
    main(argv)
    narrow = "".join(capsys.readouterr())
    assert narrow.split() == whole.split()
    assert [line for line in narrow.splitlines() if len(line) > 40 and len(line.split()) > 2] == []


def test_reports_are_utf_8_whatever_the_locale_could_not_decode(tmp_path: Path) -> None:
    asked = "é".encode().decode("ascii", "surrogateescape")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
        assert printed_command(["isotype", "sft", "--ask", asked]) == "isotype sft --ask 'é'"
        assert write_whole(tmp_path / "run.html", f"<p>{asked}").read_text(encoding="utf-8") == "<p>é"
        assert write_report(tmp_path / "check.html", f"<p>{asked}").read_text(encoding="utf-8") == "<p>é"
