"""The precision that a training command's arguments request, without contradictions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from isotype.core.dtypes import dtype_name, parse_dtype
from isotype.core.errors import PrecisionError, Problem
from isotype.core.formats import FOUR_BITS, MIXED
from isotype.core.names import parse_size
from isotype.precision.decide import PrecisionRequest
from isotype.train.command.command import Command

FLAGS = (("fp16", "float16"), ("bf16", "bfloat16"))


def read_precision_request(command: Command) -> PrecisionRequest:
    """Return the precision request of the arguments; raise PrecisionError with all contradictions."""
    problems: list[Problem] = []
    init = _init_kwargs(command)
    dtype = _asked_dtype(command, init, problems)
    quantization = _asked_quantization(command, init, problems)
    nested = command["use_bnb_nested_quant"] or _saved_quantization(init).get("bnb_4bit_use_double_quant")
    for flag in ("fp16_full_eval", "bf16_full_eval"):
        if command[flag]:
            problems.append(
                Problem(
                    f"--{flag}",
                    "evaluation under the same policy as training",
                    "leave it out: it would cast the masters too, and evaluation runs in the compute dtype anyway",
                )
            )
    memory = _base_memory(command, problems)
    if problems:
        raise PrecisionError("the arguments disagree about precision", problems)
    return PrecisionRequest(
        dtype=dtype,
        quantization=quantization,
        trainable="lora" if command["use_peft"] else "full",
        double_quant=bool(nested) or None,
        quant_storage=command["bnb_4bit_quant_storage"],
        base_memory=memory,
        quantized_parts=command["quantized_parts"],
    )


def _base_memory(command: Command, problems: list[Problem]) -> int | None:
    """Return the bytes of `--base_memory`."""
    text = command["base_memory"]
    if text is None:
        return None
    amount = parse_size(str(text))
    if amount is None:
        problems.append(Problem(f"--base_memory {text}", "an amount of memory", "write it like 6GiB"))
    if command["quantization"] != MIXED:
        flag = f"--base_memory {text} without --quantization mixed"
        problems.append(
            Problem(flag, "layers whose format it decides", "add --quantization mixed, or leave it out")
        )
    return amount


def _asked_dtype(command: Command, init: Mapping[str, Any], problems: list[Problem]) -> str:
    """Return the compute dtype on which all flags agree, or "auto"."""
    claims: list[tuple[str, str]] = []
    asked = command["dtype"]
    if asked not in (None, "auto"):
        claims.append((f"--dtype {asked}", dtype_name(parse_dtype(asked))))
    for flag, name in FLAGS:
        if command.given(flag):
            claims.append((f"--{flag}", name))
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched in ("fp16", "bf16"):
        claims.append(
            (
                f"mixed precision {launched} of accelerate launch",
                {"fp16": "float16", "bf16": "bfloat16"}[launched],
            )
        )
    for key in ("dtype", "torch_dtype"):
        if init.get(key) not in (None, "auto"):
            claims.append((f"--model_init_kwargs {key}={init[key]}", dtype_name(parse_dtype(init[key]))))
    compute = _saved_quantization(init).get("bnb_4bit_compute_dtype")
    if compute is not None:
        claims.append(
            (
                f"--model_init_kwargs quantization_config bnb_4bit_compute_dtype={compute}",
                dtype_name(parse_dtype(compute)),
            )
        )
    first = claims[0] if claims else None
    for claim, name in claims[1:]:
        if first and name != first[1]:
            problems.append(
                Problem(
                    f"{first[0]} and {claim}",
                    "one compute dtype (in isotype, --dtype names it and the weights follow)",
                    f"leave {claim} out for {first[1]}, or give --dtype {name}",
                )
            )
    for flag, name in FLAGS:
        if first and command.given(flag) is False and first[1] == name:
            problems.append(
                Problem(
                    f"{first[0]} and --{flag} False",
                    "one compute dtype",
                    f"leave --{flag} False out, or give another --dtype",
                )
            )
    return first[1] if first else "auto"


def _init_kwargs(command: Command) -> Mapping[str, Any]:
    init = command.given("model_init_kwargs")
    return init if isinstance(init, Mapping) else {}


def _saved_quantization(init: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantization of `--model_init_kwargs`, in the names of `BitsAndBytesConfig`."""
    config = init.get("quantization_config")
    flat = {key: init[key] for key in ("load_in_4bit", "load_in_8bit") if init.get(key)}
    return {**flat, **config} if isinstance(config, dict) else flat


def _init_quantization(init: Mapping[str, Any], problems: list[Problem]) -> list[tuple[str, str]]:
    config = _saved_quantization(init)
    given = "--model_init_kwargs quantization_config"
    if config.get("load_in_8bit"):
        return [(f"{given} load_in_8bit", "int8")]
    if config.get("load_in_4bit"):
        name = str(config.get("bnb_4bit_quant_type", "fp4"))  # bitsandbytes' own default
        return [(f"{given} load_in_4bit ({name})", name)]
    if init.get("quantization_config"):
        problems.append(
            Problem(
                f"{given} {init['quantization_config']}",
                "load_in_4bit or load_in_8bit of bitsandbytes",
                "leave it out and give --quantization nf4, fp4 or int8",
            )
        )
    return []


def _asked_quantization(command: Command, init: Mapping[str, Any], problems: list[Problem]) -> str | None:
    claims: list[tuple[str, str]] = []
    asked, kind = command["quantization"], command["bnb_4bit_quant_type"]
    if asked:
        claims.append((f"--quantization {asked}", asked))
    if command["load_in_8bit"]:
        claims.append(("--load_in_8bit", "int8"))
    chosen_type = "bnb_4bit_quant_type" in command
    if command["load_in_4bit"]:
        name = kind if chosen_type or asked not in FOUR_BITS else asked
        claims.append(("--load_in_4bit" + (f" --bnb_4bit_quant_type {name}" if chosen_type else ""), name))
    elif chosen_type:
        claims.append((f"--bnb_4bit_quant_type {kind}", kind))
    claims += _init_quantization(init, problems)
    for claim, name in claims[1:]:
        if name != claims[0][1]:
            problems.append(
                Problem(f"{claims[0][0]} and {claim}", "one quantization", "leave one of the two out")
            )
    return claims[0][1] if claims else None
