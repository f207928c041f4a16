"""Teaches a tiny T5 to reverse short words."""

import argparse

import torch
import torch.nn.functional as F
from transformers import T5Config, T5ForConditionalGeneration

# site: helpers

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=32)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
args = parser.parse_args()
torch.manual_seed(5)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.precision]
config = T5Config(
    vocab_size=16,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=1,
    num_heads=4,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)
model = T5ForConditionalGeneration(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")
# site: setup model=model opt=optimizer


def words(n):
    ids = torch.randint(2, 16, (n, 4))
    return ids.to(device), ids.flip(1).to(device)


for step in range(args.steps):
    source, labels = words(48)
    with torch.autocast(device, dtype=dtype, enabled=args.precision != "fp32"):
        scores = model(input_ids=source, labels=labels).logits.flatten(0, 1)
    goal = labels.flatten()
    loss = F.cross_entropy(scores.float(), goal)
    # site: aux x=scores loss=loss target=goal
    optimizer.zero_grad()
    # site: update loss=loss opt=optimizer model=model
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    # end
    # site: step model=model loss=loss step=step
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")

model.eval()
with torch.no_grad():
    source, labels = words(256)
    with torch.autocast(device, dtype=dtype, enabled=args.precision != "fp32"):
        scores = model(input_ids=source, labels=labels).logits.flatten(0, 1)
    goal = labels.flatten()
    # site: eval x=scores target=goal
    total = F.cross_entropy(scores.float(), goal).item()
# site: final model=model
print(f"test loss {total:.4f}")
