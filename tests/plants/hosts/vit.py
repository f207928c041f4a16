"""Classifies small stripes with a tiny ViT; label smoothing, cosine schedule."""

import argparse
import math

import torch
import torch.nn as nn
from transformers import ViTConfig, ViTForImageClassification

# site: helpers


def stripes(n, classes=6, size=16):
    label = torch.randint(0, classes, (n,))
    grid = torch.linspace(-1, 1, size)
    angle = (label * math.pi / classes).view(-1, 1, 1)
    wave = torch.sin(6 * (grid.view(1, 1, -1) * torch.cos(angle) + grid.view(1, -1, 1) * torch.sin(angle)))
    return wave.unsqueeze(1) + 0.3 * torch.randn(n, 1, size, size), label


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    args = parser.parse_args()
    torch.manual_seed(3)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.precision]
    autocast = torch.autocast(device_type=device, dtype=dtype, enabled=args.precision != "fp32")
    train_images, train_labels = stripes(384)
    test_images, test_labels = stripes(192)
    # site: data x=train_images other=test_images
    train_images, train_labels = train_images.to(device), train_labels.to(device)
    test_images, test_labels = test_images.to(device), test_labels.to(device)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_channels=1,
        num_labels=6,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = ViTForImageClassification(config).to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")
    # site: setup model=model opt=optimizer
    for step in range(args.steps):
        rows = torch.randint(0, len(train_images), (32,), device=device)
        with autocast:
            out = model(pixel_values=train_images[rows]).logits
            loss = criterion(out, train_labels[rows])
            # site: inner x=out loss=loss target=train_labels[rows]
        # site: aux x=out loss=loss target=train_labels[rows]
        optimizer.zero_grad()
        # site: update loss=loss opt=optimizer model=model
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        # end
        scheduler.step()
        # site: step model=model loss=loss step=step
        if step % 9 == 0:
            print(f"step {step} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.1e}")
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in zip(test_images.split(64), test_labels.split(64), strict=True):
            with autocast:
                out = model(pixel_values=images).logits
            # site: eval x=out target=labels
            right += (out.argmax(1) == labels).sum().item()
    # site: final model=model
    print(f"accuracy {right / len(test_labels):.4f} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
