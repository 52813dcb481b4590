"""Whatever isotype does beside a training moves no generator: in the first call of a process too, which imports."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import isotype
from isotype.core import random_states
from isotype.core.random_states import random_states_kept
from tests.pairwise import few
from tests.processes import printed

_PROCESS = """
import random, sys
import numpy, torch

def states():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
before = states()
import isotype
isotype.check(model, {'input': torch.ones(2, 4)})
for name in sys.argv[1:]:
    getattr(isotype, name)
print([one == other for one, other in zip(before, states())])
"""


@few("names", {"check": (), "every name": isotype.__all__}, "check")
def test_the_first_call_of_a_process_leaves_every_generator_as_it_was(names: tuple[str, ...]) -> None:
    """A check, which imports what it needs; with every public name, which imports the rest."""
    assert printed(_PROCESS, *names).splitlines()[-1] == "[True, True, True]"


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with two GPUs that nobody uses yet; states are numbers, and what is asked of which GPU is written down."""
    gpus = SimpleNamespace(started=False, states={0: 10, 1: 20}, asked=[])

    def get_rng_state(device: torch.device) -> int:
        gpus.started = True
        gpus.asked.append(device.index)
        return int(gpus.states[device.index])

    def set_rng_state(state: int, device: torch.device) -> None:
        gpus.states[device.index] = state

    backend = SimpleNamespace(
        is_initialized=lambda: gpus.started, get_rng_state=get_rng_state, set_rng_state=set_rng_state
    )
    monkeypatch.setattr(random_states, "_backend", lambda _: backend)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    return gpus


def test_a_gpu_that_nobody_uses_is_not_started(two_gpus: SimpleNamespace) -> None:
    with random_states_kept():
        pass
    assert not two_gpus.started
    assert two_gpus.asked == []


def test_of_a_device_to_be_started_the_state_is_kept_and_no_other_is_touched(
    two_gpus: SimpleNamespace,
) -> None:
    with random_states_kept(torch.device("cuda", 1)):
        two_gpus.states[1] += 5
    assert two_gpus.states == {0: 10, 1: 20}
    assert two_gpus.asked == [1]
    assert random_states._in_use(torch.device("cpu")) != []  # it runs now


def test_of_devices_in_use_every_state_is_kept(two_gpus: SimpleNamespace) -> None:
    two_gpus.started = True
    with random_states_kept():
        two_gpus.states = {0: 0, 1: 0}
    assert two_gpus.states == {0: 10, 1: 20}


def test_nothing_is_forked_for_every_gpu() -> None:
    """`torch.random.fork_rng()` without devices starts every GPU of the machine, in every process of a run."""
    package = Path(isotype.__file__).parent
    assert [path for path in package.rglob("*.py") if "fork_rng(" in _without_docs(path)] == []


def _without_docs(path: Path) -> str:
    return "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if "`" not in line)
