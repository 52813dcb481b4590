"""Measure what a device's operators accept: real calls with every combination of operand dtypes.

    python -m isotype.contracts.measure --device cuda -o src/isotype/contracts/tables     # cuda-sm75-torch2.13.json
    python -m isotype.contracts.measure --device cpu --base cpu-avx2 -o cpu-amx.json

A CPU's table is that of its instruction set: `tables/cpu-avx2.json` is whole, those of the others hold the
operators that differ. `ONEDNN_MAX_CPU_ISA` lowers a CPU to a smaller set.

Every example of `tables/examples.json` is replayed with fresh tensors of a few elements for each combination
of float32, bfloat16 and float16 over its float operands (float64 too where an example has it):

- up to 4 float operands: all combinations;
- 5 or 6: all combinations of at most two dtypes;
- more: all alike, all alike but one, and the combination that was recorded.

A call that raises is rejected, with its message. Results are compared with the same values in float64 on the
CPU, and with the dtypes that were recorded on the device: far from both, the operator corrupts values without
an error, and is rejected. All others are accepted, with the dtypes of the results. Examples of one operator
may have the same pattern and different results (a scalar, a `dtype=` argument): then the result is
unspecified (`?`). Where one example accepts a pattern and another rejects it, the pattern is left out: a
table has no entries that only sometimes apply.

Calls run in a child process. If one kills it (or the device), the operator is listed under `died` and the
measurement continues.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isotype.compat.torch import OpOverload
from isotype.contracts.contract import TABLES, UNSPECIFIED, read_table, table_name
from isotype.contracts.example import (
    REFUSALS,
    Json,
    corrupted,
    decode,
    has_dtype_argument,
    is_float,
    results_of,
    tensors_in,
)
from isotype.contracts.pattern import (
    CORRUPTS,
    FLOAT_DTYPES,
    LETTERS,
    RESULT_LETTERS,
    fill,
    layout_of,
    letters_in,
    patterns_of,
)
from isotype.core.errors import first_line
from isotype.core.files import write_whole
from isotype.precision.devices.profile import device_profile

# torch's spellings of the float dtypes, with the letter and the format specification of each.
_SPELLINGS: dict[str, tuple[str, str]] = {
    "torch.float32": ("f", ":torch"),
    "torch.bfloat16": ("b", ":torch"),
    "torch.float16": ("h", ":torch"),
    "torch.float64": ("d", ":torch"),
    "c10::BFloat16": ("b", ""),
    "c10::Half": ("h", ""),
    "float": ("f", ""),
    "double": ("d", ""),
    "BFloat16": ("b", ":name"),
    "Half": ("h", ":name"),
    "Float": ("f", ":name"),
    "Double": ("d", ":name"),
}
_WORD = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, _SPELLINGS)) + r")(?![\w.]*\w)")
_MOST = 256  # readings to try per message

EXAMPLES = TABLES / "examples.json"
GPU_EXAMPLES = TABLES / "examples_gpu.json"
"""Calls that only GPUs make: their attention kernels. Written by hand."""

_TORCH_NAMES = {"rocm": "cuda"}  # torch's name of the device
_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")  # variables that lower a CPU's instruction set


@dataclass(frozen=True)
class Outcome:
    """A call's result: the letters of its results, or its error."""

    pattern: str
    results: str = ""
    error: str = ""


def combinations(recorded: str, doubles: bool) -> list[str]:
    """Return the combinations of letters to measure for float operands recorded as `recorded` (`"fbb"`)."""
    letters = "fbhd" if doubles else "fbh"
    count = len(recorded)
    if count <= 4:
        patterns = ["".join(letters) for letters in itertools.product(letters, repeat=count)]
    elif count <= 6:
        pairs = itertools.combinations(letters, 2)
        patterns = ["".join(mixed) for pair in pairs for mixed in itertools.product(pair, repeat=count)]
    else:
        patterns = [letter * count for letter in letters]
        patterns += [
            base * at + other + base * (count - at - 1)
            for base, other in itertools.permutations(letters, 2)
            for at in range(count)
        ]
    return list(dict.fromkeys([recorded, *patterns]))


