"""Fused models under what other people expect of theirs: PEFT's own tests, TRL's trainers, and architecture by architecture.

- `architectures`: every architecture of the zoo (tests/zoo), fused and plain: training steps in each mode, with each padding, with
  labels that are masked or whole, and generation. What comes out is compared in float32, and with float64 where it is not
  the same (tests/peers.py says how, and from which size on a difference counts).
- `peft`: PEFT's own tests, once as they are and once with `isotype.fuse` put into every PEFT model as it is built, loaded or given another
  adapter. What counts are the tests that fail with it and pass without it. These run once more with a tolerance of a rounding
  (peer_suites/plugin.py): those that pass then are listed apart, with the largest difference; they are no failure.
- `trajectories`: every `isotype` training command beside TRL's trainer with the same arguments, in float32, ten steps of one set-up after
  another: training losses, gradient norms and held-back losses within 1e-5 (peer_suites/trajectories.py), and both beside float64.
- `trl`: the six trainers of TRL on tiny models, fused and with the PrecisionCallback, beside the same trainers without either; and TRL's own
  tests as PEFT's, where a folder of them is given.

Nothing is fetched. PEFT's source distribution holds its tests: `pip download --no-deps --no-binary peft peft==VERSION`, unpacked, is
what `--peft-tests` takes; they import diffusers and parameterized, too. TRL's are in its repository only. Models and data sets that the tests name on the hub are made on
this machine, tiny and random; what is not made is skipped by both runs alike.

Run: python benchmarks/peers.py [architectures|trajectories|peft|trl …] [--set-ups NAME,NAME] [--model FOLDER] [--only NAME,NAME] [--modes train,eval] [--every 1] [--first 0] [--jobs 2] [--list]
     [--peft-tests FOLDER] [--trl-tests FOLDER] [--files NAME,NAME] [-k EXPRESSION] [--cache FOLDER] [--json PATH]
Prints tables and every difference; ends with status 1 where there is one that fusing alone brings, and where a file of tests is
not run to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

# Before torch is loaded: tiny models are slower on several threads, and the jobs share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from peer_suites import architectures, suites, trainers, trajectories  # noqa: E402
from peer_suites.hub import make_hub  # noqa: E402

PARTS = ("architectures", "trajectories", "peft", "trl")


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that are asked for; 1 where fusing alone changes something."""
    options = options_of(arguments)
    names = architectures.chosen(options.only.split(",") if options.only else [])
    if options.list:
        print("\n".join(names))
        return 0
    record: dict[str, Any] = {}
    failed = False
    if "architectures" in options.parts:
        results = architectures.run(names, options.modes.split(","), options.every, options.jobs)
        record["architectures"] = architectures.as_json(results)
        failed |= any(result.verdict in architectures.FAULTS for result in results)
    if "trajectories" in options.parts:
        asked = options.set_ups.split(",") if options.set_ups else list(trajectories.CASES)
        courses = trajectories.run(asked, options.model)
        record["trajectories"] = [vars(row) for row in courses]
        failed |= any(row.verdict in ("differs", "raises") for row in courses)
    if "trl" in options.parts:
        rows = trainers.run(list(trainers.NAMES), options.jobs)
        record["trainers"] = [vars(row) for row in rows]
        failed |= any(row.verdict in architectures.FAULTS for row in rows)
    for part, tests, files in (
        ("peft", options.peft_tests, suites.PEFT_FILES),
        ("trl", options.trl_tests, suites.TRL_FILES),
    ):
        if part in options.parts and tests is not None:
            files = tuple(options.files.split(",")) if options.files else files
            hub = make_hub(options.cache)
            comparisons = suites.compare(
                tests, files, hub, options.k, options.jobs, options.timeout, options.every, options.first
            )
            record[f"{part}'s tests"] = suites.as_json(comparisons)
            failed |= not all(comparison.good for comparison in comparisons)
        elif part in options.parts:
            print(f"\n{part}'s own tests are not run: --{part}-tests names no folder of them")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(failed)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """What a command line asks for; all parts where it names none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "isotype-peers"
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all by default")
    parser.add_argument("--only", default="", help="names of architectures, with commas")
    names = ", ".join(trajectories.CASES)
    parser.add_argument("--set-ups", default="", help=f"of trajectories, with commas: {names}")
    parser.add_argument("--model", help="folder of a model for trajectories (a tiny Llama)")
    parser.add_argument(
        "--modes", default=",".join(architectures.MODES), help="of architectures, with commas"
    )
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        help="every nth case of an architecture and mode, every nth test of a file",
    )
    parser.add_argument("--first", type=int, default=0, help="of every nth test of a file, begin with this")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--list", action="store_true", help="only name the architectures")
    parser.add_argument("--peft-tests", type=Path, help="a folder with PEFT's tests")
    parser.add_argument("--trl-tests", type=Path, help="a folder with TRL's tests")
    parser.add_argument("--files", default="", help="of their tests only these, with commas")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds that a file of tests may take")
    parser.add_argument("-k", default="", help="pytest's expression for tests of PEFT and TRL")
    parser.add_argument("--cache", type=Path, default=cache, help=f"where tiny models are made ({cache})")
    parser.add_argument("--json", type=Path, help="also write every result here")
    options = parser.parse_args(arguments)
    options.parts = options.parts or list(PARTS)
    return options


if __name__ == "__main__":
    sys.exit(main())
