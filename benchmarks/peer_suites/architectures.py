"""Fused models of the zoo beside plain PEFT: all cases of `tests/peers.py`."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tests.peers import MODES, Case, Peers, Result, generate_cases, step_cases
from tests.zoo import ARCHITECTURES

VERDICTS = ("same", "rounding", "differs", "raises", "skipped")
FAULTS = ("differs", "raises")


@dataclass(frozen=True)
class Request:
    """What to compare of one architecture."""

    name: str
    modes: tuple[str, ...]
    every: int


def cases_of(request: Request, mode: str) -> list[Case]:
    """The cases of one mode; generations, which need no mode, go with `eval`."""
    cases = step_cases(request.name) + generate_cases(request.name)
    return [case for case in cases if case.mode == mode][:: request.every]


def compared(request: Request) -> list[Result]:
    """Every case of an architecture; one that cannot be built is one skipped case with the reason."""
    results = []
    for mode in request.modes:
        try:
            peers = Peers(request.name, mode)
        except Exception as error:  # noqa: BLE001 - what PEFT or transformers refuse is said in the table
            reason = f"not built: {type(error).__name__}: {error}".partition("\n")[0]
            results.append(Result(Case(request.name, mode, "none"), "skipped", detail=reason[:200]))
            continue
        results += peers.results(cases_of(request, mode))
    return results


def run(names: Sequence[str], modes: Sequence[str], every: int, jobs: int) -> list[Result]:
    """All results, with one line for each architecture as it comes and each difference below it."""
    print(f"{'architecture':<34}" + "".join(f"{verdict:>10}" for verdict in VERDICTS))
    requests = [Request(name, tuple(modes), every) for name in names]
    results: list[Result] = []
    for name, found in zip(names, _each(requests, jobs), strict=True):
        results += found
        print(_row(name, found), flush=True)
        for result in found:
            if result.verdict in FAULTS:
                print(f"    {result}", flush=True)
    _summary(results)
    return results


def _each(requests: Sequence[Request], jobs: int) -> Iterator[list[Result]]:
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=_silence, maxtasksperchild=20) as pool:
        started = time.perf_counter()
        for done, results in enumerate(pool.imap(compared, requests), 1):
            left = (time.perf_counter() - started) / done * (len(requests) - done)
            print(f"\r{done}/{len(requests)}, {left:.0f} s left   ", end="", file=sys.stderr, flush=True)
            yield results


def _silence() -> None:
    """Tiny random models make libraries warn about everything; what counts here is what comes out."""
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()


def _row(name: str, results: Sequence[Result]) -> str:
    counts = Counter(result.verdict for result in results)
    return f"{name:<34}" + "".join(f"{counts[verdict] or '.':>10}" for verdict in VERDICTS)


def _summary(results: Sequence[Result]) -> None:
    """What is common to the differences: how often each value of each axis is among them, and the reasons of what was skipped."""
    print()
    for axis in ("mode", "padding", "labels", "way"):
        for value in dict.fromkeys(getattr(result.case, axis) for result in results):
            print(_row(f"{axis} {value or '.'}", [r for r in results if getattr(r.case, axis) == value]))
    print(_row("all", results))
    for quantity in dict.fromkeys(name for r in results if r.verdict in FAULTS for name in r.sizes):
        sizes = [r.sizes[quantity] for r in results if r.verdict in FAULTS and quantity in r.sizes]
        print(f"{quantity}: {len(sizes)} cases, up to {max(sizes):.1e}")
    skipped = Counter(result.detail for result in results if result.verdict == "skipped")
    for reason, count in skipped.most_common():
        print(f"skipped {count}: {reason}")


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Every case as a row."""
    return [
        {**vars(result.case), "verdict": result.verdict, "sizes": dict(result.sizes), "detail": result.detail}
        for result in results
    ]


def chosen(names: Sequence[str]) -> list[str]:
    """The architectures of these names; all without any."""
    unknown = sorted(set(names) - set(ARCHITECTURES))
    if unknown:
        raise SystemExit(f"no architectures of the zoo: {', '.join(unknown)}; --list names them")
    return list(names or ARCHITECTURES)


__all__ = ["FAULTS", "MODES", "as_json", "chosen", "run"]
