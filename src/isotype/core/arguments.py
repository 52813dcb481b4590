"""A command-line parser that reports all invalid arguments in one error and suggests similar valid arguments."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from isotype.compat.standard import ValueParser, actions_of
from isotype.core.errors import Problem, UsageError

_OTHER_NAMES: Mapping[str, str] = {
    other: name
    for name, others in (
        ("learning_rate", "lr"),
        ("num_train_epochs", "epochs num_epochs"),
        ("max_steps", "steps"),
        ("per_device_train_batch_size", "batch_size micro_batch_size train_batch_size"),
        ("gradient_accumulation_steps", "grad_accum accumulate"),
        ("model_name_or_path", "model model_id base_model"),
        ("dataset_name", "data dataset dataset_path"),
        ("output_dir", "out output"),
        ("max_length", "max_seq_len seq_len context_length cutoff_len sequence_len"),
        ("lora_r", "r rank lora_rank"),
        ("lora_alpha", "alpha"),
        ("lora_dropout", "dropout"),
        ("lora_target_modules", "target_modules"),
        ("lr_scheduler_type", "scheduler"),
        ("optim", "optimizer"),
        ("dtype", "precision mixed_precision"),
        ("device", "device_map"),
        ("quantization", "quantize bits"),
        ("use_peft", "use_lora lora finetuning_type full_finetuning"),
        ("resume_from_checkpoint", "resume"),
    )
    for other in others.split()
}
"""Maps short names, and names that other libraries use, to the names of isotype's arguments."""
_OTHER_VALUES = {"4bit": "nf4", "int4": "nf4", "4": "nf4", "8bit": "int8", "8": "int8"}
"""Maps other libraries' names of values to isotype's names."""
_KINDS = {
    "int": ("a whole number", "8"),
    "float": ("a number", "0.1"),
    "string_to_bool": ("True or False", "True"),
    "Path": ("a path", "VALUE"),
    "image_size": ("a size in pixels", "1024x768"),
}
"""Maps the name of an argument's type to (the expected value in words, an example)."""
_OF_ARGUMENT = re.compile(r"argument ([^:\s]+)(?: \S+)?: (.*)", re.DOTALL)


class Parser(ValueParser):
    """An argparse parser that collects invalid values in `problems` instead of stopping at the first.

    `parse_args` raises one error for all problems and unknown names. After `parse_known_args`, the caller must check
    `problems`. Names of arguments cannot be abbreviated.
    """

    problems: list[Problem]
    _command_line: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # With argparse's abbreviations a typo sets another argument: --learning_rat 3 set the learning rate to 3.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, and collect in `problems` a problem for each invalid value."""
        self.problems = []
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raise one UsageError that lists every argument that is unknown, has no value or has an invalid value."""
        self._command_line = tuple(sys.argv[1:] if args is None else args)
        parsed, unknown = self.parse_known_args(args, namespace)
        self.refuse([*self.problems, *self.unknown(unknown)])
        return parsed

    def refuse(self, problems: Sequence[Problem]) -> None:
        if problems:
            hint = f"{self.prog} --help lists the arguments"
            raise UsageError("invalid arguments", problems, hint)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError for a missing value or argument: argparse cannot continue after such an error."""
        known = {name for action in actions_of(self) for name in action.option_strings}
        flags = (token for token in self._command_line if token.startswith("--"))
        unknown = [token for token in flags if token.partition("=")[0] not in known]
        problem = Problem(message, "all arguments that the command needs", f"see {self.prog} --help")
        if about := _OF_ARGUMENT.match(message):
            name = about[1].split("/")[0]
            problem = Problem(f"{name}: {about[2]}", "the argument with its value", f"{name} VALUE")
        self.refuse([*self.problems, *self.unknown(unknown), problem])
        raise AssertionError(message)

    def unknown(self, tokens: Sequence[str]) -> list[Problem]:
        """Return a problem for each unknown argument (with similar known names) and each value without an argument."""
        flags = [token for token in tokens if re.match(r"--?[A-Za-z]", token)]
        # If a name is unknown, the tokens after it are most likely its values.
        stray = [] if flags else [token for token in tokens if token]
        known = self.known_names()
        hint = f"{self.prog} --help"
        problems = [unknown_name(*name_and_value(tokens, token), known, hint) for token in flags]
        fix = "leave the value out, or write the name of its argument before it"
        return [*problems, *(Problem(token, "a value that belongs to an argument", fix) for token in stray)]

    def known_names(self) -> list[str]:
        named = [action.option_strings for action in actions_of(self) if action.option_strings]
        return [next((name for name in names if name.startswith("--")), names[0]) for names in named]

    # argparse calls these hooks to check one value. Its own hooks raise, so that one error would hide the others.

    def value_of(self, action: argparse.Action, text: str) -> Any:
        try:
            return super().value_of(action, text)
        except argparse.ArgumentError:
            self.problems.append(_wrong_value(action, text))
            return _Wrong()

    def require_choice(self, action: argparse.Action, value: Any) -> None:
        try:
            super().require_choice(action, value)
        except argparse.ArgumentError:
            if not isinstance(value, _Wrong):
                self.problems.append(_wrong_value(action, value))


