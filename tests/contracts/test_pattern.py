"""Patterns: the keys of the tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isotype.contracts.measure import templates
from isotype.contracts.pattern import LETTERS, RESULT_DTYPES, fill, layout_of, letters_in, patterns_of


@pytest.mark.parametrize(
    ("op", "letters", "patterns"),
    [
        ("aten.mm.default", "fb", ("fb",)),
        ("aten.index_put_.default", "fiib", ("fib",)),  # any number of indices
        ("aten.where.self", "ifb", ("ifb",)),
        ("aten.cat.default", "fbfb", ("{bf}",)),
        ("aten.stack.default", "f", ("{f}",)),
        ("aten._foreach_add_.Scalar", "ffb", ("f", "b")),
        ("aten._foreach_add_.List", "ffbb", ("fb",)),
        ("aten._foreach_add_.Tensor", "ffb", ("f|b",)),
        ("aten._foreach_addcdiv_.ScalarList", "bbbbbb", ("bbb",)),
        ("aten._amp_foreach_non_finite_check_and_unscale_.default", "bbhff", ("b|ff", "h|ff")),
        ("aten._fused_adamw_.default", "bbbbbbbbff", ("bbbbf",)),
        ("aten._fused_adamw_.default", "b" * 15 + "fff", ("bbbbbf",)),  # amsgrad: a sixth list
        ("aten._fused_adamw_.default", "bbbbf" + "f", ("bbbbf|f",)),  # found_inf rather than amsgrad
        ("aten._fused_sgd_.default", "ffbb", ("fb",)),
        ("nobody.knows.default", "fiib", ("fib",)),
    ],
)
def test_patterns(op: str, letters: str, patterns: tuple[str, ...]) -> None:
    assert sorted(patterns_of(layout_of(op), letters)) == sorted(patterns)


def test_every_result_letter_stands_for_one_dtype() -> None:
    assert len(set(RESULT_DTYPES.values())) == len(RESULT_DTYPES)
    assert all(RESULT_DTYPES[LETTERS[dtype]] is dtype for dtype in LETTERS if dtype.is_floating_point)


def test_dtypes_are_spelled_as_torch_spells_them() -> None:
    template = "{0} {0:name} {0:torch}"
    assert fill(template, "f") == "float Float torch.float32"
    assert fill(template, "b") == "c10::BFloat16 BFloat16 torch.bfloat16"
    assert fill(template, "h") == "c10::Half Half torch.float16"
    assert fill(template, "d") == "double Double torch.float64"
    assert fill(template, "i", torch.int8) == "signed char Char torch.int8"


def test_messages_of_one_operator_share_a_template() -> None:
    said = {
        "fb": "expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16",
        "hf": "expected m1 and m2 to have the same dtype, but got: c10::Half != float",
        "bb": "{unsupported} BFloat16",
    }
    made = templates(said)
    assert made["fb"] == made["hf"] == "expected m1 and m2 to have the same dtype, but got: {0} != {1}"
    assert made["bb"] == "{{unsupported}} {0:name}"


PATTERNS = st.text("fbhi", min_size=1, max_size=4)
WORDS = st.sampled_from(
    ["float", "c10::Half", "BFloat16", "torch.float16", "{x}", "a float_t", "Floats", "got:"]
)


@given(st.dictionaries(PATTERNS, st.lists(WORDS, max_size=5).map(" ".join), max_size=6))
def test_a_template_gives_its_message_back(messages: dict[str, str]) -> None:
    made = templates(messages)
    assert {pattern: fill(made[pattern], letters_in(pattern)) for pattern in messages} == messages