def overload(op: str) -> OpOverload:
    """Return the operator named `aten.mm.default`; imports bitsandbytes for its operators."""
    namespace, name, variant = op.split(".")
    if namespace == "bitsandbytes":
        import bitsandbytes  # noqa: F401 - registers its operators
    operator: OpOverload = getattr(getattr(getattr(torch.ops, namespace), name), variant)
    return operator


def measure_operator(op: str, examples: Sequence[Json], device: torch.device) -> dict[str, Any]:
    """Measure `op` for every combination of dtypes: `{pattern: results or [message]}`, `broken` examples.

    An example is broken if this device rejects even the recorded dtypes.
    """
    doubles = any(tensor["t"] == "float64" for tensor in tensors_in(examples))
    outcomes: dict[str, list[Outcome]] = {}
    broken = []
    for example in examples:
        calls = list(_calls(op, example, device, doubles))
        if calls and calls[0].error:
            broken.append(calls[0].error)
            if not any(not call.error for call in calls):
                continue
        for call in calls:
            outcomes.setdefault(call.pattern, []).append(call)
    return {
        "patterns": {key: entry for key in sorted(outcomes) if (entry := _merged(outcomes[key])) is not None},
        "broken": broken,
    }


def _merged(outcomes: Sequence[Outcome]) -> str | list[str] | None:
    """Return the outcome on which all examples of a pattern agree; None if they disagree."""
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if errors:
        return errors[:1] if len(errors) == len(outcomes) else None
    results = {outcome.results for outcome in outcomes}
    return results.pop() if len(results) == 1 else UNSPECIFIED


def _calls(op: str, example: Json, device: torch.device, doubles: bool) -> Iterator[Outcome]:
    """Replay an example, first with the dtypes it was recorded with."""
    function, layout = overload(op), layout_of(op)
    tensors = list(tensors_in(example))
    operands = [LETTERS.get(getattr(torch, tensor["t"]), "i") for tensor in tensors]
    recorded = "".join(letter for letter in operands if letter != "i")
    # The result of a pointwise operator on mixed dtypes depends on which operands have no dimensions.
    loose = layout.each or has_dtype_argument(example)
    pointwise = torch.Tag.pointwise in function.tags
    for letters in combinations(recorded, doubles):
        rest = iter(letters)
        varied = [next(rest) if is_float(tensor) else "i" for tensor in tensors]
        (pattern,) = patterns_of(layout, varied)
        try:
            args, kwargs = decode(example, [FLOAT_DTYPES[letter] for letter in letters], device)
            returned = results_of(function, args, kwargs)
            if device.type != "cpu":
                torch.accelerator.synchronize()
        except REFUSALS as error:
            if isinstance(error, getattr(torch, "AcceleratorError", ())):
                raise  # the device is lost: every later call would fail too
            yield Outcome(pattern, error=first_line(error))
            continue
        if letters != recorded and corrupted(function, example, letters, recorded, returned, device):
            yield Outcome(pattern, error=CORRUPTS)
            continue
        unsure = loose or (pointwise and len(set(letters)) > 1)
        yield Outcome(pattern, results=UNSPECIFIED if unsure else _result_letters(returned))


def _result_letters(returned: Any) -> str:
    items = returned if isinstance(returned, (tuple, list)) else [returned]
    letters = [RESULT_LETTERS.get(item.dtype) for item in items if isinstance(item, torch.Tensor)]
    return UNSPECIFIED if None in letters else "".join(letter for letter in letters if letter)


