"""The runner of `benchmarks/gpu.py`: what ends badly says so in a line, and nothing is left running."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from benchmarks.workers import Lost, run_all  # noqa: E402

import agreement as script  # noqa: E402
import gpu  # noqa: E402
import gpu_train  # noqa: E402
from gpu_parts import agreement, contracts, exactness, kernels, profiled, smoke, speed, suite  # noqa: E402
from gpu_parts.commands import Options, call  # noqa: E402
from gpu_parts.runner import Job, Results, Runner, kill_group, summary  # noqa: E402
from tests.faulty_work import end, is_assert  # noqa: E402

sys.path.remove(str(ROOT / "benchmarks"))

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs jobs of Python code; returns the lines of `gpu.jsonl`."""

    def run(
        *codes: str, limit: float = 60.0, budget: float = 600.0, parallel: int = 1
    ) -> list[dict[str, Any]]:
        jobs = [
            Job("part", f"job {at}", (sys.executable, "-c", code), limit) for at, code in enumerate(codes)
        ]
        Runner(Results(tmp_path / "out"), tmp_path / "work" / "logs", budget, tmp_path).run(jobs, parallel)
        return [json.loads(line) for line in (tmp_path / "out" / "gpu.jsonl").read_text().splitlines()]

    return run


def test_every_result_of_a_job_is_a_line(run: Run, tmp_path: Path) -> None:
    code = 'print(\'{"peer": "a", "text": "first"}\'); print("a remark"); print(\'{"peer": "b"}\')'
    rows = run(code)
    assert [row.get("peer") for row in rows] == ["a", "b", None]
    assert rows[-1]["ended"] == "done"
    assert all((row["part"], row["job"]) == ("part", "job 0") for row in rows)
    printed = (tmp_path / "out" / "gpu.txt").read_text().splitlines()
    assert [line.split()[3] for line in printed] == ["first", "done"]


def test_folders_of_results_and_work_are_two(run: Run, tmp_path: Path) -> None:
    run("import sys; sys.exit('no')")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gpu.jsonl", "gpu.txt"]
    assert [path.name for path in (tmp_path / "work" / "logs").iterdir()] == ["part-job-0.log"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ValueError('wrong dtype')", "exit status 1: ValueError: wrong dtype"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "killed by SIGKILL, as by the kernel where memory runs out",
        ),
        (
            "raise type('OutOfMemoryError', (Exception,), {})('CUDA out of memory. Tried 2 GiB')",
            "out of memory: OutOfMemoryError: CUDA out of memory. Tried 2 GiB",
        ),
        ("import sys; sys.exit(3)", "exit status 3: nothing on its standard error"),
    ],
)
def test_what_fails_says_why_and_the_others_go_on(run: Run, code: str, reason: str) -> None:
    failed, other = run(code, "pass")
    assert (failed["ended"], failed["reason"]) == ("failed", reason)
    assert other["ended"] == "done"


def test_a_late_job_is_killed_with_all_that_it_started(run: Run, tmp_path: Path) -> None:
    """The grandchild would hold a GPU's memory; here it holds the pipe."""
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
print('{{"peer": "a"}}', flush=True)
time.sleep(600)
"""
    result, end, other = run(code, "pass", limit=1.0)
    assert result["peer"] == "a"
    assert (end["ended"], end["reason"]) == ("stopped", "killed at its limit of 1 s")
    assert other["ended"] == "done"
    assert not _runs(int((tmp_path / "child").read_text()))


def test_what_outlives_its_job_is_killed(run: Run, tmp_path: Path) -> None:
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
"""
    (end,) = run(code)
    assert end["ended"] == "done"
    assert not _runs(int((tmp_path / "child").read_text()))


def _runs(process: int) -> bool:
    """Whether a process runs, a while after it was killed; a zombie that nobody waits for does not."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True


def test_after_the_budget_jobs_are_named_and_not_run(run: Run) -> None:
    rows = run("pass", "pass", budget=0.5)
    assert [row["ended"] for row in rows] == ["not run", "not run"]
    assert rows[0]["reason"] == "the 0 s for all parts are over"


def test_jobs_of_a_part_run_at_a_time(run: Run, tmp_path: Path) -> None:
    """Each waits for the other's file: one after the other they would be late."""
    wait = "import time, pathlib, sys; pathlib.Path('{0}').touch()\nwhile not pathlib.Path('{1}').exists(): time.sleep(0.01)"
    rows = run(wait.format("a", "b"), wait.format("b", "a"), parallel=2, limit=20.0)
    assert [row["ended"] for row in rows] == ["done", "done"]


