"""Whatever isotype does beside a training moves no generator: in the first call of a process too, which imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROCESS = """
import random, sys
import numpy, torch

def states():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
before = states()
import isotype
{act}
after = states()
print([one == other for one, other in zip(before, after)])
"""

ACTS = {
    "check": "isotype.check(model, {'input': torch.ones(2, 4)})",
    "names": "[getattr(isotype, name) for name in isotype.__all__]",
}


@pytest.mark.parametrize("act", ACTS)
def test_the_first_call_of_a_process_leaves_every_generator_as_it_was(act: str) -> None:
    code = _PROCESS.replace("{act}", ACTS[act])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["[True, True, True]"], done.stderr
