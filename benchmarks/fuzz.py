"""Random wrong values in every flag, row, config and file that a command reads; prints how the commands end.

    python benchmarks/fuzz.py --count 20000 --seed 0

Each input is run in a child of a process that has imported the libraries. It has to end with a status of 0 to 2 in time, without a
traceback and without "this was not expected", and to leave no file, lock or process behind. What does not is printed with its input.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import random
import select
import shlex
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 63, 10**9, 10**19, -(10**30), 0.5, -0.5, 1e308, "", "x", "0", "1e-3", "auto", "nan", "inf", "../x", "/dev/null",
    "\x1b[2J", "[bold]", "é", "\u202e", "a" * 300, "(", "(.*)*x", "{", "{{ 1/0 }}", [], [1], ["x"], [None], [[1]], {}, {"a": 1}, {"": None}, [{}],
)  # fmt: skip
BYTES = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"5",
    b'"x"',
    b"\xff\xfe",
    b"\x80\x04.",
    b"PK\x03\x04",
    b"\x00" * 64,
    b"GGUF",
    b"[" * 100_000,
    b"<html>",
    b"{}",
)
FILES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors", "special_tokens_map.json",
    "chat_template.jinja", "model.safetensors.index.json", "preprocessor_config.json", "processor_config.json", "precision_policy.json",
)  # fmt: skip
COMMANDS = {
    "inspect": "inspect {}",
    "plan of inspect": "inspect {} --plan --device cpu",
    "check": "check {} --device cpu --dtype float32",
    "chat": "chat {} --ask w1 --max_new_tokens 1 --device cpu --dtype float32",
}
# Their arguments come before their flags; a training reads no rows, so that none begins.
LEADING = {
    "check": "model", "chat": "model --ask w1", "inspect": "model", "plan": "model", "quality": "model", "merge": "adapter",
    "explain": "IST101", "doctor": "", "completion": "bash", "run": "",
}  # fmt: skip
TRAINING = "--model_name_or_path model --dataset_name nowhere.jsonl"
ROW_METHODS = ("sft", "dpo", "kto", "reward", "grpo", "rloo")
ROWS = "--device cpu --dtype float32"
LIMIT = 60.0


@dataclass(frozen=True)
class End:
    """How one command ended: its status, seconds, what it wrote, and what was wrong with that, "" if nothing."""

    command: str
    status: int
    seconds: float
    text: str
    wrong: str


def base_folder(root: Path) -> Path:
    """A model, an adapter and rows that are right, which inputs are made of."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.train.tiny import rows, save_chat_model, save_rows

    base = root / "base"
    save_chat_model(base / "model", layers=2)
    model = AutoModelForCausalLM.from_pretrained(base / "model")
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).save_pretrained(
        base / "adapter"
    )
    for method in ROW_METHODS:
        save_rows(base / f"{method}.jsonl", rows(method, 4))
    return base


def changed(draw: random.Random, value: Any) -> Any:
    """A JSON value with one place of it replaced, removed, added or nested."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        if draw.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: changed(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.6:
        place = draw.randrange(len(value))
        return [*value[:place], changed(draw, value[place]), *value[place + 1 :]]
    return draw.choice(VALUES)


def _json_file(draw: random.Random, path: Path) -> None:
    if draw.random() < 0.25 or not path.is_file() or path.suffix != ".json":
        data = path.read_bytes() if path.is_file() else b""
        cut = data[: draw.randrange(len(data) + 1)] + draw.choice(BYTES)
        path.write_bytes(draw.choice((draw.choice(BYTES), cut)))
        return
    content = json.loads(path.read_bytes())
    for _ in range(draw.randrange(1, 3)):
        content = changed(draw, content)
    path.write_text(json.dumps(content))


def _header(draw: random.Random, path: Path) -> None:
    """A safetensors file with another header."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.dumps(changed(draw, json.loads(data[8 : 8 + length]))).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def checkpoint_input(draw: random.Random, folder: Path) -> str:
    """A command on a model with one file broken."""
    path = folder / "model" / draw.choice(FILES)
    if path.suffix == ".safetensors" and draw.random() < 0.7:
        _header(draw, path)
    else:
        _json_file(draw, path)
    return draw.choices(list(COMMANDS.values()), (4, 2, 1, 2))[0].format("model")


def adapter_input(draw: random.Random, folder: Path) -> str:
    """A command on an adapter with one file broken."""
    path = (
        folder
        / "adapter"
        / draw.choice(("adapter_config.json", "adapter_config.json", "adapter_model.safetensors"))
    )
    _header(draw, path) if path.suffix == ".safetensors" and draw.random() < 0.7 else _json_file(draw, path)
    return draw.choice(
        ("inspect adapter", "chat adapter --ask w1 --max_new_tokens 1 --device cpu", "merge adapter -o out")
    )


