"""Adapters on a model under a policy; PEFT makes them, the policy decides their dtypes."""

from __future__ import annotations

import copy
import types
import warnings
from pathlib import Path
from typing import Any

from isotype.errors import PrecisionError, Problem, UsageError
from isotype.model.enforce import enforce_model
from isotype.precision.policy import PrecisionPolicy


def add_lora(
    model: Any,
    policy: PrecisionPolicy,
    config: Any = None,
    *,
    adapter_name: str = "default",
    **lora_kwargs: Any,
) -> Any:
    """Add a LoRA adapter (or DoRA, rsLoRA: `use_dora=`, `use_rslora=`) whose masters are as `policy` says.

    The base weights are frozen and stay as they lie: nothing is upcast. A model that has adapters already gets
    another one under `adapter_name`. The policy is saved beside the adapter by `save_pretrained`.

    Args:
        model: a model loaded with `isotype.load`, or any model that PEFT takes.
        policy: from `isotype.resolve_precision`.
        config: a `peft.LoraConfig` (or another PEFT config); by default one made from `lora_kwargs`, on all
            linear layers.
        adapter_name: PEFT's name of the adapter.
        **lora_kwargs: fields of `peft.LoraConfig` (`r`, `lora_alpha`, `target_modules`, `bias`, …).

    Returns:
        The PEFT model.

    Raises:
        UsageError: `config` and `lora_kwargs` are both given.
        PrecisionError: the policy trains every weight.
    """
    import peft

    if policy.trainable == "full":
        raise PrecisionError(
            "no adapter under a policy that trains every weight",
            [Problem("trainable='full'", "trainable='lora'", "resolve the policy with trainable='lora'")],
        )
    if config is not None and lora_kwargs:
        raise UsageError(
            "adapter settings given twice",
            [
                Problem(
                    f"config=… and {', '.join(lora_kwargs)}",
                    "one of the two",
                    "put them into the LoraConfig, or leave the config out",
                )
            ],
        )
    if config is None:
        lora_kwargs.setdefault("target_modules", "all-linear")
        if hasattr(model, "prepare_inputs_for_generation"):
            lora_kwargs.setdefault("task_type", "CAUSAL_LM")
        config = peft.LoraConfig(**lora_kwargs)
    _leave_out_experts(model, config)
    if isinstance(model, peft.PeftModel):
        model.add_adapter(adapter_name, config)
    else:
        model.requires_grad_(False)
        model = peft.get_peft_model(model, config, adapter_name=adapter_name)
        _save_policy_too(model)
    enforce_model(model, policy)
    return model


def _leave_out_experts(model: Any, config: Any) -> None:
    """Take stacked experts off the targets where PEFT cannot adapt them as asked; say so.

    PEFT reaches experts that are stacked in one parameter by reparametrizing it, which leaves no activation to
    drop out, no output to scale and no bias (`ParamWrapper.__init__` raises ValueError).
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    unable = [name for name in ("use_dora", "lora_dropout", "lora_bias") if getattr(config, name, None)]
    if not unable:
        return
    converted = copy.deepcopy(config)
    convert_peft_config_for_transformers(converted, model, None)
    experts = set(converted.target_parameters or ()) - set(config.target_parameters or ())
    if not experts or not converted.target_modules:
        return
    config.target_modules = converted.target_modules
    warnings.warn(
        f"{' and '.join(unable)}: adapters go on {', '.join(sorted(config.target_modules))}, not on the stacked "
        f"experts ({', '.join(sorted(experts))}), which PEFT adapts by plain LoRA only",
        stacklevel=3,
    )


def _save_policy_too(model: Any) -> None:
    """Let this one model's `save_pretrained` leave its policy beside the adapter."""

    def save_pretrained(self: Any, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        type(self).save_pretrained(self, save_directory, *args, **kwargs)
        self.precision_policy.save(save_directory)

    model.save_pretrained = types.MethodType(save_pretrained, model)
