"""The model of a training command: loaded under the policy, with its adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isotype.checkpoint.load import load
from isotype.errors import CheckpointError, Problem
from isotype.lora.adapters import add_lora
from isotype.precision.policy import PrecisionPolicy
from isotype.train.settings import Settings


def adapted_model(settings: Settings, policy: PrecisionPolicy) -> tuple[Any, Any]:
    """Load the model and add the adapter that the arguments describe.

    Returns:
        (model, peft_config): peft_config is None, except where the trainer has to add the adapter itself
        because a chat template brings new tokens that have to become trainable first.
    """
    import transformers
    from trl import get_peft_config

    arguments, training, method = settings.model, settings.training, settings.method
    kwargs = dict(training.model_init_kwargs or {})
    for decided in ("dtype", "torch_dtype", "quantization_config"):
        kwargs.pop(decided, None)
    training.model_init_kwargs = None
    kwargs |= dict(method.model_kwargs)
    model = load(
        arguments.model_name_or_path,
        policy,
        model_class=getattr(transformers, method.auto_class) if method.auto_class else None,
        revision=arguments.model_revision,
        trust_remote_code=training.trust_remote_code,
        attn_implementation=arguments.attn_implementation,
        **kwargs,
    )
    model.config.use_cache = False
    if policy.trainable == "full":
        return model, None
    peft_config = get_peft_config(arguments)
    template = getattr(training, "chat_template_path", None)  # sft and reward have it
    if template is not None and not Path(template).is_file():
        return model, peft_config
    return add_lora(model, policy, peft_config), None


def processing_class(source: Path | str, **kwargs: Any) -> Any:
    """The tokenizer of a checkpoint, or its processor where it takes images.

    Raises:
        CheckpointError: the checkpoint has none.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(source, **kwargs)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "no tokenizer in the checkpoint",
            [
                Problem(
                    f"{source}: {str(error).splitlines()[0]}",
                    "tokenizer.json and tokenizer_config.json beside the weights",
                    "copy them from the model that the weights come from",
                )
            ],
        ) from error
