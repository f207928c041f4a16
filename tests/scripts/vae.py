import argparse

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="VAE Example")
parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="input batch size (default: 64)")
parser.add_argument("--epochs", type=int, default=4, metavar="N", help="number of epochs to train (default: 4)")
parser.add_argument("--seed", type=int, default=1, metavar="S", help="random seed (default: 1)")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--log-interval", type=int, default=5, metavar="N")
parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
args = parser.parse_args()

torch.manual_seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"
use_amp = args.precision != "fp32"
amp_dtype = torch.bfloat16 if args.precision == "bf16" else torch.float16


def make_images(n):
    """Digit-like strokes of 20 x 20 pixels: bright blobs on a bright plate, with a black frame."""
    grid = torch.arange(20).float()
    cy, cx = torch.randint(6, 14, (2, n, 1, 1)).float()
    blob = torch.exp(-((grid.view(1, 20, 1) - cy) ** 2 + (grid.view(1, 1, 20) - cx) ** 2) / 8.0)
    plate = torch.zeros(20, 20)
    plate[15:18, 2:18] = 1.0
    images = torch.maximum(blob, plate)
    images = images / images.amax(dim=(1, 2), keepdim=True)
    return images.unsqueeze(1)


train_loader = DataLoader(TensorDataset(make_images(960)), batch_size=args.batch_size, shuffle=True)
test_loader = DataLoader(TensorDataset(make_images(128)), batch_size=args.batch_size, shuffle=False)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(400, 200)
        self.fc21 = nn.Linear(200, 10)
        self.fc22 = nn.Linear(200, 10)
        self.fc3 = nn.Linear(10, 200)
        self.fc4 = nn.Linear(200, 400)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return self.fc4(h3)

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 400))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=args.lr)
scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")


# Reconstruction + KL divergence losses summed over all elements, per image
def loss_function(logits, x, mu, logvar):
    x = x.view(-1, 400)
    BCE = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    # see Appendix B from VAE paper: 0.5 * sum(1 + log(sigma^2) - mu^2 - sigma^2)
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return (BCE + KLD) / len(x)


def train(epoch):
    model.train()
    train_loss = 0.0
    for batch_idx, (data,) in enumerate(train_loader):
        data = data.to(device)
        optimizer.zero_grad()
        with torch.autocast(device_type=device, dtype=amp_dtype, enabled=use_amp):
            recon_batch, mu, logvar = model(data)
            loss = loss_function(recon_batch, data, mu, logvar)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        train_loss += loss.item() * len(data)
        if batch_idx % args.log_interval == 0:
            done = batch_idx * len(data)
            print(f"Train Epoch: {epoch} [{done}/{len(train_loader.dataset)}]\tLoss: {loss.item():.4f}")
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_loader.dataset):.4f}")


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for (data,) in test_loader:
            data = data.to(device)
            with torch.autocast(device_type=device, dtype=amp_dtype, enabled=use_amp):
                recon_batch, mu, logvar = model(data)
                test_loss += loss_function(recon_batch, data, mu, logvar).item() * len(data)
    print(f"====> Test set loss: {test_loss / len(test_loader.dataset):.4f}")


if __name__ == "__main__":
    for epoch in range(1, args.epochs + 1):
        train(epoch)
        test(epoch)
