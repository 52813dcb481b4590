"""Work in processes that may die: a worker that a case has killed, or whose GPU it has broken, is replaced and the next case goes on.

After an assertion on a GPU every later call of the same process fails (`torch.AcceleratorError`): the worker that met one says so and ends. A
plain pool of processes would fail all later cases, and wait for ever for one whose process has died.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

Case = TypeVar("Case")
End = TypeVar("End")


@dataclass(frozen=True)
class Lost:
    """A case without a result.

    Attributes:
        reason: how its worker ended.
    """

    reason: str


class _Worker(Generic[Case, End]):
    """A process with the case that it works at."""

    def __init__(
        self, work: Callable[[Case], End], prepare: Callable[[], None], broken: Callable[[End], bool]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, work, prepare, broken), daemon=True)
        self.process.start()
        other.close()
        self.place = -1
        self.cases = 0
        self.deadline = 0.0

    def send(self, place: int, case: Case, seconds: float) -> None:
        self.place, self.deadline = place, time.monotonic() + seconds
        self.cases += 1
        self.pipe.send(case)

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _serve(
    pipe: Connection, work: Callable[[Any], Any], prepare: Callable[[], None], broken: Callable[[Any], bool]
) -> None:
    """The loop of a worker; it ends after a result that says that this process is of no use any more."""
    prepare()
    pipe.send(_READY)
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        result = work(case)
        is_last = broken(result)
        pipe.send((result, is_last))
        if is_last:
            return


_START = 300.0
"""Seconds that a worker may take to import what it needs."""
_READY = "ready"


def _nothing() -> None:
    """What a worker prepares by default."""


def _sound(result: object) -> bool:
    return False


def run_all(
    work: Callable[[Case], End],
    cases: Sequence[Case],
    jobs: int,
    *,
    prepare: Callable[[], None] = _nothing,
    broken: Callable[[End], bool] = _sound,
    seconds: float = 600.0,
    cases_each: int = 100,
) -> Iterator[tuple[int, End | Lost]]:
    """`work` of every case in worker processes: (place of the case, result), as they come.

    Args:
        work: of one case; it can be pickled, as cases and results.
        cases: what is worked at.
        jobs: processes at a time.
        prepare: called once in each worker.
        broken: whether a result tells that its worker can do nothing more.
        seconds: that a case may take; its worker is killed then.
        cases_each: that a worker takes before it is replaced.
    """
    waiting = list(range(len(cases)))[::-1]
    workers: list[_Worker[Case, End]] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                workers.append(_Worker(work, prepare, broken))
                place = waiting.pop()
                workers[-1].send(place, cases[place], _START)
            ready = wait([worker.pipe for worker in workers], timeout=1.0)
            for worker in list(workers):
                if worker.pipe in ready:
                    received = _received(worker)
                    if received == _READY:
                        worker.deadline = time.monotonic() + seconds
                        continue
                    result, is_last = received
                elif time.monotonic() > worker.deadline:
                    result, is_last = Lost(f"killed after {seconds:.0f} s"), True
                else:
                    continue
                yield worker.place, result
                if is_last or not waiting or worker.cases >= cases_each:
                    workers.remove(worker)
                    worker.end()
                else:
                    place = waiting.pop()
                    worker.send(place, cases[place], seconds)
    finally:
        for worker in workers:
            worker.end()


def _received(worker: _Worker[Case, End]) -> Any:
    """(result, whether it is the worker's last), or `_READY`."""
    try:
        return worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join(10)
        return Lost(f"the process ended with {worker.process.exitcode}"), True
