import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

# which of the seven bars of a clock's digit are lit: top, upper left, upper right, middle, lower left, lower right, bottom
SEGMENTS = ["1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011"]


def make_digits(n, generator):
    """Digits of 16 x 16 pixels in strokes of random place, thickness and brightness, as bytes."""
    target = torch.randint(10, (n,), generator=generator)
    images = torch.zeros(n, 16, 16)
    for i in range(n):
        top = int(torch.randint(0, 4, (1,), generator=generator))
        left = int(torch.randint(1, 7, (1,), generator=generator))
        wide = 1 + int(torch.randint(0, 2, (1,), generator=generator))
        t, m, b, l, r = top, top + 5, top + 10, left, left + 6
        bars = [
            (slice(t, t + wide), slice(l, r + wide)),
            (slice(t, m), slice(l, l + wide)),
            (slice(t, m), slice(r, r + wide)),
            (slice(m, m + wide), slice(l, r + wide)),
            (slice(m, b), slice(l, l + wide)),
            (slice(m, b), slice(r, r + wide)),
            (slice(b, b + wide), slice(l, r + wide)),
        ]
        for lit, (rows, cols) in zip(SEGMENTS[target[i]], bars):
            if lit == "1":
                images[i, rows, cols] = 0.6 + 0.4 * float(torch.rand(1, generator=generator))
    images = (images + 0.1 * torch.rand(images.shape, generator=generator)).clamp(0, 1)
    return (images * 255).to(torch.uint8), target


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout1 = nn.Dropout(0.1)
        self.dropout2 = nn.Dropout(0.1)
        self.fc1 = nn.Linear(576, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = self.conv1(x)
        x = F.relu(x)
        x = self.conv2(x)
        x = F.relu(x)
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = self.fc1(x)
        x = F.relu(x)
        x = self.dropout2(x)
        x = self.fc2(x)
        output = F.log_softmax(x, dim=1)
        return output


def train(args, model, device, train_loader, optimizer, scaler, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        with torch.autocast(device_type=device, dtype=args.dtype, enabled=args.use_amp):
            output = model(data)
            loss = F.nll_loss(output, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if batch_idx % args.log_interval == 0:
            print(
                "Train Epoch: {} [{}/{} ({:.0f}%)]\tLoss: {:.6f}".format(
                    epoch,
                    batch_idx * len(data),
                    len(train_loader.dataset),
                    100.0 * batch_idx / len(train_loader),
                    loss.item(),
                )
            )


def test(args, model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            with torch.autocast(device_type=device, dtype=args.dtype, enabled=args.use_amp):
                output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()  # sum up batch loss
            pred = output.argmax(dim=1, keepdim=True)  # get the index of the max log-probability
            correct += pred.eq(target.view_as(pred)).sum().item()

    test_loss /= len(test_loader.dataset)

    print(
        "\nTest set: Average loss: {:.4f}, Accuracy: {}/{} ({:.0f}%)\n".format(
            test_loss, correct, len(test_loader.dataset), 100.0 * correct / len(test_loader.dataset)
        )
    )


def main():
    # Training settings
    parser = argparse.ArgumentParser(description="PyTorch MNIST Example")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="input batch size for training")
    parser.add_argument("--test-batch-size", type=int, default=128, metavar="N", help="input batch size for testing")
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="number of epochs to train (default: 4)")
    parser.add_argument("--lr", type=float, default=1.0, metavar="LR", help="learning rate (default: 1.0)")
    parser.add_argument("--gamma", type=float, default=0.7, metavar="M", help="Learning rate step gamma (default: 0.7)")
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="random seed (default: 1)")
    parser.add_argument("--log-interval", type=int, default=8, metavar="N", help="how many batches to wait")
    args = parser.parse_args()
    args.use_amp = args.precision != "fp32"
    args.dtype = torch.bfloat16 if args.precision == "bf16" else torch.float16

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    generator = torch.Generator().manual_seed(args.seed)
    images, labels = make_digits(768 + 256, generator)
    images = images.float().div(255).sub(0.2).div(0.3).unsqueeze(1)
    train_loader = DataLoader(TensorDataset(images[:768], labels[:768]), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(TensorDataset(images[768:], labels[768:]), batch_size=args.test_batch_size)

    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")

    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, scaler, epoch)
        test(args, model, device, test_loader)
        scheduler.step()


if __name__ == "__main__":
    main()