def measure(examples: Mapping[str, Sequence[Json]], device: str) -> dict[str, Any]:
    """Return the table of `device`, as it is written to JSON; every operator of `examples` is measured."""
    measured, died = _measured_in_children(examples, device)
    messages: dict[str, int] = {}
    operators: dict[str, dict[str, str | int]] = {}
    for op in sorted(measured):
        patterns = measured[op]["patterns"]
        by_template = templates({key: entry[0] for key, entry in patterns.items() if isinstance(entry, list)})
        numbers = {key: messages.setdefault(template, len(messages)) for key, template in by_template.items()}
        operators[op] = {key: numbers.get(key, entry) for key, entry in patterns.items()}
    return {
        "device": device,
        "name": _device_name(device),
        "limits": {name: value for name in _LIMITS if (value := os.environ.get(name))},
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "messages": list(messages),
        "operators": {op: patterns for op, patterns in operators.items() if patterns},
        "broken": {op: result["broken"] for op, result in sorted(measured.items()) if result["broken"]},
        "died": died,
    }


def difference(table: Mapping[str, Any], base: str) -> dict[str, Any]:
    """Return the part of a table that differs from the table `base` (`cpu-avx2`); `read_table` merges them.

    Raises:
        ValueError: the base lists other operators or was measured with another version of torch.
    """
    other = read_table(TABLES / f"{base}.json")
    if other.torch_version != table["torch"] or set(other.operators) != set(table["operators"]):
        raise ValueError(f"{base}: not the same operators, or measured with torch {other.torch_version}")
    messages = table["messages"]

    def spelled(patterns: Mapping[str, str | int], messages: Sequence[str]) -> dict[str, str | tuple[str]]:
        return {
            key: (fill(messages[entry], letters_in(key)),) if isinstance(entry, int) else entry
            for key, entry in patterns.items()
        }

    own = {
        op: patterns
        for op, patterns in table["operators"].items()
        if spelled(patterns, messages) != spelled(other.operators[op], other.messages)
    }
    used = sorted(
        {entry for patterns in own.values() for entry in patterns.values() if isinstance(entry, int)}
    )
    operators = {
        op: {key: used.index(entry) if isinstance(entry, int) else entry for key, entry in patterns.items()}
        for op, patterns in own.items()
    }
    return {
        **table,
        "base": base,
        "messages": [messages[number] for number in used],
        "operators": operators,
    }