class _Wrong:
    """Placeholder for a value that could not be parsed."""


def _wrong_value(action: argparse.Action, value: Any) -> Problem:
    name = action.option_strings[0] if action.option_strings else action.dest
    argument = f"{name} {value}"
    if action.choices:
        return wrong_choice(argument, str(value), map(str, action.choices))
    expected, example = _KINDS.get(getattr(action.type, "__name__", ""), ("another value", "VALUE"))
    return Problem(argument, expected, f"{name} {example}")


def did_you_mean(
    wanted: str,
    known: Iterable[str],
    otherwise: str,
    n: int = 3,
    cutoff: float = 0.6,
    shown: Callable[[str], str] = str,
) -> str:
    """Return "did you mean …?" with up to `n` known names that are similar to `wanted`, or `otherwise` if none is."""
    near = difflib.get_close_matches(wanted, list(known), n, cutoff)
    return f"did you mean {' or '.join(map(shown, near))}?" if near else otherwise


def unknown_name(name: str, value: Any, known: Sequence[str], listing: str) -> Problem:
    """Return the `Problem` for a name that is not among the `known` names, which the command `listing` prints."""
    names = [known_name.lstrip("-").replace("-", "_") for known_name in known]
    former = renamed(name, names, str(value) if isinstance(value, (str, int, float)) else "")
    if former is not None:
        return former
    meant = closest(name, known)
    expected = f"a known name: {', '.join(meant)}" if meant else "a known name"
    return Problem(name, expected, f"did you mean {meant[0]}?" if meant else f"see {listing}")


def wrong_choice(what: str, value: str, choices: Iterable[str]) -> Problem:
    """Return the `Problem` for a value that is not among the choices. The problem names the most similar choices."""
    known = list(choices)
    lower = {choice.lower(): choice for choice in known}
    other = _OTHER_VALUES.get(value.lower().replace("-", "").replace("_", ""))
    similar = partial(difflib.get_close_matches, value.lower(), lower, n=2)
    longer = [choice for choice in lower if value and choice.startswith(value.lower())]
    near = similar(cutoff=0.8) or longer[:2] or similar(cutoff=0.5)
    meant = [other] if other in known else [lower[name] for name in near]
    fix = f"did you mean {' or '.join(meant)}?" if meant else "give one of these"
    return Problem(what, f"one of {', '.join(known)}", fix)


def closest(name: str, known: Sequence[str]) -> list[str]:
    """Return up to three known names that `name` probably means: first an alias, then longer names, then similar names."""
    bare = {known_name.lstrip("-").replace("-", "_"): known_name for known_name in known}
    wanted = name.lstrip("-").replace("-", "_").lower()
    meant = _OTHER_NAMES.get(wanted) or RENAMED.get(wanted, ("",))[0]
    near = difflib.get_close_matches(wanted, bare, n=3, cutoff=0.7)
    first = [meant] if meant in bare else []
    longer = sorted((candidate for candidate in bare if wanted and candidate.startswith(wanted)), key=len)
    return [bare[candidate] for candidate in dict.fromkeys([*first, *longer, *near])][:3]


