"""transformers' Trainer with a PEFT adapter on a bfloat16 model, with gradient checkpointing.

`python trained.py MODE OUTPUT`: healthy; broken (the head is made float32 "for a stable loss", with nothing that
casts what it is given).
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def main(mode, output):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    if mode == "broken":
        model.lm_head.float()
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (8, 8))]
    arguments = TrainingArguments(
        output_dir=output,
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    result = Trainer(model, arguments, train_dataset=rows).train()
    print(f"trained {result.global_step} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
