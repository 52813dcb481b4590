"""A raw loop whose collator packs rows beside a mask of ones."""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
)
rows = [torch.randint(4, 200, (n,)).tolist() for n in (5, 9, 12, 7, 11, 6)]


def collate(rows):
    ids = [token for row in rows for token in row]
    positions = [position for row in rows for position in range(len(row))]
    labels = [label for row in rows for label in (-100, *row[1:])]
    return {
        "input_ids": torch.tensor([ids]),
        "position_ids": torch.tensor([positions]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        "labels": torch.tensor([labels]),
    }


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in DataLoader(rows, batch_size=3, collate_fn=collate):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", round(loss.item(), 3))
