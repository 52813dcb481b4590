"""Measures which operand dtypes a device's operators accept, by real calls with all combinations of dtypes.

    python -m isotype.contracts.measure --device cuda -o src/isotype/contracts/tables     # cuda-sm75-torch2.13.json
    python -m isotype.contracts.measure --device cpu --base cpu-avx2 -o cpu-amx.json
    python -m isotype.contracts.measure --device cpu --base cpu-avx2 -o cpu-avx2-torch2.15.json

CPUs with the same instruction set have the same table. `tables/cpu-avx2.json` contains all operators. The tables of
other instruction sets and torch releases contain only the operators that differ. The variables `ATEN_CPU_CAPABILITY` and
`ONEDNN_MAX_CPU_ISA` limit a CPU to a smaller instruction set.

Every example in `tables/examples.json` is replayed with new tensors of a few elements. The float operands get
combinations of float32, bfloat16 and float16 (and of float64, if the example contains it):

- up to 4 float operands: all combinations;
- 5 or 6 float operands: all combinations of at most two dtypes;
- more than 6 float operands: all operands in one dtype; all but one in one dtype; and the recorded dtypes.

A call that raises an error is rejected, and the table contains the error message. The results of all other calls are
compared with the results of calls with the same values: in float64 on the CPU, and in the recorded dtypes. If the
results differ much from both, the call returns wrong values and is rejected. All other calls are accepted, and the
table contains the dtypes of their results. The result is unspecified (`?`) if two examples of the same pattern return
different dtypes, for example because of a scalar or a `dtype=` argument. A pattern with both accepted and rejected
examples has no entry.

Calls run in a child process. If a call ends the process (or the device fails), its operator is listed under `died`, and
the measurement continues.
"""

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
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from isotype.compat.torch import OpOverload
from isotype.compat.torch_device import device_type
from isotype.contracts.contract import KINDS, TABLES, UNSPECIFIED, read_table, table_name
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
    Spelled,
    fill,
    layout_of,
    letters_in,
    patterns_of,
)
from isotype.core.errors import first_line
from isotype.core.files import write_whole
from isotype.precision.devices.profile import device_profile

# Name of a float dtype in messages -> its letter, and the format specification for the name.
_SPELLINGS = {
    format(Spelled(dtype), style): (letter, f":{style}" if style else "")
    for style in ("torch", "", "name")
    for letter, dtype in FLOAT_DTYPES.items()
}
_WORD = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, _SPELLINGS)) + r")(?![\w.]*\w)")
_MOST = 256  # readings to try for a message

EXAMPLES = TABLES / "examples.json"
GPU_EXAMPLES = TABLES / "examples_gpu.json"
"""File with calls of the attention kernels of GPUs. The file is written by hand."""

_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")  # variables that lower a CPU's instruction set


Outcome = str | list[str]
"""The outcome of a call: the letters of its results, or a list with its error message."""


def combinations(recorded: str, doubles: bool) -> list[str]:
    """Return the combinations of dtype letters to measure. `recorded`: letters of the float operands of a call."""
    letters = "fbhd" if doubles else "fbh"
    count = len(recorded)
    if count <= 4:
        patterns = ["".join(letters) for letters in itertools.product(letters, repeat=count)]
    elif count <= 6:
        pairs = itertools.combinations(letters, 2)
        patterns = ["".join(mixed) for pair in pairs for mixed in itertools.product(pair, repeat=count)]
    else:
        patterns = [letter * count for letter in letters]
        orders = itertools.permutations(letters, 2)
        patterns += [a * at + b + a * (count - at - 1) for a, b in orders for at in range(count)]
    return list(dict.fromkeys([recorded, *patterns]))


def overload(op: str) -> OpOverload:
    """Return the operator with this name (`aten.mm.default`). For an operator of bitsandbytes, import bitsandbytes."""
    if op.startswith("bitsandbytes."):
        import bitsandbytes  # noqa: F401 - registers its operators
    operator: OpOverload = attrgetter(op)(torch.ops)
    return operator


def measure_operator(op: str, examples: Sequence[Json], device: torch.device) -> dict[str, Any]:
    """Measure `op` for every combination of dtypes.

    Returns:
        `patterns`: pattern -> outcome. `broken`: the errors of examples that this device rejects even in the recorded
        dtypes.
    """
    doubles = any(tensor["t"] == "float64" for tensor in tensors_in(examples))
    outcomes: dict[str, list[Outcome]] = {}
    broken = []
    for example in examples:
        calls = list(_calls(op, example, device, doubles))
        if calls and isinstance(recorded := calls[0][1], list):
            broken += recorded
            if all(isinstance(outcome, list) for _, outcome in calls):
                continue
        for pattern, outcome in calls:
            outcomes.setdefault(pattern, []).append(outcome)
    patterns = {pattern: _merged(outcomes[pattern]) for pattern in sorted(outcomes)}
    return {
        "patterns": {key: entry for key, entry in patterns.items() if entry is not None},
        "broken": broken,
    }


