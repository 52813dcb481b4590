"""transformers (5.20 to 5.24): public names for private parts of models, configs and the Trainer.

Only functions that need transformers import it. tests/compat/test_transformers.py fails if a name is missing or means
something else.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from types import FrameType, SimpleNamespace
from typing import Any, Final

import torch
from packaging.version import Version
from torch import nn

from isotype.compat.peft import without_peft
from isotype.compat.replaced import Replacements, reads, replaced, sets
from isotype.compat.standard import frame_above

# -------------------------------------------------------------------------------------------------------- models

DTYPE_PLAN: Final = "_get_dtype_plan"
"""A model class's method that returns parameters with another dtype than the model."""
LOAD: Final = "_load_pretrained_model"
"""A model class's method that loads weights from files into a model."""


pinned = reads("_keep_in_fp32_modules")
"""Return name patterns of modules that stay float32 in a float16 model; None if there are none."""
pinned_strictly = reads("_keep_in_fp32_modules_strict")
"""Return name patterns of modules that stay float32 in any model; None if there are none."""
mapping_of = reads("_model_mapping")
"""Return the mapping of an auto class: config class -> model class; None for another class."""
name_of, rename = reads("_name_or_path"), sets("_name_or_path")
"""Return or set the path or hub id from which a config was loaded. PEFT and trainers read this name."""
has_own_adapters = reads("_hf_peft_config_loaded", False)
"""Return whether the model has adapters from its method `load_adapter`, without a `PeftModel`."""
may_be_missing = reads("_keys_to_ignore_on_load_missing", ())
"""Return name patterns of tensors that may be missing in a checkpoint."""
may_be_surplus = reads("_keys_to_ignore_on_load_unexpected", ())
"""Return name patterns of a checkpoint's tensors that the model ignores."""
conversions, set_conversions = reads("_weight_conversions"), sets("_weight_conversions")
"""Return or set the conversions that loading applies and saving reverses; None if there are none."""
attention_of, set_attention = reads("_attn_implementation"), sets("_attn_implementation")
"""Return or set the attention implementation of a config, or of a model to be built from it; None if unset."""
gate_of = reads("_apply_gate")
"""Return the function that combines the gate and up products in an experts module; None for another module."""
unsplit_classes = reads("_no_split_modules", frozenset())
"""Return names of module classes that are never split across devices. accelerate shards each such module as a unit."""
has_parallel_experts = reads("_is_expert_parallel", False)
"""Return whether this process has only some of the module's experts."""


def backbone_of(model: Any) -> Any:
    """Return a model without its head. In the text models of Llama 4 and Mllama, `base_model` is the whole model."""
    base = model.base_model
    return getattr(model, "model", base) if base is model else base


def has_states(model: Any) -> bool:
    """Return whether a model has a recurrent state, in which attention masks cannot separate documents."""
    return bool(getattr(without_peft(model), "_is_stateful", False))


def lines_separating_documents() -> frozenset[str]:
    """Return the lines (`file:line`) of the transformers function that finds the documents of a packed row."""
    from transformers.masking_utils import find_packed_sequence_indices

    code = find_packed_sequence_indices.__code__
    return frozenset(f"{code.co_filename}:{line}" for *_, line in code.co_lines() if line is not None)


def never_saved(model: Any) -> set[str]:
    return set(model._keys_to_ignore_on_save or ())


def draw(model: Any, module: Any) -> None:
    """Initialize a module's parameters by the rules of the model's class."""
    model._init_weights(module)


def mark_as_loaded(tensor: Any) -> None:
    """Mark a tensor as loaded, so that transformers does not initialize it."""
    tensor._is_hf_initialized = True


def use_plain_experts(config: Any) -> None:
    """Select transformers' eager experts, which run in any dtype. Do nothing if the config has no setting for experts."""
    if getattr(config, "_experts_implementation", None) is not None:
        config._experts_implementation = "eager"