def test_a_runner_that_is_ended_kills_its_job(tmp_path: Path) -> None:
    code = f"""
import signal, sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from pathlib import Path
from gpu_parts.runner import Job, Results, Runner
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
sleep = "import os, time; open('child', 'w').write(str(os.getpid())); os.rename('child', 'ready'); time.sleep(600)"
runner = Runner(Results(Path("out")), Path("logs"), 600.0, Path("."))
runner.run([Job("part", "a", (sys.executable, "-c", sleep), 600.0), Job("part", "b", (sys.executable, "-c", sleep), 600.0)])
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if (tmp_path / "ready").exists():
                break
            time.sleep(0.05)
        child = int((tmp_path / "ready").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    finally:
        process.kill()
    assert not _runs(child)
    rows = [json.loads(line) for line in (tmp_path / "out" / "gpu.jsonl").read_text().splitlines()]
    assert [(row["job"], row["ended"]) for row in rows] == [("a", "failed"), ("b", "not run")]


def test_killing_a_group_that_is_gone_is_nothing() -> None:
    process = subprocess.Popen(["true"], start_new_session=True)
    process.wait()
    kill_group(process.pid)


def test_the_summary_counts_ends_and_wrong_results() -> None:
    rows = [
        {"part": "a", "ended": "done"},
        {"part": "a", "text": "x"},
        {"part": "b", "failed": "other bits"},
        {"part": "b", "ended": "stopped"},
        {"part": "b", "ended": "stopped"},
    ]
    assert summary(rows) == {"a": {"done": 1, "results": 1}, "b": {"wrong": 1, "stopped": 2}}


# ------------------------------------------------------------------------------------------ commands


@pytest.fixture(params=[True, False], ids=["small", "whole"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> Options:
    return Options(
        "cpu" if request.param else "cuda", str(tmp_path / "out"), str(tmp_path / "work"), request.param
    )


def test_every_job_has_a_command_that_parses(options: Options) -> None:
    jobs = [job for part in gpu.PARTS for job in gpu.jobs_of(part, options)]
    assert len({(job.part, job.name) for job in jobs}) == len(jobs) > 30
    for job in jobs:
        script, *arguments = job.command[1:]
        assert (ROOT / script).is_file()
        if job.part == "speed":
            read = gpu_train.parser().parse_args(arguments)
            assert (read.device, read.small, str(read.work)) == (options.device, options.small, options.work)
        else:
            part, name, text = gpu.parser().parse_args(arguments).job
            assert (part, name, Options(**json.loads(text))) == (job.part, job.name, options)


def test_only_some_jobs_of_the_parts(options: Options) -> None:
    assert [job.name for job in gpu.jobs_of("speed", options, ["none trl", "model"])] == ["model", "none trl"]


def test_the_peers_of_both_files_are_the_same() -> None:
    assert [peer for peers in speed.PEERS for peer in peers] == list(gpu_train.PEERS)
    assert speed.STORAGES == gpu_train.STORAGES


def test_all_calls_fit_into_half_an_hour_and_none_is_longer_than_ten_minutes() -> None:
    """With two minutes to start a machine; every part is in one call, and the peers that decide most come before the loops."""
    assert [part for call in gpu.CALLS for part in call.parts] == [
        *("machine", "smoke", "speed", "memory", "contracts", "exactness", "agreement", "suite")
    ]
    assert all(call.budget < 600 for call in gpu.CALLS)
    assert sum(call.budget for call in gpu.CALLS) <= 1800 - 120
    jobs = list(speed.commands(Options("cuda", "", "")))
    assert jobs[:3] == ["model", "none isotype", "none trl"]
    assert all("loop" in job for job in jobs[-4:])


def test_a_call_is_its_parts_within_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, float]] = []

    class Runs:
        def __init__(self, results: Any, logs: Path, budget: float, root: Path) -> None:
            self.budget = budget

        def run(self, jobs: list[Job], parallel: int) -> None:
            ran.append((jobs[0].part, self.budget))

    monkeypatch.setattr(gpu, "Runner", Runs)
    folders = ["--device", "cpu", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert gpu.main([*folders, "--call", "2"]) == 0
    assert gpu.main([*folders, "--call", "2", "--parts", "memory", "--budget", "7"]) == 0
    assert ran == [("speed", 590.0), ("memory", 590.0), ("memory", 7.0)]


@pytest.mark.parametrize("name", smoke.TRAININGS)
def test_trainings_of_the_smoke_parse(name: str, tmp_path: Path) -> None:
    from isotype.data.methods import METHODS
    from tests.parsed import parse_settings

    options = Options("cuda", str(tmp_path / "out"), str(tmp_path / "work"))
    smoke.prepare(options)
    smoke.prepare(options)  # it is there already
    method, *flags = smoke.training(options, name, "cpu", Path(options.out) / "run")
    settings = parse_settings(METHODS[method], flags)
    assert settings.training.max_steps == smoke.STEPS
    assert Path(settings.model.model_name_or_path).is_dir()


def test_commands_of_other_programs_parse(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", agreement.command(options)[1:])
    read: Namespace = script._arguments()
    assert (read.device, read.limit) == (options.device, 6 if options.small else 150)
    assert contracts.command(options)[1:3] == ["-m", "isotype.contracts.measure"]
    small = exactness.small_adapter_command(options, "bfloat16")
    assert (ROOT / small[1]).is_file()
    for name in suite.limits(options):
        assert all(
            (ROOT / path).exists() for path in suite.command(options, name) if path.startswith("tests/")
        )


# ------------------------------------------------------------------------------------------ what parts count


def test_the_last_line_of_pytest_is_counted() -> None:
    command = suite.command(Options("cpu", "", "", small=True), "CUDA hidden")
    assert "-q" not in command, "pyproject.toml has one, with two pytest counts nothing"
    assert suite.counts_of("F.\nFAILED a - b\n1 failed, 12 passed, 3 skipped in 4.00s\n") == {
        "failed": 1,
        "passed": 12,
        "skipped": 3,
    }
    with pytest.raises(suite.CommandError, match="pytest counted nothing: ERROR: no such file"):
        suite.counts_of("ERROR: no such file")


def test_a_command_that_fails_says_why_in_its_first_line() -> None:
    code = "import sys; sys.exit('error: no such model\\n  = help  name another')"
    with pytest.raises(suite.CommandError) as error:
        call([sys.executable, "-c", code])
    assert str(error.value).splitlines()[0].endswith("ended with 1: error: no such model")
    assert call([sys.executable, "-c", "import sys; print('x'); sys.exit(1)"], judges=True) == "x\n"


def test_differences_to_the_cpu() -> None:
    steps = [{"loss": 4.0, "grad_norm": 1.0}, {"loss": 3.9, "grad_norm": 0.9}]
    assert smoke.differences("sft", steps, steps) == []
    near = [{"loss": 4.03, "grad_norm": 1.05}, {"loss": 3.8, "grad_norm": 0.5}]
    assert smoke.differences("sft", near, steps) == []
    far = [{"loss": 4.05, "grad_norm": 1.2}, {"loss": 3.7, "grad_norm": 0.9}]
    assert smoke.differences("sft", far, steps) == [
        "step 1: loss 4.05, on the CPU 4",
        "first gradient's norm 1.2, on the CPU 1",
        "step 2: loss 3.7, on the CPU 3.9",
    ]
    assert smoke.differences("grpo", far, steps) == []
    assert smoke.differences("grpo", [{**steps[0], "loss": float("nan")}, steps[1]], steps) == [
        "step 1: loss is nan"
    ]
    assert smoke.differences("sft", steps[:1], steps) == ["1 steps, on the CPU 2"]


def test_a_gpu_that_lacks_room_takes_fewer_layers() -> None:
    sizes = gpu_train.Request("cuda", Path(), False, 32, 8).sizes
    layer, head = gpu_train.weights(sizes)
    assert (layer, head) == (218_103_808, 525_336_576)  # Llama 3 8B: 32 of these and two of those are 8.03e9
    assert gpu_train.fitting_layers(sizes, 70 * 2**30) == 32
    assert gpu_train.fitting_layers(sizes, 4 * head + 5 * 2 * layer + 1) == 5
    assert gpu_train.fitting_layers(sizes, 0) == 1


def test_the_share_in_which_a_kernel_runs_counts_nothing_twice() -> None:
    assert profiled.covered([(0, 10), (5, 12), (20, 30), (22, 25)]) == 22
    assert profiled.covered([]) == 0
    assert profiled.table([("a", 0, 1), ("b", 0, 5), ("a", 3, 1)]) == [["b", 1, 5e-9], ["a", 2, 2e-9]]


def test_kernels_are_compared_with_float64() -> None:
    """The compiled loops are right; off by a percent they are found."""
    (module,) = kernels.candidates("cpu").values()
    for case in kernels.cases(small=True):
        if kernels.has("loops", case, torch.float32):
            assert max(kernels.errors(module, case, torch.float32, "cpu")) < kernels.TOLERANCES[torch.float32]
    wrong = Namespace(
        **{**vars(module), "rotate": lambda *x, back=False: 1.01 * module.rotate(*x, back=back)}
    )
    case = kernels.Case("rotary", (2, 3, 5, 20))
    assert min(kernels.errors(wrong, case, torch.float32, "cpu")) > 5e-3


def test_a_kernel_that_raises_or_is_wrong_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others go on."""

    def norm(*operands: Any) -> Any:
        raise RuntimeError("no kernel image is available\nfor this GPU")

    (module,) = kernels.candidates("cpu").values()
    broken = Namespace(**{**vars(module), "rms_norm": norm, "rotate": lambda x, *_, back=False: 2 * x})
    monkeypatch.setattr(kernels, "candidates", lambda device: {"loops": broken})
    monkeypatch.setattr(kernels, "DTYPES", [torch.float32])
    rows: list[Any] = []
    with pytest.raises(kernels.WrongError, match="other numbers than float64: rms_norm"):
        rows.extend(kernels.rows(Options("cpu", "", "", small=True)))
    failed = {row["operation"]: row.get("failed") for row in rows}
    assert failed["rms_norm"] == "RuntimeError: no kernel image is available"
    assert failed["gated"] is None
    assert " at (" in str(failed["rotary"])


