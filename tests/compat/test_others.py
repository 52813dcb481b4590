"""accelerate, bitsandbytes and Python still have what `isotype.compat` names, and still need what is replaced in them."""

from __future__ import annotations

import argparse
import inspect
import sys
from typing import Any

import bitsandbytes
import numpy
import pytest
import torch
from bitsandbytes.nn import modules
from transformers.integrations import moe
from transformers.utils import import_utils

from isotype.compat.accelerate import FORWARD_BEFORE, HOOK, is_prepared, mark_as_skipped, mixed_precision
from isotype.compat.bitsandbytes import REPACK, quantized_on
from isotype.compat.peft import takes_outputs_first
from isotype.compat.standard import ValueParser, actions_of, frame_above, is_being_imported, source_of
from isotype.compat.torch import FakeTensorMode, operator_packet, state_dict_hooks
from isotype.compat.transformers import fakes_taken_for_real


@pytest.mark.parametrize("read", [takes_outputs_first, operator_packet, state_dict_hooks])
def test_an_attribute_that_a_library_has_renamed_is_an_error(read: Any) -> None:
    with pytest.raises(AttributeError, match="has no attribute '_"):
        read(object())


def test_what_accelerate_leaves() -> None:
    from accelerate import Accelerator
    from accelerate.hooks import ModelHook, add_hook_to_module
    from accelerate.optimizer import AcceleratedOptimizer

    module = torch.nn.Linear(1, 1)
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD(module.parameters()))
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert not optimizer.step_was_skipped
    mark_as_skipped(optimizer)
    assert optimizer.step_was_skipped
    assert mixed_precision() == "no"
    assert not is_prepared(module)
    add_hook_to_module(module, ModelHook())
    assert {HOOK, FORWARD_BEFORE} <= set(vars(module))
    assert "_original_forward" in inspect.getsource(Accelerator.prepare_model)


def test_bitsandbytes_repacks_by_the_function_that_is_replaced() -> None:
    assert callable(getattr(modules, REPACK))
    assert f"{REPACK}(" in inspect.getsource(modules.Linear4bit)


def test_a_weight_is_quantized_on_the_meta_device() -> None:
    weight = bitsandbytes.nn.Params4bit(torch.empty(4, 64, device="meta"), requires_grad=False)
    assert quantized_on(weight, "meta").shape == (4 * 64 // 2, 1)


def test_transformers_still_takes_another_path_for_fake_tensors() -> None:
    """Where this fails, fake tensors are not taken for an export any more, and nothing need be replaced."""
    with FakeTensorMode():
        assert import_utils.is_tracing(torch.ones(1))


def test_transformers_asks_for_addresses_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, experts no longer depend on addresses; with torch from 2.11 on, they do not now."""
    monkeypatch.setattr(moe, "is_torch_less_or_equal", lambda version, **_: version == "2.10.0")
    asked: list[int] = []

    class Tensor(torch.Tensor):
        def data_ptr(self) -> int:
            asked.append(super().data_ptr())
            return asked[-1]

    tensor = torch.ones(1).as_subclass(Tensor)
    assert moe._can_use_grouped_mm(tensor, tensor, tensor)
    assert len(asked) == 2
    with fakes_taken_for_real():
        assert moe._can_use_grouped_mm(tensor, tensor, tensor)
    assert len(asked) == 2


def test_argparse_asks_its_two_steps_of_every_value() -> None:
    seen: list[Any] = []

    class Parser(ValueParser):
        def wrong_value(self, action: argparse.Action, value: Any) -> Any:
            seen.append(value)
            return 1

    parser = Parser()
    parser.add_argument("--number", type=int, choices=[1, 2])
    assert [parser.parse_args(["--number", text]).number for text in ("2", "x", "3")] == [2, 1, 3]
    assert seen == ["x", 3]
    assert actions_of(parser)[-1].option_strings == ["--number"]


def test_frames_imports_and_random_bits() -> None:
    assert frame_above(0).f_code.co_name == "test_frames_imports_and_random_bits"
    assert not is_being_imported(sys.modules["argparse"])
    assert source_of(numpy.random.RandomState(0)).state["bit_generator"] == "MT19937"


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Any:
    from accelerate.state import AcceleratorState

    yield
    AcceleratorState._reset_state(True)