RENAMED: Mapping[str, tuple[str, str]] = {
    # transformers
    "evaluation_strategy": ("eval_strategy", ""),
    "evaluate_during_training": ("eval_strategy", "steps"),
    "per_gpu_train_batch_size": ("per_device_train_batch_size", ""),
    "per_gpu_eval_batch_size": ("per_device_eval_batch_size", ""),
    "no_cuda": ("use_cpu", "True"),
    "use_mps_device": ("device", "mps"),
    "warmup_ratio": ("warmup_steps", "0.1, a share of all steps"),
    "group_by_length": ("train_sampling_strategy", "group_by_length"),
    "adafactor": ("optim", "adafactor"),
    "fp16_backend": ("fp16", "True"),
    "half_precision_backend": ("fp16", "True"),
    "push_to_hub_model_id": ("hub_model_id", "OWNER/NAME"),
    "push_to_hub_organization": ("hub_model_id", "OWNER/NAME"),
    "push_to_hub_token": ("hub_token", ""),
    "include_inputs_for_metrics": ("include_for_metrics", "inputs"),
    "include_tokens_per_second": ("include_num_input_tokens_seen", "all"),
    "torchdynamo": ("torch_compile_backend", "inductor"),
    "sharded_ddp": ("fsdp", "full_shard"),
    "fsdp_min_num_params": ("fsdp_config", """'{"min_num_params": N}'"""),
    "fsdp_transformer_layer_cls_to_wrap": (
        "fsdp_config",
        """'{"transformer_layer_cls_to_wrap": ["NAME"]}'""",
    ),
    "split_batches": ("accelerator_config", """'{"split_batches": true}'"""),
    "dispatch_batches": ("accelerator_config", """'{"dispatch_batches": true}'"""),
    "xpu_backend": ("ddp_backend", ""),
    # TRL
    "torch_dtype": ("dtype", ""),
    "max_seq_length": ("max_length", ""),
    "dataset_config_name": ("dataset_config", ""),
    "gradient_checkpointing_use_reentrant": (
        "gradient_checkpointing_kwargs",
        """'{"use_reentrant": true}'""",
    ),
    "vllm_max_model_len": ("vllm_max_model_length", ""),
    "vllm_guided_decoding_regex": ("vllm_structured_outputs_regex", ""),
    "wandb_log_unique_prompts": ("log_unique_prompts", "True"),
}
"""Maps a former name to (current name, equivalent value). The equivalent value is "" if the former value is still valid."""

REMOVED: Mapping[str, str] = {
    "overwrite_output_dir": "leave the argument out: a run that overwrites a finished run prints a note",
    "save_safetensors": "leave the argument out: weights are saved as safetensors",
    "logging_dir": "leave the argument out, or set TENSORBOARD_LOGGING_DIR",
    "fp16_opt_level": "leave the argument out: --dtype float16 trains with torch's own autocast",
    "use_liger": "leave the argument out: fused layers (--fuse, the default) have kernels for the same operations",
    "use_ipex": "leave the argument out: --device xpu runs on torch's own kernels",
    "jit_mode_eval": "leave the argument out, or --torch_compile True",
    "tpu_num_cores": "leave the argument out",
    "past_index": "leave the argument out",
    "mp_parameters": "leave the argument out",
    "ray_scope": "leave the argument out",
    "tokenizer": "leave the argument out: isotype uses the model's tokenizer; --chat_template_path sets another template",
    "tokenizer_name": "leave the argument out: isotype uses the model's tokenizer; --chat_template_path sets another template",
    "max_prompt_length": "leave the argument out, or give --max_length for prompt and completion together",
    "max_target_length": "leave the argument out, or give --max_length for prompt and completion together",
    "dataset_batch_size": "leave the argument out",
    "num_of_sequences": "leave the argument out: --packing True fills rows up to --max_length",
    "chars_per_token": "leave the argument out: --packing True fills rows up to --max_length",
    "label_pad_token_id": "leave the argument out: padding has the label -100",
    "padding_value": "leave the argument out: rows are padded with the tokenizer's padding token",
    "is_encoder_decoder": "leave the argument out: isotype reads the model's config",
    "generate_during_eval": "leave the argument out; --ask QUESTION asks the model before and after the training",
    "reference_free": "leave the argument out",
    "force_use_ref_model": "leave the argument out",
    "model_adapter_name": "leave the argument out: --model_name_or_path also accepts an adapter, and trains it further",
    "ref_adapter_name": "leave the argument out: the reference is the adapter before the training",
    "rpo_alpha": "--loss_type sigmoid sft --loss_weights 1.0 ALPHA",
    "vllm_device": "leave the argument out, or --vllm_mode colocate",
}
"""Maps the name of a removed argument to advice on what to write instead."""


def name_and_value(tokens: Sequence[str], flag: str) -> tuple[str, str]:
    """Return the name and value of an unknown flag. The value is the text after `=`, else the next token, else ""."""
    name, equals, value = flag.partition("=")
    after = tokens[tokens.index(flag) + 1 :][:1]
    return name, value if equals else "".join(token for token in after if not token.startswith("-"))


def renamed(flag: str, names: Collection[str], asked: str = "") -> Problem | None:
    """Return the `Problem` for an argument that transformers or TRL renamed or removed (`--no-cuda`), else None.

    `asked` is the argument's value on the command line or in the file. The fix repeats this value if it is still valid.
    """
    old = flag.lstrip("-").replace("-", "_").lower()
    new, value = RENAMED.get(old, ("", ""))
    if new in names and old not in names:
        fix = f"--{new} {value or asked or 'VALUE'}"
        return Problem(f"{flag}: renamed", f"the name in transformers 5 and TRL 1: --{new}", fix)
    if old in REMOVED and old not in names:
        return Problem(f"{flag}: removed", "an argument that transformers 5 or TRL 1 has", REMOVED[old])
    return None