def test_peaks_are_read_from_the_results(tmp_path: Path) -> None:
    assert speed.measured_peaks(tmp_path) == []
    rows = [
        {"part": "speed", "job": "none isotype", "peer": "isotype", "step": 0.5},
        {"part": "speed", "job": "none isotype", "peer": "isotype", "failed": "out of memory"},
        {"part": "speed", "job": "none trl", "peer": "trl", "step": 0.5},
        {"part": "machine", "job": "device"},
    ]
    (tmp_path / "gpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert speed.measured_peaks(tmp_path) == rows[:1]


# ------------------------------------------------------------------------------------------ workers


def test_workers_that_a_case_has_broken_are_replaced() -> None:
    cases = ["a", "dies", "b", "asserts", "c", "hangs", "d", "e", "f"]
    results = dict(run_all(end, cases, 1, broken=is_assert, seconds=1.0, cases_each=2))
    assert sorted(results) == list(range(len(cases)))
    assert results[1] == Lost(f"the process ended with {-signal.SIGSEGV}")
    assert results[5] == Lost("killed after 1 s")
    process = {case: str(results[place]).rpartition(" ")[2] for place, case in enumerate(cases)}
    assert process["b"] == process["asserts"] != process["c"]
    assert process["d"] == process["e"] != process["f"]  # after so many cases a worker is replaced anyway


def test_a_case_that_broke_the_gpu_is_told_from_one_that_raised() -> None:
    ends = {
        "AcceleratorError: CUDA error: device-side assert triggered": True,
        "RuntimeError: CUDA error: an illegal memory access was encountered": True,
        "RuntimeError: expected mat1 and mat2 to have the same dtype": False,
        "": False,
    }
    assert {detail: script.is_broken(script.End("crashes", detail=detail)) for detail in ends} == ends
    lost = Lost("killed after 8 s")
    assert script.lost_end(script.really, lost).verdict == "dropped"
    assert script.lost_end(script.predicted, lost).verdict == "lost"


def test_workers_end_with_whoever_asks_for_no_more() -> None:
    results = run_all(end, ["a", "hangs"], 2)
    place, result = next(results)
    assert place == 0
    with contextlib.closing(results):
        pass
    assert not _runs(int(str(result).rpartition(" ")[2]))
