"""Two checkouts of isotype by turns: the step of `train.py`, the load of `load.py`. Whether a change made anything slower.

Every measurement is a process of its own with the sources of one checkout and this folder's scripts; the checkouts take turns, and who begins
changes from round to round. *Seconds* are CPU seconds, user and system: a busy machine changes them less than the clock's. Of a training they
are the median of all steps after the first two, with their quartiles; of a load, those of the load alone. *Ratio* is of each round, after over
before: its median, least and greatest. Of a training the losses are compared step by step: the same bits, or the greatest relative difference.

The model of the steps is a random Llama of 8 layers of width 384 and 8192 words, or what `--model` names.

Run: python benchmarks/revisions.py BEFORE AFTER [--storage none nf4 int8] [--dtype fp32 bf16] [--tokens 128] [--checkpointing off on]
     [--model embedded:smollm2] [--load CASE …] [--rounds 5] [--steps 12] [--threads 1] [--json PATH]
Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from load import CASES, prepared, warm
from train import WARM_UP, Setup
from turns import quartiles


@dataclass(frozen=True)
class Run:
    """What one process took: CPU seconds of its steps or of its load, losses of a training."""

    seconds: tuple[float, ...]
    losses: tuple[float, ...] = ()

    @property
    def typical(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)


def write_model(folder: Path) -> Path:
    """A small Llama with random weights, and a tokenizer by words of the text that `train.py` trains on."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    text = Path(__file__).parents[1] / "src" / "isotype" / "data" / "passages" / "passages.txt"
    words = dict.fromkeys(["<pad>", "<unk>", "<end>", *text.read_text(encoding="utf-8").split()])
    vocabulary = {word: index for index, word in enumerate(list(words)[:8192])}
    config = transformers.LlamaConfig(
        hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2, vocab_size=8192,
        pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    by_words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    by_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=by_words, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def run(checkout: Path, script: str, arguments: Sequence[str], threads: int) -> dict[str, Any]:
    """What a script of this folder, run with the sources of a checkout, prints last."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout / "src"),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{script} of {checkout} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1].removeprefix("RESULT "))
    return result


def train_step(setup: Setup, threads: int) -> Callable[[Path], Run]:
    """Trains with the command of a checkout."""

    def measured(checkout: Path) -> Run:
        result = run(checkout, "train.py", ["--child", "isotype", json.dumps(asdict(setup))], threads)
        return Run(tuple(result["seconds"][WARM_UP:]), tuple(result["losses"][: setup.steps]))

    return measured


def load(case: str, path: str, threads: int) -> Callable[[Path], Run]:
    """Loads a checkpoint by a checkout."""

    def measured(checkout: Path) -> Run:
        return Run((run(checkout, "load.py", ["--child", case, "isotype", path], threads)["cpu"],))

    return measured


def compare(
    title: str, measured: Callable[[Path], Run], sides: tuple[Path, Path], rounds: int
) -> dict[str, Any]:
    """Rounds of both checkouts, as a row."""
    runs: tuple[list[Run], list[Run]] = ([], [])
    for turn in range(rounds):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            runs[side].append(measured(sides[side]))
    row: dict[str, Any] = {"title": title}
    for name, each in zip(("before", "after"), runs, strict=True):
        row[name] = quartiles([second for one in each for second in one.seconds])
    pairs = list(zip(*runs, strict=True))
    ratios = [after.typical / before.typical for before, after in pairs]
    row["ratio"] = [statistics.median(ratios), min(ratios), max(ratios)]
    losses = [each for before, after in pairs for each in zip(before.losses, after.losses, strict=True)]
    row["losses"] = max((abs(b - a) / abs(a) for a, b in losses), default=None)
    return row


def line_of(row: dict[str, Any]) -> str:
    """A row of the table."""
    sides = [f"{middle:.3f} ({low:.3f} to {high:.3f})" for low, middle, high in (row["before"], row["after"])]
    middle, least, most = row["ratio"]
    difference = row["losses"]
    losses = (
        "" if difference is None else "the same bits" if difference == 0 else f"differ by {difference:.1e}"
    )
    return f"{row['title']:<36} {sides[0]:<26} {sides[1]:<26} {middle:.3f} ({least:.3f} to {most:.3f})   {losses}"


def main() -> None:
    """Run the cases asked for and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("before", type=Path, help="root of a checkout")
    parser.add_argument("after", type=Path, help="root of another")
    parser.add_argument("--storage", nargs="*", default=["none", "nf4", "int8"])
    parser.add_argument("--dtype", nargs="+", default=["fp32"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[128])
    parser.add_argument("--checkpointing", nargs="+", choices=["on", "off"], default=["off"])
    parser.add_argument("--model", help="what is trained, in place of the random one")
    parser.add_argument(
        "--load", nargs="*", default=[], metavar="CASE", help="of load.py, with its small model"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sides = (options.before.resolve(), options.after.resolve())
    print(f"{'CPU seconds':<36} {'before (quartiles)':<26} {'after':<26} {'ratio':<26} losses", flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        axes = itertools.product(options.storage, options.dtype, options.tokens, options.checkpointing)
        model = options.model
        for storage, dtype, tokens, checkpointing in axes:
            model = model or str(write_model(Path(scratch) / "model"))
            on = checkpointing == "on"
            setup = Setup(storage, dtype, tokens, on, options.steps, model=model, cpu=True)
            measured = train_step(setup, options.threads)
            rows.append(compare(f"step, {setup}", measured, sides, options.rounds))
            print(line_of(rows[-1]), flush=True)
        for case in options.load:
            path = prepared(CASES[case].checkpoint, Path(scratch), small=True)
            warm(path)
            measured = load(case, path, options.threads)
            rows.append(compare(f"load, {case}", measured, sides, options.rounds))
            print(line_of(rows[-1]), flush=True)
    text = json.dumps({"rows": rows, "threads": options.threads})
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
