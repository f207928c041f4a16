"""
Image classification with DistributedDataParallel.

    python ddp.py                                   # one process
    torchrun --nproc_per_node=2 ddp.py              # two
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def setup():
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend)
    else:
        store = tempfile.NamedTemporaryFile(delete=False).name
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    return rank, world_size


class Stripes(Dataset):
    """16x16 pictures of stripes in eight directions."""

    def __init__(self, n=640, classes=8):
        g = torch.Generator().manual_seed(0)
        self.labels = torch.randint(0, classes, (n,), generator=g)
        angle = self.labels * torch.pi / classes
        grid = torch.linspace(-3, 3, 16)
        cos, sin = torch.cos(angle).view(-1, 1, 1), torch.sin(angle).view(-1, 1, 1)
        phase = cos * grid.view(1, 1, 16) + sin * grid.view(1, 16, 1)
        shift = torch.rand(n, 1, 1, generator=g) * 6.28
        self.images = torch.sin(2 * phase + shift) + 0.4 * torch.randn(n, 16, 16, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        image = (image - image.mean()) / image.std()
        return image.unsqueeze(0), self.labels[i]


class Net(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.fc1 = nn.Linear(32 * 16, 64)
        self.fc2 = nn.Linear(64, classes)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    args = parser.parse_args()

    rank, world_size = setup()
    torch.manual_seed(1)
    device = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    device_type = torch.device(device).type
    amp_dtype = torch.bfloat16 if args.precision == "bf16" else torch.float16

    dataset = Stripes()
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(dataset, batch_size=args.batch_size // world_size, sampler=sampler)
    net = Net().to(device)
    model = DDP(net, device_ids=[device] if device_type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(device_type, enabled=args.precision == "fp16")
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, (images, target) in enumerate(loader):
            images, target = images.to(device), target.to(device)
            with torch.autocast(device_type, dtype=amp_dtype, enabled=args.precision != "fp32"):
                output = model(images)
                loss = criterion(output, target)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            scaler.step(optimizer)
            scaler.update()
            if rank == 0 and i % 4 == 0:
                acc = (output.argmax(1) == target).float().mean().item()
                print(f"Epoch {epoch} [{i}/{len(loader)}] loss={loss.item():.4f} acc={acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
