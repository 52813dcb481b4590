"""Heads of adapted models: PEFT's task type, and weights that were initialized because no file has them."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from torch import nn

from isotype.core.errors import UsageError
from isotype.core.names import listed

_ENDS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "Model": "FEATURE_EXTRACTION",
}
"""Suffix of a transformers class -> PEFT's task type."""


TRAINED_WHOLE = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
"""Task type -> names of modules that PEFT trains and saves with every adapter."""


def task_of(config: Any) -> str | None:
    """Return the task type of a PEFT config."""
    task: str | None = getattr(config.task_type, "value", config.task_type)
    return task


def task_type_of(model: Any) -> str | None:
    """Return PEFT's task type of a model by its class; None if it does not take `input_ids` (speech, images)."""
    cls = type(model)
    takes = inspect.signature(cls.forward).parameters.keys()
    if not cls.__module__.startswith("transformers.") or not {"input_ids", "inputs_embeds"} <= takes:
        return None
    task = next((task for end, task in _ENDS.items() if cls.__name__.endswith(end)), None)
    if "labels" not in takes or task not in (None, "FEATURE_EXTRACTION"):
        return task
    answers = hasattr(model, "prepare_inputs_for_generation")
    return ("SEQ_2_SEQ_LM" if "decoder_input_ids" in takes else "CAUSAL_LM") if answers else None


def remember_drawn(model: Any, names: Collection[str]) -> None:
    """Store on a loaded model the names of parameters in no file (`drawn_parameters`): adapters have to save them."""
    in_files = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name not in names}
    model.drawn_parameters = tuple(n for n, p in model.named_parameters() if id(p) not in in_files)


def save_drawn(model: Any, config: Any) -> tuple[str, ...]:
    """Add the modules with weights in no file to an adapter's `modules_to_save`; return a sentence about new
    ones.

    Raises:
        UsageError: a module mixes them with weights from files, or this kind of adapter saves no modules.
    """
    drawn = getattr(model, "drawn_parameters", ())
    saved = list(getattr(config, "modules_to_save", None) or ())
    saved += TRAINED_WHOLE.get(task_of(config) or "", ())
    new, stuck = [], []
    for name in drawn:
        path = _module_of(model, name, set(drawn))
        if any(f".{path}.".endswith(f".{each}.") or f".{each}." in f".{path}." for each in saved):
            continue
        if path and hasattr(config, "modules_to_save"):
            new.append(path)
            saved.append(path)
        else:
            stuck.append(name)
    if stuck:
        what = f"{listed(stuck)}: drawn when the model was loaded, and no module that the adapter can save"
        expected = "weights that are in the checkpoint or in the adapter"
        fix = "model.save_pretrained(DIRECTORY) before add_lora, and load the model from there"
        raise UsageError.of("weights that are in no file would be lost", what, expected, fix)
    if not new:
        return ()
    config.modules_to_save = [*(getattr(config, "modules_to_save", None) or ()), *new]
    return (f"{listed(new)}: in no file of the checkpoint, so trained whole and saved with the adapter",)


def _module_of(model: Any, name: str, drawn: set[str]) -> str:
    """Return the outermost module around a parameter with only drawn parameters; "" if there is none."""
    path, best = name.rpartition(".")[0], ""
    while path:
        module = model.get_submodule(path)
        if any(f"{path}.{each}" not in drawn for each, _ in module.named_parameters()):
            break
        best = best if isinstance(module, (nn.ModuleList, nn.ModuleDict)) else path
        path = path.rpartition(".")[0]
    return best
