"""Jobs in process groups of their own: a limit for each, a line of results as soon as there is one, nothing left running.

A job is a command that prints a line of JSON for each result it has. Each line is appended to `gpu.jsonl` when it comes, and one more when
the job ends, however it ends. What a job starts belongs to its process group and is killed with it: no benchmark that ran out of time keeps
a GPU's memory while the next one measures.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

Row = Mapping[str, Any]

LEAST = 3.0
"""Seconds that have to be left for a job to be started."""
_TAIL = 3000
_OUT_OF_MEMORY = re.compile(
    r"^.*(?:OutOfMemoryError|out of memory|CUBLAS_STATUS_ALLOC_FAILED).*$", re.MULTILINE
)
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|Warning|Assert)\w*\b.*$", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """One command of a part.

    Attributes:
        part, name: what its lines are filed under.
        command: arguments of the process; its standard output is lines of JSON, and others, which are passed over.
        limit: seconds after which it is killed.
        environment: variables beside this process's own.
    """

    part: str
    name: str
    command: tuple[str, ...]
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)


class Results:
    """`gpu.jsonl`, `gpu.txt` and the terminal: each line is there, whole, when it is written.

    Args:
        folder: of the two files; it is made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = []
        self._json, self._text = folder / "gpu.jsonl", folder / "gpu.txt"
        self._lock = threading.Lock()

    def add(self, job: Job, row: Row) -> None:
        """File a result under its job, and print its `text` where it has one."""
        whole = {"part": job.part, "job": job.name, **row}
        with self._lock:
            self.rows.append(whole)
            _append(self._json, json.dumps(whole))
            if text := row.get("text"):
                line = f"{job.part:<10} {job.name:<22} {text}"
                _append(self._text, line)
                print(line, flush=True)

    def say(self, text: str) -> None:
        """Print a line that is no result."""
        with self._lock:
            _append(self._text, text)
            print(text, flush=True)


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


class Runner:
    """Runs jobs until they end or the time for all of them is over.

    Args:
        results: where lines go.
        logs: folder for what jobs write to their standard error; it is made.
        budget: seconds for all jobs together.
        root: directory in which commands are run.
    """

    def __init__(self, results: Results, logs: Path, budget: float, root: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._results, self._logs, self._root = results, logs, root
        self._budget, self._ends = budget, time.monotonic() + budget
        self._groups: set[int] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, jobs: Sequence[Job], parallel: int = 1) -> None:
        """Run the jobs of a part, so many at a time; ends when all have ended."""
        with ThreadPoolExecutor(parallel) as pool, self._killing():
            for ended in [pool.submit(self.run_one, job) for job in jobs]:
                ended.result()

    @contextmanager
    def _killing(self) -> Iterator[None]:
        """Kill what runs when this process is told to end."""
        try:
            yield
        except BaseException:
            self._stopped = True
            with self._lock:
                groups = tuple(self._groups)
            for group in groups:
                kill_group(group)
            raise

    def run_one(self, job: Job) -> Row:
        """Run a job; returns its last line, which says how it ended."""
        began = time.monotonic()
        left = self._ends - began
        if self._stopped or left < LEAST:
            row: Row = _end(
                "not run",
                0.0,
                "stopped" if self._stopped else f"the {self._budget:.0f} s for all parts are over",
            )
        else:
            row = self._ended(job, began, min(job.limit, left))
        self._results.add(job, row)
        return row

    def _ended(self, job: Job, began: float, limit: float) -> Row:
        log = self._logs / f"{job.part}-{job.name}.log".replace(" ", "-").replace("/", "-")
        with log.open("wb") as errors:
            process = subprocess.Popen(
                job.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, cwd=self._root,
                env={**os.environ, **job.environment}, start_new_session=True, text=True, errors="replace",
            )  # fmt: skip
            with self._lock:
                self._groups.add(process.pid)
            assert process.stdout is not None
            reader = threading.Thread(target=self._read, args=(job, process.stdout), daemon=True)
            reader.start()
            late = False
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                kill_group(process.pid)
                with self._lock:
                    self._groups.discard(process.pid)
            code = process.wait()
            reader.join(10)  # a process that has left the group may hold the pipe
            if not reader.is_alive():
                process.stdout.close()
        seconds = time.monotonic() - began
        if late:
            return _end("stopped", seconds, f"killed at its limit of {limit:.0f} s", log)
        if code:
            return _end("failed", seconds, reason_of(code, _tail(log)), log)
        return _end("done", seconds)

    def _read(self, job: Job, lines: IO[str]) -> None:
        for line in lines:
            if line.startswith("{"):
                with suppress(json.JSONDecodeError):  # cut off where the process was killed
                    self._results.add(job, json.loads(line))


def kill_group(group: int) -> None:
    """Kill every process of a group, those that outlive its first one too."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()


def reason_of(code: int, errors: str) -> str:
    """One line that says why a job failed.

    Args:
        code: its exit status, negative for a signal.
        errors: the end of what it wrote to its standard error.
    """
    if memory := _OUT_OF_MEMORY.findall(errors):
        return f"out of memory: {memory[-1].strip()[:300]}"
    if code < 0:
        name = signal.Signals(-code).name
        more = ", as by the kernel where memory runs out" if name == "SIGKILL" else ""
        return f"killed by {name}{more}"
    lines = _ERROR.findall(errors) or errors.splitlines()
    return f"exit status {code}: {lines[-1].strip()[:300] if lines else 'nothing on its standard error'}"


def _end(how: str, seconds: float, reason: str = "", log: Path | None = None) -> Row:
    text = f"{how:<8} {seconds:>6.1f} s  {reason}".rstrip()
    row: dict[str, Any] = {"ended": how, "seconds": round(seconds, 1), "text": text}
    if reason:
        row["reason"] = reason
    if log is not None:
        row["errors"] = _tail(log)
    return row


def summary(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Part -> how its jobs ended -> how many, and how many results say that something is wrong (`failed`)."""
    parts: dict[str, dict[str, int]] = {}
    for row in rows:
        counts = parts.setdefault(row["part"], {})
        key = row.get("ended", "wrong" if "failed" in row else "results")
        counts[key] = counts.get(key, 0) + 1
    return parts