def _merged(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return one outcome for all examples of a pattern; None if only some of them raise errors."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, list)]
    if errors:
        return errors[0] if len(errors) == len(outcomes) else None
    return outcomes[0] if all(outcome == outcomes[0] for outcome in outcomes) else UNSPECIFIED


def _calls(op: str, example: Json, device: torch.device, doubles: bool) -> Iterator[tuple[str, Outcome]]:
    """Replay an example with all combinations of dtypes, beginning with the recorded combination. Yield (pattern, outcome)."""
    function, layout = overload(op), layout_of(op)
    tensors = list(tensors_in(example))
    operands = [LETTERS.get(getattr(torch, tensor["t"]), "i") for tensor in tensors]
    recorded = "".join(letter for letter in operands if letter != "i")
    # A pointwise operator's result on mixed dtypes depends on which operands have no dimensions.
    loose = layout.by_element or has_dtype_argument(example)
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
            yield pattern, [first_line(error)]
            continue
        if letters != recorded and corrupted(function, example, letters, recorded, returned, device):
            yield pattern, [CORRUPTS]
            continue
        unsure = loose or (pointwise and len(set(letters)) > 1)
        results = [RESULT_LETTERS.get(x.dtype, UNSPECIFIED) for x in returned if isinstance(x, torch.Tensor)]
        unsure = unsure or UNSPECIFIED in results
        yield pattern, UNSPECIFIED if unsure else "".join(results)


def measure(examples: Mapping[str, Sequence[Json]], device: str) -> dict[str, Any]:
    """Measure every operator of `examples`, and return the content of the JSON file of `device`."""
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


def difference(table: Mapping[str, Any], base: str, *, same_torch: bool = True) -> dict[str, Any]:
    """Return a table with only the operators that differ from the table `base` (`cpu-avx2`). `read_table` merges both.

    Raises:
        ValueError: the base has other operators or, with `same_torch`, another version of torch.
    """
    other = read_table(TABLES / f"{base}.json")
    another = same_torch and other.torch_version != table["torch"]
    if another or set(other.operators) != set(table["operators"]):
        raise ValueError(
            f"{base} has other operators, or was measured with torch {other.torch_version}, so measure it again"
        )
    messages = table["messages"]

    def spelled(patterns: Mapping[str, str | int], messages: Sequence[str]) -> dict[str, str | tuple[str]]:
        return {
            key: (fill(messages[entry], letters_in(key)),) if isinstance(entry, int) else entry
            for key, entry in patterns.items()
        }

    different = {
        op: patterns
        for op, patterns in table["operators"].items()
        if spelled(patterns, messages) != spelled(other.operators[op], other.messages)
    }
    entries = {entry for patterns in different.values() for entry in patterns.values()}
    used = sorted(entry for entry in entries if isinstance(entry, int))
    operators = {
        op: {key: used.index(entry) if isinstance(entry, int) else entry for key, entry in patterns.items()}
        for op, patterns in different.items()
    }
    used_messages = [messages[number] for number in used]
    return {**table, "base": base, "messages": used_messages, "operators": operators}


def _measured_in_children(
    examples: Mapping[str, Sequence[Json]], device: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Measure in child processes. After each crash, start a new child process. Return the results, and the errors of crashed operators."""
    measured: dict[str, Any] = {}
    died: dict[str, str] = {}
    remaining = dict(sorted(examples.items()))
    with tempfile.TemporaryDirectory() as folder:
        work, results = Path(folder, "work.json"), Path(folder, "results.jsonl")
        while remaining:
            work.write_text(json.dumps(remaining), encoding="utf-8")
            results.touch()
            child = [sys.executable, "-m", "isotype.contracts.measure", "--device", device]
            ended = subprocess.run([*child, "-o", results, "--child", work], check=False)
            for line in results.read_text(encoding="utf-8").splitlines():
                result = json.loads(line)
                measured[result.pop("op")] = result
            remaining = {op: calls for op, calls in remaining.items() if op not in measured}
            if remaining:
                fatal = next(iter(remaining))
                died[fatal] = f"its process ended with status {ended.returncode}"
                del remaining[fatal]
    return measured, died


def _device_name(device: str) -> str:
    if device in ("cuda", "rocm", "xpu"):
        return str(getattr(torch, device_type(device)).get_device_name())
    return device_profile(device).title


def read_examples(device: str, path: Path | None = None) -> dict[str, list[Json]]:
    """Return the calls to replay on a device kind, from the file `path` (default: isotype's own files)."""
    files = [path] if path is not None else [EXAMPLES] if device == "cpu" else [EXAMPLES, GPU_EXAMPLES]
    calls: dict[str, list[Json]] = {}
    for file in files:
        calls |= json.loads(file.read_text(encoding="utf-8"))
    return calls


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with a line for each entry of its dicts and lists, so that a diff shows entries."""
    tight = partial(json.dumps, separators=(",", ":"))
    lines = []
    for key, value in content.items():
        text = tight(value)
        if isinstance(value, dict) and value:
            inner = (f"  {json.dumps(name)}: {tight(item)}" for name, item in value.items())
            text = "{\n" + ",\n".join(inner) + "\n}"
        elif isinstance(value, list) and value:
            text = "[\n" + ",\n".join("  " + tight(item) for item in value) + "\n]"
        lines.append(f"{json.dumps(key)}: {text}")
    write_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Run the command line: measure a device, write its table, and print a summary."""
    parser = argparse.ArgumentParser(
        prog="python -m isotype.contracts.measure", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    file = "file for the table, or a folder for a table file that is named after device and torch version"
    parser.add_argument("--device", default="cpu", choices=KINDS)
    parser.add_argument("-o", "--output", type=Path, required=True, help=file)
    parser.add_argument(
        "--base", help="write only the operators that differ from this table (such as cpu-avx2)"
    )
    parser.add_argument("--examples", type=Path, help="calls to replay instead of isotype's examples")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(device_type(options.device))
    if options.child is not None:
        with options.output.open("a", encoding="utf-8") as lines:
            for op, calls in json.loads(options.child.read_text(encoding="utf-8")).items():
                lines.write(json.dumps({"op": op, **measure_operator(op, calls, device)}) + "\n")
                lines.flush()  # before the next operator, which may end the process
        return
    torch.empty(1, device=device)  # raises an error here if the device is missing
    started = time.perf_counter()
    table = measure(read_examples(options.device, options.examples), options.device)
    output = options.output
    if output.is_dir():
        capability = torch.cuda.get_device_capability() if options.device == "cuda" else None
        output /= f"{table_name(options.device, capability, torch.__version__)}.json"
    if options.base:
        same_torch = not output.stem.startswith(f"{options.base}-torch")
        table = difference(table, options.base, same_torch=same_torch)
    write_json(output, table)
    count = sum(map(len, table["operators"].values()))
    seconds = time.perf_counter() - started
    print(f"{output}: {len(table['operators'])} operators, {count} patterns in {seconds:.1f} s")
    for kind in ("died", "broken"):
        for op, why in table[kind].items():
            print(f"{kind:7} {op}: {why}")


def templates(messages: Mapping[str, str]) -> dict[str, str]:
    """Return a message template for each pattern. As few different templates as possible are used.

    If several operands have the dtype in a message, several templates are possible. In this case, the template that
    fits the most messages is chosen. `fill(template, letters_in(pattern))` returns each message exactly.
    """
    readings = {pattern: list(_readings(pattern, message)) for pattern, message in messages.items()}
    chosen: dict[str, str] = {}
    while len(chosen) < len(messages):
        remaining = [pattern for pattern in messages if pattern not in chosen]
        votes = Counter(reading for pattern in remaining for reading in readings[pattern])
        best = min(votes, key=lambda reading: (-votes[reading], reading))
        chosen |= dict.fromkeys([pattern for pattern in remaining if best in readings[pattern]], best)
    return chosen


def _readings(pattern: str, message: str) -> Iterator[str]:
    """Yield every template that becomes `message` when it is filled with the dtypes of `pattern`."""
    letters = letters_in(pattern)
    # With one group, re.split returns text and dtype names in turn.
    parts = _WORD.split(message.replace("{", "{{").replace("}", "}}"))
    choices = [[part] if at % 2 == 0 else _fields(part, letters) for at, part in enumerate(parts)]
    for reading in itertools.islice(itertools.product(*choices), _MOST):
        template = "".join(reading)
        if fill(template, letters) != message:
            raise RuntimeError(f"{template!r} does not give {message!r} for {pattern}")
        yield template


def _fields(word: str, letters: str) -> list[str]:
    """Return a placeholder for each operand with the dtype name `word`. If no operand has this dtype, return `word` itself."""
    letter, style = _SPELLINGS[word]
    return [f"{{{at}{style}}}" for at, other in enumerate(letters) if other == letter] or [word]


if __name__ == "__main__":
    main()
