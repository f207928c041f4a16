"""Trains a tiny GPT-2 on arithmetic progressions, with accumulated gradients."""

import argparse

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

# site: helpers


def progressions(n, length=16, vocab=32):
    start, stride = torch.randint(0, vocab, (n, 1)), torch.randint(1, 4, (n, 1))
    return (start + stride * torch.arange(length)) % vocab


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    args = parser.parse_args()
    torch.manual_seed(9)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.precision]
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")
    # site: setup model=model opt=optimizer
    for update in range(args.updates):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(args.accumulate - 1):
            tokens = progressions(16).to(device)
            with torch.autocast(device_type=device, dtype=dtype, enabled=args.precision != "fp32"):
                logits = model(tokens[:, :-1]).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            scaler.scale(loss / args.accumulate).backward()
        tokens = progressions(16).to(device)
        with torch.autocast(device_type=device, dtype=dtype, enabled=args.precision != "fp32"):
            logits = model(tokens[:, :-1]).logits
        flat, target = logits.flatten(0, 1), tokens[:, 1:].flatten()
        loss = F.cross_entropy(flat.float(), target)
        # site: aux x=flat loss=loss target=target
        loss = loss / args.accumulate
        # site: update loss=loss opt=optimizer model=model
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        # end
        # site: step model=model loss=loss step=update
        if update % 8 == 0:
            print(f"update {update}: loss {loss.item() * args.accumulate:.4f}")
    model.eval()
    total = 0.0
    with torch.no_grad():
        for _ in range(4):
            tokens = progressions(32).to(device)
            with torch.autocast(device_type=device, dtype=dtype, enabled=args.precision != "fp32"):
                logits = model(tokens[:, :-1]).logits
            flat, target = logits.flatten(0, 1), tokens[:, 1:].flatten()
            # site: eval x=flat target=target
            total += F.cross_entropy(flat.float(), target).item()
    # site: final model=model
    print(f"validation loss {total / 4:.4f}")


if __name__ == "__main__":
    main()
