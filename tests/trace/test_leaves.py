"""map_leaves is tree_map, sooner."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from isotype.trace.fake.arguments import map_leaves

Pair = namedtuple("Pair", "first second")

VALUES: tuple[Any, ...] = (
    (1, [2.0, {"three": None, "four": (torch.bfloat16, "five")}], torch.device("cpu")),
    OrderedDict(one=[1], two=(2,)),
    Pair([1], {"a": 2}),
    torch.return_types.max((1, 2)),
    slice(1, 2),
    {1, 2},
    (),
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_it_is_tree_map(value: Any) -> None:
    def named(leaf: Any) -> Any:
        return type(leaf).__name__, str(leaf)

    made = map_leaves(named, value)
    assert made == tree_map(named, value)
    assert type(made) is type(tree_map(named, value))


def test_a_tensor_is_a_leaf() -> None:
    (made,) = map_leaves(lambda tensor: tensor + 1, [torch.zeros(2)])
    assert made.tolist() == [1, 1]