def keep_weights(model: Any) -> None:
    """Stop RWKV from dividing weights of later layers before an evaluation. The model's own config stays the same.

    transformers divides only the base weights, not the adapters', and raises an error for quantized layers
    (https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/rwkv/modeling_rwkv.py).
    """
    for module in model.modules():
        if hasattr(module, "layers_are_rescaled") and module.config.rescale_every:
            module.config = copy.deepcopy(module.config)
            module.config.rescale_every = 0


def fresh_model(cls: Any, config: Any, dtype: Any = None) -> Any:
    return cls._from_config(config, dtype=dtype)


def takes_attention(model: Any) -> bool:
    """Return whether a model uses an attention function from transformers' registry, where it can be replaced."""
    return bool(model._can_set_attn_implementation())


def mark_as_sharded(model: Any) -> None:
    """Let every process continue in `model.generate` until all processes have finished, as FSDP requires."""
    model._is_fsdp_managed_module = True


# ------------------------------------------------------------------------------------------------- a class for one load

Names = Callable[[Any], set[str]]
"""A function: model -> names of its parameters."""
Reading = Callable[[Any, Any, Any, Any, Callable[[], Any]], Any]
"""(model, weights in memory, files, settings, load) -> the result of `load()`, which lets transformers load the files."""


def class_for_load(cls: Any, float32: Names | None = None, read: Reading | None = None) -> Any:
    """Return a subclass of `cls` for loading one model. Afterwards, `own_class_again` restores the model's class.

    The subclass has the name and module of `cls`. Parameters that `cls` keeps in float32 are loaded in float32. In a
    bfloat16 model, transformers would cast the parameters in `_keep_in_fp32_modules` to bfloat16.

    Args:
        float32: a function that returns names of more parameters to load in float32.
        read: a function that loads the weights into the model; by default, transformers loads them.
    """

    def post_init(self: Any) -> None:
        super(derived, self).post_init()
        # The quantizer skips the modules in this list. Strictly pinned modules must not be quantized, either.
        strict = {name.removesuffix(".weight") for name in pinned_strictly(self)}
        self._keep_in_fp32_modules = pinned(self) | strict

    def dtype_plan(self: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
        if dtype == torch.float32:
            return {}
        more = set() if float32 is None else float32(self)
        return dict.fromkeys(pinned(self) | pinned_strictly(self) | more, torch.float32)

    def load(model: Any, state_dict: Any, files: Any, settings: Any, *rest: Any, **more: Any) -> Any:
        theirs = getattr(super(derived, derived), LOAD)
        fill = partial(theirs, model, state_dict, files, settings, *rest, **more)
        return fill() if read is None else read(model, state_dict, files, settings, fill)

    members = {"post_init": post_init, DTYPE_PLAN: dtype_plan, LOAD: staticmethod(load)}
    derived: Any = type(cls.__name__, (cls,), members)
    derived.__module__ = cls.__module__
    return derived


def own_class_again(model: Any) -> None:
    """Restore the class of a model that was loaded by a subclass from `class_for_load`."""
    model.__class__ = type(model).__mro__[1]


# ------------------------------------------------------------------------------------------------------- Trainer

GRADIENT_NORM: Final = "_get_grad_norm"
"""The trainer's method that returns the norm of a step's unscaled gradients before clipping."""
PREPARE_INPUTS: Final = "_prepare_inputs"
"""The trainer's method that prepares a batch of the data loader for the model."""


STEPS: Final[Mapping[str, str]] = {
    "run_epoch": "_run_epoch",
    "gradient_norm": GRADIENT_NORM,  # of a step's unscaled gradients, before clipping; called once per step
    "folder_of_run": "_get_output_dir",  # the folder for checkpoints
    "write_checkpoint": "_save_checkpoint",
    "push_checkpoint": "_push_from_checkpoint",  # in another thread
    "write_optimizer": "_save_optimizer_and_scheduler",
    "read_weights": "_load_from_checkpoint",
    "read_best_weights": "_load_best_model",
    "read_optimizer": "_load_optimizer_and_scheduler",
    "gradients_stay_local": "_defer_fsdp_gradient_reduction",  # a context manager, for sharded models
}
"""Public name -> name of the Trainer's private method, for `TrainerSteps`."""
_Mixin: Any = object


class TrainerSteps(_Mixin):  # type: ignore[misc]
    """Gives private methods of transformers' Trainer the public names in `STEPS`. A subclass may override and call them.

    The bases of a subclass are `TrainerSteps` and then the Trainer. The Trainer's code thus calls the public method. If
    a subclass does not override this method, it calls the Trainer's private method.
    """


def _step(public: str, private: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(TrainerSteps, self), private)(*args, **kwargs)

    def overridden(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, public)(*args, **kwargs)

    return theirs, overridden


for _public, _private in STEPS.items():
    _theirs, _overridden = _step(_public, _private)
    setattr(TrainerSteps, _public, _theirs)
    setattr(TrainerSteps, _private, _overridden)


@contextmanager
def replaced_parts(processor: Any) -> Iterator[list[Any]]:
    """Yield a list with the replaced placeholders of each text that `processor` has encoded in the `with` block.

    The list stays empty if the processor's class replaces placeholders by other code. With the argument
    `return_text_replacement_offsets`, Idefics 3 and InternVL (transformers 5.23) fail if the first text has no image.
    """
    parts: list[Any] = []

    def record(replace: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        texts, parts[:] = replace(*args, **kwargs)
        return texts, list(parts)

    with Replacements() as changes:
        if hasattr(processor, "get_text_with_replacements"):
            changes.wrap(processor, "get_text_with_replacements", record)
        yield parts


def train_on_first_gpu(training: Any) -> None:
    """Let the training use only the first visible GPU, unless a launcher has started this process.

    Without a launcher, `TrainingArguments._n_gpu` counts all visible GPUs, and the Trainer uses `nn.DataParallel`.
    TRL's trainers reject several GPUs (`args.n_gpu > 1` in trl/trainer/sft_trainer.py), but only after loading the
    weights. tests/train/test_launched.py fails if the attribute is missing.
    """
    if training.n_gpu > 1:
        training._n_gpu = 1


def gpus_left(training: Any) -> int:
    """Return how many visible GPUs `train_on_first_gpu` leaves unused."""
    from transformers.training_args import ParallelMode

    alone = training.n_gpu == 1 and training.parallel_mode == ParallelMode.NOT_PARALLEL
    return max(0, torch.cuda.device_count() - 1) if alone else 0


SINCE: Final = {"_defer_fsdp_gradient_reduction": Version("5.23")}
"""Method in `STEPS` that older versions of transformers lack -> the first version that has it."""


def incompatibilities(trainer: type) -> list[str]:
    """Return a sentence for each method in `STEPS` that a trainer class lacks."""
    installed = Version(version("transformers"))
    steps = [name for name in STEPS.values() if name not in SINCE or installed >= SINCE[name]]
    return [f"{trainer.__name__} has no method {name}" for name in steps if not hasattr(trainer, name)]


# ------------------------------------------------------------------------------------------------------ replaced for a time


@contextmanager
def fakes_taken_for_real() -> Iterator[None]:
    """In the `with` block, transformers (5.20 to 5.24) runs the same code for fake tensors as for real ones.

    transformers treats fake tensors as an export (`is_tracing` in transformers/utils/import_utils.py). It then always
    creates masks, repeats keys and values, and uses another attention kernel. On the CPU before torch 2.11,
    `_can_use_grouped_mm` in transformers/integrations/moe.py checks if memory is aligned to 16 bytes, but fake tensors
    have no memory. tests/compat/test_others.py fails when the replacement of either function is no longer needed.
    """
    experts = sys.modules.get("transformers.integrations.moe")
    decide: Any = getattr(experts, "_can_use_grouped_mm", None)

    def of_aligned(*tensors: torch.Tensor) -> Any:
        return decide(*(SimpleNamespace(dtype=t.dtype, device=t.device, data_ptr=lambda: 0) for t in tensors))

    with (
        replaced(sys.modules.get("transformers.utils.import_utils"), "is_fake_tensor", lambda _: False),
        replaced(experts, "_can_use_grouped_mm", of_aligned),
    ):
        yield


_FP8 = "transformers.integrations.finegrained_fp8"


def has_fp8_layers(model: nn.Module) -> bool:
    """Return True if layers of the model run transformers' FP8 kernels."""
    return any(type(module).__module__ == _FP8 for module in model.modules())


@contextmanager
def fp8_kernels_replaced(runs: bool) -> Iterator[None]:
    """In the `with` block, ordinary matrix products replace FP8 kernels if the device `runs` FP8 kernels.

    FP8 kernels read memory, which fake tensors do not have. The FP8 layers of transformers 5.20 have no backward, and
    neither have these products. For older GPUs, transformers dequantizes the weights while loading.
    """
    layers = sys.modules.get(_FP8)
    with Replacements() as replacements:
        if layers is not None and runs:
            replacements.wrap(layers, "fp8_linear", _with_bias)
            if hasattr(layers, "fp8_grouped_matmul"):  # transformers 5.20 has none
                replacements.wrap(layers, "fp8_grouped_matmul", _product)
        yield


def _product(_: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return a product in x's dtype without a backward. To save memory, the weight is not dequantized."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        entry = weight.flatten()[:1].to(x.dtype) * scale.flatten()[:1].to(x.dtype)
        return x @ entry.expand(x.shape[-1], weight.shape[-2])


def _with_bias(_: Any, x: Any, weight: Any, scale: Any, *sizes: Any, bias: Any = None, **more: Any) -> Any:
    product, added = _product(_, x, weight, scale), sizes[1] if sizes[1:] else bias
    return product if added is None else product.add_(added)


@contextmanager
def without_bars() -> Iterator[None]:
    """In the `with` block, hide transformers' progress bars, unless the user's settings show or hide them."""
    from huggingface_hub import constants
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging

    with ExitStack() as after:
        if constants.HF_HUB_DISABLE_PROGRESS_BARS is not False and logging.is_progress_bar_enabled():
            if are_progress_bars_disabled():
                after.callback(disable_progress_bars)
            after.callback(logging.enable_progress_bar)  # this enables the hub's bars, too
            logging.disable_progress_bar()
        yield


def gguf_bar_hidden() -> AbstractContextManager[None]:
    """Hide transformers' progress bar for the tensors of a GGUF file. transformers has no setting for this bar."""
    from transformers import modeling_gguf_pytorch_utils as legacy

    return replaced(legacy, "tqdm", partial(legacy.tqdm, disable=True))


def steps_seen(
    trainer: Any, step: Callable[..., Any], loss: Callable[..., Any], norm: Callable[..., Any]
) -> Replacements:
    """Wrap a trainer's `training_step`, its `compute_loss`, and its method for the gradient norm.

    A wrapper is called with the wrapped method and the call's arguments. Callbacks are not enough: they do not get the
    batch and the loss, and get the gradient norm only in logged steps. A method that a script has set on the trainer
    object is not wrapped.
    """
    methods = Replacements()
    for name, wrapper in (("training_step", step), ("compute_loss", loss), (GRADIENT_NORM, norm)):
        if name not in vars(trainer):
            methods.wrap(trainer, name, wrapper)
    return methods


@contextmanager
def batches_as_they_are(trainer: Any) -> Iterator[None]:
    """In the `with` block, `training_step` takes prepared batches and generates no completions."""
    before = dict(vars(trainer))
    setattr(trainer, PREPARE_INPUTS, lambda inputs: inputs)
    try:
        yield
    finally:
        vars(trainer).clear()
        vars(trainer).update(before)


def calling_trainer() -> Any:
    """Return the trainer on the call stack that called the running callback; None if there is none."""
    from transformers import Trainer

    frame: FrameType | None = frame_above(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]
