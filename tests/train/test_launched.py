"""Sharding that a launcher or `--fsdp` requests, and requests that are refused with a reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from isotype.core.errors import TrainingError, UsageError
from isotype.train.launched import Sharding, lost_process_named, take_sharding


def training(fsdp: bool = False, **settings: Any) -> SimpleNamespace:
    return SimpleNamespace(
        fsdp=fsdp, fsdp_config=settings.pop("fsdp_config", None), gradient_checkpointing=False, **settings
    )


def taken(arguments: SimpleNamespace, *, dora: bool = False) -> Sharding | None:
    method = SimpleNamespace(name="dpo", compares=lambda _: True)
    precision = SimpleNamespace(quantization="int8")
    return take_sharding(
        SimpleNamespace(training=arguments, use_dora=dora, method=method, precision=precision)
    )


def test_nothing_is_sharded_unless_it_is_asked_for() -> None:
    assert taken(training()) is None


def test_the_arguments_say_how_it_is_sharded() -> None:
    arguments = training(True, fsdp_config={"version": 2, "reshard_after_forward": "false"})
    assert taken(arguments) == Sharding(reshard=False)


def test_the_config_of_accelerate_is_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    assert taken(training()) == Sharding(reshard=True, checkpointing=True)
    assert taken(training()) is None  # accelerate finds nothing there any more


def test_everything_that_cannot_be_done_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")  # and no FSDP_VERSION: accelerate means 1
    with pytest.raises(UsageError) as raised:
        taken(training(chat_template_path="other/model"), dora=True)
    text = str(raised.value)
    for named in (
        "fsdp_version 1",
        "fsdp_offload_params",
        "--use_dora in dpo",
        "--use_dora --quantization int8",
        "--chat_template_path other/model",
    ):
        assert named in text


def trainer(processes: int) -> SimpleNamespace:
    return SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=processes),
        args=SimpleNamespace(process_index=0, world_size=processes),
        state=SimpleNamespace(global_step=4),
        last_checkpoint=lambda: None,
    )


def test_a_lost_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    words = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4825"
    with (
        pytest.raises(TrainingError, match="step 5: process 0 of 2 waited"),
        lost_process_named(trainer(2), str),
    ):
        raise RuntimeError(words)
    for processes, message in ((1, words), (2, "mat1 and mat2 shapes cannot be multiplied")):
        with pytest.raises(RuntimeError, match=message[-9:-1]), lost_process_named(trainer(processes), str):
            raise RuntimeError(message)