def gguf_input(draw: random.Random, folder: Path) -> str:
    """`inspect` of a GGUF file with random entries."""
    key = draw.choice((b"general.architecture", b"general.alignment", b"split.count", b"x"))
    kind = draw.randrange(14)
    value = draw.choice(
        (
            struct.pack("<Q", 5) + b"llama",
            draw.randbytes(12),
            struct.pack("<IQ", draw.randrange(14), draw.choice((0, 1, 1 << 60))),
        )
    )
    data = b"GGUF" + struct.pack(
        "<IQQ", draw.choice((2, 3, 9)), draw.choice((0, 1, 1 << 50)), draw.choice((1, 2, 1 << 50))
    )
    data += (
        struct.pack("<Q", draw.choice((len(key), 1 << 62)))
        + key
        + struct.pack("<I", kind)
        + value
        + draw.randbytes(draw.randrange(64))
    )
    (folder / "a.gguf").write_bytes(data)
    return "inspect a.gguf"


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command that has flags."""
    from isotype.core.arguments import Parser
    from isotype.data.methods import METHODS
    from isotype.planning.request import parser as plan_parser
    from isotype.train.command.parse import training_parser
    from isotype.train.preflight.step_plan import help_parser

    training: dict[str, argparse.ArgumentParser] = {name: training_parser(name) for name in METHODS}
    others = {"demo": training["sft"], "plan": plan_parser(), "check": help_parser()}
    for name in ("inspect", "quality", "explain", "chat", "merge", "doctor"):
        others[name] = Parser.of(name)
    return {**training, **others}


@functools.cache
def _flags() -> dict[str, list[argparse.Action]]:
    """The actions of each command's flags."""
    return {
        name: [
            action
            for action in parser._actions
            if action.option_strings and "--debug" not in action.option_strings  # it shows tracebacks
        ]
        for name, parser in command_parsers().items()
    }


def flags_input(draw: random.Random, folder: Path) -> str:
    """A command with some of its flags, values of which are wrong."""
    from isotype.data.methods import METHODS

    command = draw.choice((*(name for name in _flags() if name not in METHODS), *2 * sorted(METHODS)))
    if command == "demo":  # sft's flags; it trains for minutes where nothing is wrong
        command = "sft"
    words = [command, *shlex.split(LEADING.get(command, TRAINING))]
    flags = _flags()[command]
    if command in METHODS and draw.random() < 0.5:
        words = ["check", command, "--model_name_or_path", "model", *shlex.split(ROWS)]
        words += ["--dataset_name", f"{command}.jsonl"] if draw.random() < 0.5 else []
    for action in draw.sample(flags, k=min(len(flags), draw.randrange(1, 4))):
        words.append(draw.choice(action.option_strings))
        if action.choices and draw.random() < 0.5:
            words.append(str(draw.choice(sorted(map(str, action.choices)))))
        elif draw.random() < 0.9:
            words.append(str(draw.choice(VALUES)).replace("\0", ""))
    return shlex.join(words)


def rows_input(draw: random.Random, folder: Path) -> str:
    """`check` of a training on rows of which one is wrong, in one of the formats of a file; no weight is read."""
    import pandas

    method = draw.choice(ROW_METHODS)
    path = folder / f"{method}.jsonl"
    lines = path.read_bytes().splitlines()
    place = draw.randrange(len(lines))
    row = changed(draw, json.loads(lines[place]))
    lines[place] = draw.choice(BYTES) if draw.random() < 0.2 else json.dumps(row).encode()
    ending = draw.choices((".jsonl", ".json", ".csv", ".parquet", ".txt"), (6, 1, 1, 1, 1))[0]
    wrong = path.with_name(f"wrong{ending}")
    wrong.write_bytes(b"\n".join(lines))
    if ending in (".csv", ".parquet") and isinstance(row, dict):
        texts = {str(key): [json.dumps(value)] * 3 for key, value in row.items()}
        frame = pandas.DataFrame(texts)
        frame.to_csv(wrong) if ending == ".csv" else frame.to_parquet(wrong)
        if draw.random() < 0.3:
            data = wrong.read_bytes()
            wrong.write_bytes(data[: draw.randrange(len(data) + 1)] + draw.choice(BYTES))
    return f"check {method} --model_name_or_path model --dataset_name {wrong.name} {ROWS}"


