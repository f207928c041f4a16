"""Small pictures by a convolutional network with batch normalisation."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

# site: helpers

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=36)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
args = parser.parse_args()
torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.precision]


def make_pictures(n, classes=8):
    labels = torch.randint(0, classes, (n,))
    patterns = torch.randn(classes, 3, 8, 8, generator=torch.Generator().manual_seed(7))
    return 0.5 * patterns[labels] + 1.5 * torch.randn(n, 3, 8, 8), labels


class Net(nn.Module):
    def __init__(self, width=16, classes=8):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.fc = nn.Linear(2 * width * 16, 32)
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        # site: features x=x
        x = F.relu(self.bn2(self.conv2(x)))
        h = self.fc(x.flatten(1))
        # site: features x=h
        return self.head(F.relu(h))


images, labels = make_pictures(512)
test_images, test_labels = make_pictures(256)
# site: data x=images other=test_images
images, labels = images.to(device), labels.to(device)
test_images, test_labels = test_images.to(device), test_labels.to(device)
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")
# site: setup model=model opt=optimizer

for step in range(args.steps):
    pick = torch.randint(0, len(images), (args.batch_size,), device=device)
    inputs, target = images[pick], labels[pick]
    optimizer.zero_grad()
    with torch.autocast(device, dtype=dtype, enabled=args.precision != "fp32"):
        logits = model(inputs)
        loss = F.cross_entropy(logits, target)
        # site: inner x=logits loss=loss target=target
    # site: aux x=logits loss=loss target=target
    # site: update loss=loss opt=optimizer model=model
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    # end
    # site: step model=model loss=loss step=step
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")

model.eval()
correct, total_loss = 0, 0.0
with torch.no_grad():
    for start in range(0, len(test_images), 64):
        target = test_labels[start : start + 64]
        with torch.autocast(device, dtype=dtype, enabled=args.precision != "fp32"):
            logits = model(test_images[start : start + 64])
        # site: eval x=logits target=target
        correct += (logits.argmax(1) == target).sum().item()
        total_loss += F.cross_entropy(logits.float(), target, reduction="sum").item()
# site: final model=model
print(f"test loss {total_loss / len(test_images):.4f} accuracy {correct / len(test_images):.4f}")
