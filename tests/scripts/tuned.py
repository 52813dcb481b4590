"""TRL's SFTTrainer with LoRA on a random model saved to disk.

`python tuned.py MODE MODEL OUTPUT`: healthy; broken (adapters are made float16 after the trainer was built, while
the base computes in float32 and PEFT casts nothing).
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer


def main(mode, model, output):
    rows = Dataset.from_list([{"text": f"w{i} w{i + 1} w{i + 2} w{i + 3}"} for i in range(12)])
    trainer = SFTTrainer(
        model,
        SFTConfig(
            output_dir=output,
            max_steps=2,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            logging_steps=1,
            max_length=16,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
        ),
        train_dataset=rows,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )
    if mode == "broken":
        for name, module in trainer.model.named_modules():
            if name.endswith("lora_B"):
                module.to(torch.float16)
    result = trainer.train()
    print(f"trained {result.global_step} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
