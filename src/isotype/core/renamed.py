"""Arguments that transformers and TRL renamed or removed.

From their changelogs and deprecations: transformers 4.0 to 5.23 (`training_args.py`), TRL 0.7 to 1.16 (its
configs).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from isotype.core.errors import Problem

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
    "torch_dtype": ("dtype", "auto"),
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
"""Former name -> (current name, equivalent value; "" for the same value)."""

REMOVED: Mapping[str, str] = {
    "overwrite_output_dir": "leave it out: a run into the folder of a finished one says what it writes over",
    "save_safetensors": "leave it out: weights are saved as safetensors",
    "logging_dir": "leave it out, or set TENSORBOARD_LOGGING_DIR",
    "fp16_opt_level": "leave it out: --dtype float16 trains with torch's own autocast",
    "use_liger": "leave it out: fused layers (--fuse, the default) have kernels for the same operations",
    "use_ipex": "leave it out: --device xpu runs on torch's own kernels",
    "jit_mode_eval": "leave it out, or --torch_compile True",
    "tpu_num_cores": "leave it out",
    "past_index": "leave it out",
    "mp_parameters": "leave it out",
    "ray_scope": "leave it out",
    "tokenizer": "leave it out: the tokenizer is the model's; a template of another one: --chat_template_path",
    "tokenizer_name": "leave it out: the tokenizer is the model's; a template of another one: --chat_template_path",
    "max_prompt_length": "leave it out, or give --max_length for prompt and completion together",
    "max_target_length": "leave it out, or give --max_length for prompt and completion together",
    "dataset_batch_size": "leave it out",
    "num_of_sequences": "leave it out: --packing True fills rows of --max_length",
    "chars_per_token": "leave it out: --packing True fills rows of --max_length",
    "label_pad_token_id": "leave it out: it is -100",
    "padding_value": "leave it out: it is the tokenizer's padding token",
    "is_encoder_decoder": "leave it out: the model's config says it",
    "generate_during_eval": "leave it out; --ask QUESTION asks the model before and after",
    "reference_free": "leave it out",
    "force_use_ref_model": "leave it out",
    "model_adapter_name": "leave it out: --model_name_or_path takes an adapter to be trained further",
    "ref_adapter_name": "leave it out: the reference is the adapter as it was at the start",
    "rpo_alpha": "--loss_type sigmoid sft --loss_weights 1.0 ALPHA",
    "vllm_device": "leave it out, or --vllm_mode colocate",
}
"""Former name -> the replacement to type."""


def renamed(flag: str, names: Collection[str]) -> Problem | None:
    """Return the problem of a renamed or removed argument (`--no-cuda`); None for any other."""
    old = flag.lstrip("-").replace("-", "_").lower()
    new, value = RENAMED.get(old, ("", ""))
    if new in names and old not in names:
        fix = f"--{new} {value or 'VALUE'}"
        return Problem(f"{flag}: renamed", f"its name in transformers 5 and TRL 1: --{new}", fix)
    if old in REMOVED and old not in names:
        return Problem(f"{flag}: removed", "an argument that transformers 5 or TRL 1 has", REMOVED[old])
    return None