def _measured_in_children(
    examples: Mapping[str, Sequence[Json]], device: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Measure in child processes, with a new one after each crash; return the results and the crashed operators."""
    measured: dict[str, Any] = {}
    died: dict[str, str] = {}
    left = dict(sorted(examples.items()))
    with tempfile.TemporaryDirectory() as folder:
        work, results = Path(folder, "work.json"), Path(folder, "results.jsonl")
        while left:
            work.write_text(json.dumps(left), encoding="utf-8")
            results.touch()
            child = [
                sys.executable,
                "-m",
                "isotype.contracts.measure",
                "--device",
                device,
                "-o",
                str(results),
            ]
            ended = subprocess.run([*child, "--child", str(work)], check=False)
            for line in results.read_text(encoding="utf-8").splitlines():
                result = json.loads(line)
                measured[result.pop("op")] = result
            left = {op: calls for op, calls in left.items() if op not in measured}
            if left:
                fatal = next(iter(left))
                died[fatal] = f"its process ended with status {ended.returncode}"
                del left[fatal]
    return measured, died


def _measure_into(results: Path, examples: Mapping[str, Sequence[Json]], device: torch.device) -> None:
    """Measure `examples`; each operator's line of JSON is on disk before the next operator runs."""
    with results.open("a", encoding="utf-8") as lines:
        for op, calls in examples.items():
            lines.write(json.dumps({"op": op, **measure_operator(op, calls, device)}) + "\n")
            lines.flush()


def _capability(device: str) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if device == "cuda" else None


def _device_name(device: str) -> str:
    if device in ("cuda", "rocm", "xpu"):
        return str(getattr(torch, _TORCH_NAMES.get(device, device)).get_device_name())
    return device_profile(device).title


def read_examples(device: str, path: Path | None = None) -> dict[str, list[Json]]:
    """Return the calls to replay on a device kind: those in `path`, else isotype's."""
    files = [path] if path is not None else [EXAMPLES] if device == "cpu" else [EXAMPLES, GPU_EXAMPLES]
    read: dict[str, list[Json]] = {}
    for file in files:
        read |= json.loads(file.read_text(encoding="utf-8"))
    return read


def write_json(path: Path, content: Any) -> None:
    """Write two levels of keys on one line each, so that a changed entry is a changed line."""
    write_whole(path, compact(content) + "\n")


def compact(content: Mapping[str, Any]) -> str:
    """Return a JSON object with one line for each entry of its dicts and lists."""
    lines = []
    for key, value in content.items():
        if isinstance(value, dict) and value:
            inner = [f"  {json.dumps(name)}: {_tight(item)}" for name, item in value.items()]
            lines.append(f"{json.dumps(key)}: {{\n" + ",\n".join(inner) + "\n}")
        elif isinstance(value, list) and value:
            lines.append(
                f"{json.dumps(key)}: [\n" + ",\n".join("  " + _tight(item) for item in value) + "\n]"
            )
        else:
            lines.append(f"{json.dumps(key)}: {_tight(value)}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _tight(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def main() -> None:
    """Run the command line: measure a device, write its table, print a summary."""
    parser = argparse.ArgumentParser(
        prog="python -m isotype.contracts.measure", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "rocm", "xpu", "mps"))
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        help="file to write the table to, or a folder: it is then named after the device and torch",
    )
    parser.add_argument("--base", help="write only what differs from this table of isotype's own (cpu-avx2)")
    parser.add_argument("--examples", type=Path, help="calls to replay instead of isotype's own")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(_TORCH_NAMES.get(options.device, options.device))
    if options.child is not None:
        _measure_into(options.output, json.loads(options.child.read_text(encoding="utf-8")), device)
        return
    torch.empty(1, device=device)  # fail here, in one line, if the device is missing
    started = time.perf_counter()
    table = measure(read_examples(options.device, options.examples), options.device)
    output = options.output
    if output.is_dir():
        output /= f"{table_name(options.device, _capability(options.device), torch.__version__)}.json"
    write_json(output, difference(table, options.base) if options.base else table)
    count = sum(map(len, table["operators"].values()))
    seconds = time.perf_counter() - started
    print(f"{output}: {len(table['operators'])} operators, {count} patterns in {seconds:.1f} s")
    for kind in ("died", "broken"):
        for op, why in table[kind].items():
            print(f"{kind:7} {op}: {why}")


def templates(messages: Mapping[str, str]) -> dict[str, str]:
    """Convert pattern -> message to pattern -> template, with few distinct templates (greedy).

    A dtype in a message may be that of any operand with this dtype; the reading that explains most messages
    of the operator is taken. `fill(template, letters_in(pattern))` reproduces each message exactly.
    """
    readings = {pattern: list(_readings(pattern, message)) for pattern, message in messages.items()}
    chosen: dict[str, str] = {}
    while len(chosen) < len(messages):
        left = [pattern for pattern in messages if pattern not in chosen]
        votes = Counter(reading for pattern in left for reading in readings[pattern])
        best = min(votes, key=lambda reading: (-votes[reading], reading))
        chosen |= dict.fromkeys([pattern for pattern in left if best in readings[pattern]], best)
    return chosen


def _readings(pattern: str, message: str) -> Iterator[str]:
    """Yield every template that gives `message` for `pattern`."""
    letters = letters_in(pattern)
    # re.split with one group alternates between text and dtype words.
    parts = _WORD.split(message.replace("{", "{{").replace("}", "}}"))
    choices = [[part] if at % 2 == 0 else _places(part, letters) for at, part in enumerate(parts)]
    for reading in itertools.islice(itertools.product(*choices), _MOST):
        template = "".join(reading)
        if fill(template, letters) != message:
            raise RuntimeError(f"{template!r} does not give {message!r} for {pattern}")
        yield template


def _places(word: str, letters: str) -> list[str]:
    letter, style = _SPELLINGS[word]
    return [f"{{{at}{style}}}" for at, other in enumerate(letters) if other == letter] or [word]


if __name__ == "__main__":
    main()
