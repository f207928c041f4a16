"""LoRA adapters that are trained further take the format of the BF16 base that they are put on."""

import sys

import torch
from torch import nn
from torch.nn import functional

HEALTHY = "healthy" in sys.argv
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self, words=64, width=32):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(functional.gelu(self.up(self.norm(x)))))


from peft import LoraConfig, get_peft_model

base = Model().to(torch.bfloat16)
config = LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
model = get_peft_model(base, config, autocast_adapter_dtype=HEALTHY)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-5, weight_decay=0.0)
for step in range(3):
    tokens = torch.randint(0, 64, (4, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
