"""An accelerate loop over a transformers model with bfloat16 autocast and gradient accumulation.

`python accelerated.py MODE`: healthy; broken (a patched-in projection computes with autocast switched off, on a
bfloat16 weight, and is given float32).
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


class Projection(nn.Module):
    """Meant to save a cast: leaves autocast, but nobody casts its input."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size, dtype=torch.bfloat16) / size)

    def forward(self, hidden):
        with torch.autocast("cpu", enabled=False):
            return hidden @ self.weight


def main(mode):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config)
    if mode == "broken":
        model.model.norm = nn.Sequential(model.model.norm, Projection(32))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (16, 8))]
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4))
    model.train()
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        print(f"batch {number} loss {loss.item():.6f}")


if __name__ == "__main__":
    main(sys.argv[1])
