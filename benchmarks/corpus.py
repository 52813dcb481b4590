"""Real reports, rebuilt and judged: does it really fail or cost, is it found, is its cause named, is its fix proven?

Every scenario of tests/corpus (a public report each, rebuilt as a tiny set-up) runs for real on this machine's CPU,
is checked, repaired and run again.

Run: python benchmarks/corpus.py [--jobs 2] [CASE …]
Prints a table (case, class, found, cause, fix), what did not go as it should, and one line of JSON; ends with status 1
where a scenario that is expected to be found is not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import results

sys.path.insert(0, str(Path(__file__).parents[1]))


def judge(case: str) -> dict[str, Any]:
    """One row of the table."""
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    from tests.corpus.discover import all_scenarios
    from tests.corpus.judge import judge_scenario

    started = time.perf_counter()
    verdict = judge_scenario(all_scenarios()[case])
    return {
        "case": case,
        "real": verdict.real,
        "code": verdict.code,
        "cause": verdict.cause,
        "fix": verdict.fix,
        "problems": list(verdict.problems),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> int:
    """Judge the scenarios and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", help="ids of reports; all by default")
    parser.add_argument("--jobs", type=int, default=2)
    options = results.parsed(parser, "cases")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from tests.corpus.discover import all_scenarios, corpus, left_out
    from tests.corpus.judge import NOT_PREDICTED

    cases = options.cases or list(all_scenarios())
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        rows = []
        for row in pool.imap(judge, cases):
            rows.append(row)
            print(f"\r{len(rows)}/{len(cases)} {row['case']:<40}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for row in rows:
        row["class"] = corpus()[row["case"]]["cause_class"]
        mark = "ok" if not row["problems"] else "known" if row["case"] in NOT_PREDICTED else "BAD"
        print(
            f"{mark:<6}{row['case']:<24}{row['class']:<45}{row['code']:<8}{row['cause'][:60]:<62}{row['fix'][:70]}"
        )
        for problem in row["problems"]:
            print(f"{'':<6}{problem[:150]}")
    good = [row for row in rows if not row["problems"]]
    unexpected = [row["case"] for row in rows if row["problems"] and row["case"] not in NOT_PREDICTED]
    summary = {
        "reports": len(corpus()),
        "scenarios": len(all_scenarios()),
        "left_out": len(left_out()),
        "judged": len(rows),
        "fail_or_cost_here": sum(bool(row["real"]) for row in rows),
        "found": sum(bool(row["code"]) for row in rows),
        "found_named_fixed": len(good),
        "unexpected": unexpected,
    }
    print(json.dumps(summary))
    if options.record:
        names = (
            "reports",
            "scenarios",
            "left_out",
            "judged",
            "fail_or_cost_here",
            "found",
            "found_named_fixed",
        )
        results.append("corpus/all", results.measured(summary, **dict.fromkeys(names, "reports")))
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
