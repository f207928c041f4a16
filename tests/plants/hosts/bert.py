"""Fine-tunes a tiny BERT on sentences of two topics."""

import argparse

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification

# site: helpers

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
args = parser.parse_args()
torch.manual_seed(2)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.precision]
autocast = torch.autocast(device_type=device, dtype=dtype, enabled=args.precision != "fp32")

config = BertConfig(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    num_labels=4,
)
model = BertForSequenceClassification(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")
# site: setup model=model opt=optimizer


def sentences(n, length=12):
    labels = torch.randint(0, 4, (n,))
    ids = torch.randint(2, 60, (n, length))
    topic = torch.rand(n, length) < 0.5
    ids = torch.where(topic, 2 + 14 * labels[:, None] + torch.randint(0, 14, (n, length)), ids)
    ids[:, 0] = 1
    mask = (torch.arange(length) < torch.randint(6, length + 1, (n, 1))).long()
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}, labels.to(device)


model.train()
for step in range(args.steps):
    batch, labels = sentences(32)
    with autocast:
        logits = model(**batch).logits
        loss = F.cross_entropy(logits, labels)
        # site: inner x=logits loss=loss target=labels
    # site: aux x=logits loss=loss target=labels
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
        print({"step": step, "loss": round(loss.item(), 4)})

model.eval()
right = 0
with torch.no_grad():
    for _ in range(4):
        batch, labels = sentences(128)
        with autocast:
            logits = model(**batch).logits
        # site: eval x=logits target=labels
        right += (logits.argmax(-1) == labels).sum().item()
# site: final model=model
print(f"eval accuracy {right / 512:.4f} train loss {loss.item():.4f}")
