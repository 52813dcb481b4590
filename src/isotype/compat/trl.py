"""TRL (1.16): reads the forward that TRL sets on a model to fuse the head and the loss, and GRPO's completions.

`add_fused_lm_head` (trl/trainer/utils.py) stores the head's arguments only in the closure of the forward.
https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/utils.py
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import CodeType, MethodType
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from isotype.compat.replaced import Replacements

_MAKER = "add_fused_lm_head"
HEAD_ARGUMENTS = ("temperature", "cast_lm_head_to_fp32", "outputs")
"""Names of the fused head's arguments in its forward's closure."""
_FORMER = "_isotype_trl_forward"

NAMES: Mapping[str, tuple[str, ...]] = {
    "trl": (
        *("TrlParser", "ModelConfig", "ScriptArguments", "DatasetMixtureConfig", "get_peft_config"),
        *("get_training_chat_template", "is_conversational", "prepare_multimodal_messages"),
    ),
    "trl.trainer.utils": ("FusedCausalLMOutput",),
    "trl.chat_template_utils": ("has_generation_markers",),
    "trl.trainer.dpo_trainer": ("DataCollatorForVisionPreference",),
    "trl.trainer.sft_trainer": ("DataCollatorForVisionLanguageModeling",),
    "trl.rewards": ("accuracy_reward",),  # one of the names of --reward_funcs
}
"""Module of TRL -> names that a training uses."""


def gpu_head(launched: Callable[[str, Any], None], *, cuda: bool) -> Replacements:
    """Return a context in which TRL's fused head runs as on a GPU, on any tensors.

    TRL 1.16 launches Triton kernels there, and adds products of 16-bit matrices in float32 on CUDA devices. On a CPU, it
    computes with several float32 copies of the logits. `launched(name, arguments)` is called in place of a kernel.
    """

    def launch(name: str, _: Any, *args: Any, **kwargs: Any) -> None:
        launched(name, (*args, *kwargs.values()))

    def add(add: Callable[..., Any], total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        wide = cuda and a.itemsize == 2
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total) if wide else add(total, a, b)

    replaced, head = Replacements(), sys.modules.get("trl.kernels.chunked_logprob")
    if head is not None:
        replaced.wrap(head, "_forward_tile", partial(launch, "_forward_kernel"))
        replaced.wrap(head, "_backward_tile", partial(launch, "_backward_kernel"))
        replaced.wrap(head, "_addmm_fp32", add)
    return replaced


def is_fused_forward(function: Any) -> bool:
    """Return whether TRL's `add_fused_lm_head` has created a forward."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and code.co_qualname.startswith(f"{_MAKER}.")


def head_arguments(function: Any) -> dict[str, Any]:
    """Return the fused head's arguments from the closure of `function`. Raise LookupError if an argument is missing."""
    variables = inspect.getclosurevars(function).nonlocals
    missing = [name for name in HEAD_ARGUMENTS if name not in variables]
    if missing:
        raise LookupError(f"the forward of TRL's {_MAKER} does not store {', '.join(missing)}")
    return {name: variables[name] for name in HEAD_ARGUMENTS}


def put_forward(model: Any, forward: Callable[..., Any]) -> None:
    """Make `forward(model, …)` the model's forward, which may call `former_forward`."""
    model.__dict__[_FORMER] = model.forward
    model.forward = MethodType(forward, model)


def former_forward(model: Any) -> Callable[..., Any]:
    forward: Callable[..., Any] = model.__dict__[_FORMER]
    return forward


def headless_forward(model: Any) -> Callable[..., Any]:
    """Return the forward without a fused head, bound to `model`, which may be a copy of the model that TRL has changed."""
    forward: Any = former_forward(model)
    if is_fused_forward(forward):
        forward = inspect.getclosurevars(forward.__func__).nonlocals["original_forward"]
    bound: Callable[..., Any] = MethodType(forward.__func__, model) if inspect.ismethod(forward) else forward
    return bound


def completions_of(trainer: Any) -> dict[str, Any] | None:
    """Return a GRPO or RLOO trainer's completions and its count of micro-batches; None for another trainer."""
    if not hasattr(trainer, "_buffered_inputs"):
        return None
    return {"batches": trainer._buffered_inputs, "micro_steps": trainer._step}


def put_completions(trainer: Any, completions: Mapping[str, Any] | None) -> None:
    """Give a trainer the result of `completions_of`. The completions are moved to the trainer's device."""
    if completions is not None:
        from accelerate.utils import send_to_device

        trainer._step = completions["micro_steps"]
        trainer._buffered_inputs = send_to_device(completions["batches"], trainer.args.device)


def inputs_of_policy(trainer_class: type) -> frozenset[str]:
    """Return the names of the inputs that GRPO's or RLOO's trainer class passes to the model, with those of its loss."""
    return frozenset(inspect.signature(trainer_class._get_per_token_logps_and_entropies).parameters)  # type: ignore[attr-defined]


def prompts_of(trainer: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return a GRPO or RLOO trainer's inputs for the generation: padded prompts, and images.

    Return None if a function of the user creates prompts or completions. The code corresponds to
    `_generate_single_turn` in trl/trainer/grpo_trainer.py.
    """
    from trl import prepare_multimodal_messages

    custom = (getattr(trainer, name, None) for name in ("rollout_func", "environment_factories"))
    if any(custom) or not hasattr(trainer, "_tokenize_prompts"):
        return None
    prompts = [row["prompt"] for row in rows]
    pictures = [row.get("images") or list(filter(None, [row.get("image")])) for row in rows]
    if any(pictures):
        pairs = zip(prompts, pictures, strict=True)
        prompts = [prepare_multimodal_messages(prompt, images=some) for prompt, some in pairs]
    ids, _, fields = trainer._tokenize_prompts(prompts)
    by_token = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
    by_token |= {name: value for name, value in fields.items() if not torch.is_tensor(value)}
    padding = {"input_ids": trainer._tokenizer.pad_token_id}
    padded = {
        name: pad_sequence(
            [torch.tensor(row) for row in value],
            batch_first=True,
            padding_value=padding.get(name, 0),
            padding_side="left",
        )
        for name, value in by_token.items()
    }
    return {**fields, **padded}


def lacking(names: Iterable[str] = ()) -> list[str]:
    """Return a clause for each name in `NAMES["trl"]` or `names` that `trl` lacks, without importing these names."""
    present = frozenset(dir(import_module("trl")))
    return [f"it has no {name}" for name in (*NAMES["trl"], *names) if name not in present]


def lacking_inside() -> list[str]:
    """Import the modules of TRL in `NAMES`. Return a clause for each name that they lack."""
    inside = ((module, name) for module, names in NAMES.items() if module != "trl" for name in names)
    return [f"{module} has no {name}" for module, name in inside if not _has(module, name)]


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name)
    except ImportError:
        return False


def incompatibilities(utilities: Any) -> list[str]:
    """Return a clause for each part of `utilities` (trl.trainer.utils) that `head_arguments` needs and that is missing."""
    maker = getattr(utilities, _MAKER, None)
    if maker is None:
        return [f"{utilities.__name__} has no {_MAKER}"]
    inner = [code for code in maker.__code__.co_consts if isinstance(code, CodeType)]
    variables = {name for code in inner for name in code.co_freevars}
    return [
        f"the forward of {_MAKER} does not store {name}" for name in HEAD_ARGUMENTS if name not in variables
    ]
