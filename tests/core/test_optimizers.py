"""What names of optimizers say, for every name that transformers has."""

from __future__ import annotations

import pytest
from transformers.training_args import OptimizerNames

from isotype.core.optimizers import NAME_PARTS, has_own_kernels, package_of, state_of

NAMES = [each.value for each in OptimizerNames]


@pytest.mark.parametrize(
    ("name", "package", "dtype", "own"),
    [
        ("adamw_torch_fused", None, None, False),
        ("adamw_torch_8bit", "torchao", "8-bit", True),
        ("adamw_torch_4bit", "torchao", "4-bit", True),
        ("adamw_bnb_8bit", "bitsandbytes", "8-bit", True),
        ("paged_lion_8bit", "bitsandbytes", "8-bit", True),
        ("galore_adamw_8bit", "galore_torch", "8-bit", True),
        ("galore_adafactor", "galore_torch", "float32", True),
        ("apollo_adamw", "apollo_torch", "{}", True),
        ("adalomo", "lomo_optim", "none", True),
        ("schedule_free_sgd", "schedulefree", "{}", True),
        ("sgd", None, "none", False),
    ],
)
def test_of_several_parts_the_first_holds(
    name: str, package: str | None, dtype: str | None, own: bool
) -> None:
    state = state_of(name)
    assert (package_of(name), state and state[0], has_own_kernels(name)) == (package, dtype, own)


def test_every_part_is_one_of_a_name_of_transformers() -> None:
    later = {"muon"}  # newer releases have it
    idle = {part.text for part in NAME_PARTS if not any(part.text in name for name in NAMES)}
    assert idle <= later
