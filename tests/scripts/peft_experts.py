"""A loop of a user's own over a mixture of experts with PEFT's adapters of parameters (`target_parameters`), in bfloat16."""

from __future__ import annotations

import peft
import torch
import transformers

torch.manual_seed(0)
config = transformers.Qwen3MoeConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
)
plain = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
model = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=experts))
optimizer = torch.optim.AdamW(
    [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3
)
for _ in range(2):
    ids = torch.randint(128, (2, 16))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
