"""The preflight on code bases that nobody here wrote, with the real step as judge.

Each code base of `benchmarks/foreign_code` comes from the package index, is built tiny, healthy and broken in the ways
of real reports, and is judged in a process of its own:

- verdict: check foretells whether the real step on this CPU runs or raises;
- place: an error finding names the phase and the line that really raised;
- cause: every error finding names the fault that was put in, and nothing innocent;
- repair: the real step runs after `isotype.repair` and what that left to the caller (settings, lines);
- untouched: after check the real step on the same objects ends with the same loss and the same weights, bit by bit;
  random states are what they were; no fake tensor, recorder or trace is alive.

They are installed into an environment of their own (nothing of the project depends on them): a venv under --cache, with
this project's own pinned versions and each package as pinned in `foreign_code`, without its dependencies but for those
listed there: several ask for torchvision or CUDA kernels that the models used here do not need.

Run: python benchmarks/foreign.py [--only NAME,NAME] [--case PATTERN] [--no-fixes] [--jobs 2] [--cache FOLDER]
     [--python PATH (an environment that has them)] [--json PATH] [--list]
Prints a row a set-up (seconds are of CPU time), what was wrong, a table of code bases and one line of JSON; ends with status 1 where a verdict,
place, cause or repair is wrong, check raises, or something is left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))

import results  # noqa: E402
from foreign_code.packages import CODE_BASES, SHARED  # noqa: E402

Row = dict[str, Any]
JUDGED = ("verdict", "place", "cause", "repaired")


def install(cache: Path, names: list[str]) -> Path:
    """A venv with the code bases `names`; returns its Python. What is installed is printed; a second run adds only
    what is missing.
    """
    python = cache / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(cache / "venv")], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    # torch first, as in the Makefile: a plain requirement would take a build with several GB of CUDA libraries.
    steps = [
        [*constraints, "torch"],
        [*constraints, "--editable", f"{ROOT}[train]"],
        ["--no-deps", *SHARED],
        *(["--no-deps", *CODE_BASES[name].requirements] for name in names),
    ]
    for step in steps:
        print("installing", " ".join(step), f"into {cache / 'venv'}", file=sys.stderr, flush=True)
        subprocess.run([*pip, *step], check=True)
    return python


def judged(python: Path, name: str, pattern: str, fixes: bool, seconds: float) -> list[Row]:
    """The rows of one code base, judged in a process of its own."""
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(python), "-W", "ignore", "-m", "foreign_code.worker", name, pattern, str(fixes)]
    rows: list[Row] = []
    ended = False
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        clock = threading.Timer(seconds, worker.kill)
        clock.start()
        for line in worker.stdout or ():
            ended |= line == "END\n"
            if line.startswith("ROW "):
                rows.append(json.loads(line[4:]))
                print(_line(rows[-1]), flush=True)
        worker.wait()
        clock.cancel()
        errors.seek(0)
        said = errors.read().strip().splitlines()[-1:]
    if not ended:
        why = (
            (said or ["it ended without a word"])[0]
            if worker.returncode > 0
            else f"signal {-worker.returncode}"
        )
        rows.append({"code_base": name, "case": "(the code base)", "real": why, "verdict": False})
        print(_line(rows[-1]), flush=True)
    return rows


def _line(row: Row) -> str:
    marks = {True: "right", False: "WRONG", None: "."}
    words = "".join(f"{marks[row.get(what)]:>8}" for what in JUDGED)
    seconds = "".join(f"{each:>8.2f}" for each in row.get("seconds", ()))
    left = f"   left: {', '.join(row['touched'])}" if row.get("touched") else ""
    return f"{row['code_base']:<32}{row['case']:<42}{words}{seconds}{left}"


def _wrong(row: Row) -> list[str]:
    """What went wrong with a set-up, in full."""
    if all(row.get(what) is not False for what in JUDGED):
        return []
    lines = [f"{row['code_base']}: {row['case']}", f"    really  {row['real']}   {row.get('real_place', '')}"]
    lines.append(f"    said    {row.get('said', '')}   {row.get('said_place', '')}")
    lines += [f"    cause   {cause}" for cause in row.get("causes", ())]
    if row.get("repair"):
        lines.append(f"    repair  {row['repair']}")
    return lines


def _summary(rows: list[Row]) -> dict[str, Any]:
    counts = {what: [bool(row[what]) for row in rows if row.get(what) is not None] for what in JUDGED}
    timed = [row["seconds"] for row in rows if row.get("seconds")]
    summary: dict[str, Any] = {"set-ups": len(rows), "code bases": len({row["code_base"] for row in rows})}
    summary |= {what: f"{sum(values)} of {len(values)}" for what, values in counts.items()}
    summary["untouched"] = f"{sum(not row.get('touched') for row in rows)} of {len(rows)}"
    for at, what in enumerate(("real step", "check without fixes", "check")):
        times = sorted(each[at] for each in timed)
        if times:
            tenth = times[min(len(times) - 1, round(0.9 * len(times)))]
            summary[f"{what}, s"] = {
                "median": round(statistics.median(times), 2),
                "90 %": round(tenth, 2),
                "worst": round(times[-1], 2),
            }
    return summary


def keep(rows: list[Row], summary: dict[str, Any]) -> None:
    """Add what was right, and what it took, to the file of results."""
    for what in (*JUDGED, "untouched"):
        right, _, count = summary[what].partition(" of ")
        counts = {"right": results.Measure(int(right)), "all": results.Measure(int(count))}
        results.append(f"foreign/{what}", counts)
    for what in ("real step", "check without fixes", "check"):
        found = {key.replace("90 %", "most"): value for key, value in summary[f"{what}, s"].items()}
        results.append(f"foreign-time/{what}", results.measured(found, median="s", most="s", worst="s"))


def _table(rows: list[Row]) -> None:
    print(
        f"\n{'code base':<34}{'for':<38}{'set-ups':>8}{'raise':>7}"
        + "".join(f"{what:>10}" for what in (*JUDGED, "untouched"))
    )
    for name in dict.fromkeys(row["code_base"] for row in rows):
        own = [row for row in rows if row["code_base"] == name]
        cells = []
        for what in JUDGED:
            values = [bool(row[what]) for row in own if row.get(what) is not None]
            cells.append(f"{sum(values)}/{len(values)}" if values else ".")
        cells.append(f"{sum(not row.get('touched') for row in own)}/{len(own)}")
        raised = sum(row.get("real") != "runs" for row in own)
        domain = CODE_BASES[name].domain
        print(f"{name:<34}{domain:<38}{len(own):>8}{raised:>7}" + "".join(f"{cell:>10}" for cell in cells))


def main() -> int:
    """Install, judge, print; 1 where something is wrong."""
    options = _options()
    names = options.only.split(",") if options.only else list(CODE_BASES)
    if options.list:
        for name in names:
            print(f"{name:<34}{CODE_BASES[name].domain:<38}{' '.join(CODE_BASES[name].requirements)}")
        return 0
    python = options.python or install(options.cache, names)
    heads = "".join(f"{what:>8}" for what in (*JUDGED[:3], "repair", "real s", "check s", "fixes s"))
    print(f"{'code base':<32}{'set-up':<42}{heads}")
    with ThreadPoolExecutor(options.jobs) as pool:
        found = pool.map(
            lambda name: judged(python, name, options.case, not options.no_fixes, options.timeout), names
        )
        rows = [row for each in found for row in each]
    for row in rows:
        print("\n".join(("", *_wrong(row))) if _wrong(row) else "", end="")
    _table(rows)
    summary = _summary(rows)
    print(json.dumps(summary))
    if options.record:
        keep(rows, summary)
    if options.json:
        options.json.write_text(json.dumps({"summary": summary, "rows": rows}, indent=1) + "\n")
    good = rows and all(row.get(what) is not False for row in rows for what in JUDGED)
    return 0 if good and not any(row.get("touched") for row in rows) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "isotype-foreign"
    parser.add_argument("--only", default="", help="names of code bases, with commas")
    parser.add_argument("--case", default=".", help="a pattern of set-ups")
    parser.add_argument("--no-fixes", action="store_true", help="try none and repair nothing: far faster")
    parser.add_argument("--jobs", type=int, default=2, help="code bases at a time")
    parser.add_argument("--cache", type=Path, default=cache, help=f"where the venv is made ({cache})")
    parser.add_argument(
        "--python", type=Path, help="an environment that has the packages: nothing is installed"
    )
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds a code base may take")
    parser.add_argument("--json", type=Path, help="also write every row here")
    parser.add_argument("--list", action="store_true", help="only say what would be installed")
    return results.parsed(parser, "only", "case", "no_fixes")


if __name__ == "__main__":
    sys.exit(main())
