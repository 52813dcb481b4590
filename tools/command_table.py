"""Writes the arguments of the training commands as data, from the dataclasses of TRL and transformers that are installed.

python -m tools.command_table
"""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from importlib.metadata import version
from typing import Any

from isotype.compat.standard import actions_of
from isotype.data.methods import METHODS
from isotype.train.command.command import HOLDERS, RECOMPUTE, TABLE, Spec

LIBRARIES = ("trl", "transformers")
DEFAULTS = {"dtype": "auto", "use_peft": True, "lora_target_modules": "all-linear"}
"""Defaults in isotype that differ from TRL's: isotype decides the compute dtype, and trains adapters."""
_RECOMPUTE = (
    "Compute activations again in the backward, for less memory and a slower step. auto (default): in as few layers as the "
    "device's memory allows."
)
HELP = {
    "dtype": "Compute dtype of the run and its weights: auto, float32, bfloat16 or float16. auto: the dtype that the checkpoint was "
    "trained in, if the device runs it.",
    "use_peft": "Train adapters on a frozen base model (the default in isotype); --use_peft False trains every weight.",
    **dict.fromkeys(RECOMPUTE, _RECOMPUTE),
}
"""Help of the arguments that have another meaning in isotype than in TRL."""
CHOICES = {
    "importance_sampling_level": ["token", "sequence"],
    "multi_objective_aggregation": ["sum_then_normalize", "normalize_then_sum"],
    "scale_rewards": ["group", "batch", "none"],
    "vllm_mode": ["server", "colocate"],
    "vllm_model_impl": ["transformers", "vllm"],
    "vllm_importance_sampling_mode": ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
}
"""Valid names that TRL compares with in its trainers. Its dataclasses accept every name."""


def described(method: str) -> dict[str, Spec]:
    """The arguments of a method as TRL's dataclasses have them, with isotype's defaults."""
    from trl import TrlParser

    parser = TrlParser(METHODS[method].dataclass_types())
    held = [{each.name for each in fields(kind) if each.init} for kind in parser.dataclass_types]
    holder_of = {name: holder for holder, names in zip(HOLDERS, held, strict=True) for name in names}
    found: dict[str, Spec] = {}
    for action in actions_of(parser):
        name = action.dest
        if name not in holder_of:
            continue
        if name in found:  # --no_name, which comes behind
            found[name] = Spec(**{**vars(found[name]), "negated": True})
            continue
        default = (
            METHODS[method].task_type if name == "lora_task_type" else DEFAULTS.get(name, action.default)
        )
        long = f"--{name.replace('_', '[-_]')}"
        found[name] = Spec(
            name=name,
            holder=holder_of[name],
            kind=_KINDS.get(getattr(action.type, "__name__", ""), "str"),
            default=_plain(default),
            bare=action.nargs == "?" or name == "bf16",  # as --fp16
            many=action.nargs == "+",
            none=getattr(action.type, "__qualname__", "").startswith("_accept_none"),
            choices=()
            if name == "dtype"
            else tuple(map(_plain, action.choices or CHOICES.get(name) or _listed(action.help or ""))),
            aliases=tuple(flag for flag in action.option_strings if not re.fullmatch(long, flag)),
            help=" ".join(HELP.get(name, action.help or "").split()),
        )
    return found


def _listed(text: str) -> list[str]:
    """The valid values in a help text whose sentence `values are …` has nothing but values; [] without such a sentence."""
    sentence = re.search(
        r"values are:? ((?:(?:and )?[`']+\w+[`']+(?: \(default\))?(?:, )?)+)\.", " ".join(text.split())
    )
    return re.findall(r"\w+(?=[`'])", sentence[1]) if sentence else []


_KINDS = {"string_to_bool": "bool", "int": "int", "float": "float"}


def _plain(value: Any) -> Any:
    """A default as JSON has it."""
    if value is MISSING:
        return None
    return getattr(value, "value", list(value) if isinstance(value, (list, tuple)) else value)


def table_text() -> str:
    """The table of every method: an argument a line; `methods` where not all have it, or have it alike."""
    by_entry: dict[str, list[str]] = {}
    for method in METHODS:
        for spec in described(method).values():
            blank = Spec(spec.name, spec.holder, spec.kind)
            entry = {
                key: value
                for key, value in vars(spec).items()
                if key in ("name", "holder", "kind") or value != getattr(blank, key)
            }
            by_entry.setdefault(json.dumps(entry, ensure_ascii=False), []).append(method)
    lines = [
        text if len(methods) == len(METHODS) else f'{text[:-1]}, "methods": {json.dumps(methods)}}}'
        for text, methods in by_entry.items()
    ]
    libraries = json.dumps({name: version(name) for name in LIBRARIES})
    return f'{{"libraries": {libraries}, "arguments": [\n' + ",\n".join(lines) + "\n]}\n"


if __name__ == "__main__":
    TABLE.write_text(table_text(), encoding="utf-8")