KINDS: dict[str, tuple[Callable[[random.Random, Path], str], int]] = {
    "checkpoint": (checkpoint_input, 6),
    "adapter": (adapter_input, 2),
    "gguf": (gguf_input, 3),
    "flags": (flags_input, 8),
    "rows": (rows_input, 2),
}
"""How inputs are made, and how often each kind is drawn."""


def run_one(command: str, folder: Path, limit: float = LIMIT) -> End:
    """Run a command in a forked child, whose working directory is `folder`."""
    from isotype.cli.main import main

    reader, writer = os.pipe()
    before, begun = _held(folder), time.monotonic()
    child = os.fork()
    if child == 0:
        status = 99
        try:
            os.setsid()
            os.chdir(folder)
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), write_through=True, encoding="utf-8")
            sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), write_through=True, encoding="utf-8")
            try:
                status = main(shlex.split(command))
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            os._exit(status)
    os.close(writer)
    output, late = _read(reader, begun + limit)
    if late:
        os.killpg(child, signal.SIGKILL)
    _, code = os.waitpid(child, 0)
    status, text = os.waitstatus_to_exitcode(code), output.decode("utf-8", "replace")
    left = sorted(_held(folder) - before) if status else []
    wrong = "no end in time" if late else ""
    wrong = wrong or next((words for words in ("Traceback", "not expected") if words in text), "")
    wrong = wrong or ("" if status in (0, 1, 2) else f"status {status}")
    wrong = wrong or ("" if not left else f"left behind: {left[0]}") or _processes_left(child)
    return End(command, status, time.monotonic() - begun, text, wrong)


def _read(reader: int, until: float) -> tuple[bytes, bool]:
    parts = []
    while (left := until - time.monotonic()) > 0:
        if select.select([reader], [], [], left)[0]:
            part = os.read(reader, 1 << 16)
            if not part:
                break
            parts.append(part)
    os.close(reader)
    return b"".join(parts), left <= 0


def _held(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _processes_left(group: int) -> str:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return ""
    return "a process is left behind"


@contextlib.contextmanager
def prepared(
    kinds: tuple[str, ...] = tuple(KINDS), *, warm: bool = True
) -> Iterator[Callable[[int], tuple[str, End]]]:
    """Gives what runs the input of a seed and returns its kind and how it ended; libraries are imported before, once."""
    import torch

    from isotype.cli.main import main

    torch.set_num_threads(1)  # a child has none of the threads of OpenMP that its parent waits for
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        root = Path(name)
        os.environ.setdefault("ISOTYPE_CACHE", str(root / "cache"))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            base = base_folder(root)
            _flags()
            rows = [
                f"check {method} --model_name_or_path model --dataset_name {method}.jsonl {ROWS}"
                for method in ROW_METHODS
            ]
            commands = (
                *(command.format("model") for command in COMMANDS.values()),
                *rows,
                "merge adapter -o ../out",
            )
            with contextlib.chdir(base):  # what the commands import, the children have then
                for command in commands if warm else ():
                    main(shlex.split(command))

        def run(seed: int) -> tuple[str, End]:
            draw = random.Random(seed)
            kind = draw.choices(kinds, [KINDS[each][1] for each in kinds])[0]
            folder = Path(shutil.copytree(base, root / "input"))
            try:
                return kind, run_one(KINDS[kind][0](draw, folder), folder)
            finally:
                shutil.rmtree(folder)

        yield run


def main_of_script() -> int:
    """Draw, run, and print the figures; 1 if anything ended badly."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop drawing after so many")
    parser.add_argument("--cold", action="store_true", help="run no command before: of few inputs")
    options = parser.parse_args()
    ends: Counter[tuple[str, int]] = Counter()
    bad, slowest, begun = 0, 0.0, time.monotonic()
    with prepared(tuple(options.kinds), warm=not options.cold) as run:
        for number in range(options.count):
            if time.monotonic() - begun > options.seconds:
                break
            kind, end = run(options.seed * 1_000_000 + number)
            ends[kind, end.status] += 1
            slowest = max(slowest, end.seconds)
            if end.wrong:
                bad += 1
                last = " | ".join(end.text.strip().splitlines()[-4:])
                print(
                    f"{options.seed * 1_000_000 + number} {kind}: {end.wrong}: {end.command!r}: {last!r:.400}",
                    flush=True,
                )
    print(f"\n{'kind':<12}{'status':>7}{'inputs':>8}")
    for (kind, status), count in sorted(ends.items()):
        print(f"{kind:<12}{status:>7}{count:>8}")
    print(
        f"{sum(ends.values())} inputs, {bad} ended badly, slowest {slowest:.1f} s, {time.monotonic() - begun:.0f} s in all"
    )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main_of_script())
