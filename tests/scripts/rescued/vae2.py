from __future__ import print_function
import argparse

import torch
import torch.utils.data
from torch import nn, optim
from torch.nn import functional as F

parser = argparse.ArgumentParser(description="VAE with a learnt variance of the pixels, on height maps")
parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="input batch size for training")
parser.add_argument("--epochs", type=int, default=8, metavar="N", help="number of epochs to train (default: 8)")
parser.add_argument("--warmup", type=int, default=40, metavar="N", help="steps in which the KL weight rises to 1")
parser.add_argument("--lr", type=float, default=8e-3)
parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
parser.add_argument("--seed", type=int, default=1, metavar="S", help="random seed (default: 1)")
parser.add_argument("--log-interval", type=int, default=5, metavar="N")
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
amp_dtype = torch.bfloat16 if args.precision == "bf16" else torch.float16
use_amp = args.precision != "fp32"

SIDE = 16
PIXELS = SIDE * SIDE
MEAN, STD = 2100.0, 1.5  # of the heights, in metres


def height_maps(n):
    """A hill on ground that rises towards one side, in metres above the sea."""
    axis = torch.linspace(-1, 1, SIDE)
    cy, cx = (torch.rand(2, n, 1, 1) - 0.5) * 1.2
    size = 0.1 + 0.15 * torch.rand(n, 1, 1)
    spot = torch.exp(-((axis.view(1, -1, 1) - cy) ** 2 + (axis.view(1, 1, -1) - cx) ** 2) / size)
    slope = torch.randn(n, 1, 1) * axis.view(1, 1, -1)
    metres = 2099.5 + 3.5 * spot + 0.8 * slope + 0.05 * torch.randn(n, SIDE, SIDE)
    return metres.view(n, 1, SIDE, SIDE)


train_loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(height_maps(1024)), batch_size=args.batch_size, shuffle=True
)
test_loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(height_maps(256)), batch_size=args.batch_size, shuffle=False
)


class VAE(nn.Module):
    def __init__(self):
        super(VAE, self).__init__()

        self.fc1 = nn.Linear(PIXELS, 128)
        self.bn1 = nn.BatchNorm1d(128)
        self.fc21 = nn.Linear(128, 8)
        self.fc22 = nn.Linear(128, 8)
        self.fc3 = nn.Linear(8, 128)
        self.bn3 = nn.BatchNorm1d(128)
        self.fc4 = nn.Linear(128, PIXELS)
        self.log_var_x = nn.Parameter(torch.zeros(1))  # of all pixels

    def encode(self, x):
        h1 = F.relu(self.bn1(self.fc1(x)))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.bn3(self.fc3(z)))
        return self.fc4(h3)

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, PIXELS))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


model = VAE().to(device)
weights = [p for p in model.parameters() if p is not model.log_var_x]
optimizer = optim.Adam([{"params": weights}, {"params": [model.log_var_x], "lr": 10 * args.lr}], lr=args.lr)
scaler = torch.amp.GradScaler(device, init_scale=2.0**3, enabled=args.precision == "fp16")


# Reconstruction + KL divergence losses, the sum over pixels and latents, per batch
def loss_function(recon_x, x, mu, logvar, log_var_x):
    x = x.view(-1, PIXELS)
    err = recon_x - x
    NLL = 0.5 * torch.sum(err**2 * torch.exp(-log_var_x) + log_var_x)
    # see Appendix B from VAE paper: 0.5 * sum(1 + log(sigma^2) - mu^2 - sigma^2)
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return NLL, KLD


step = 0


def train(epoch):
    global step
    model.train()
    train_loss = 0
    for batch_idx, (data,) in enumerate(train_loader):
        data = (data.to(device) - MEAN) / STD
        beta = min(1.0, (step + 1) / args.warmup)
        optimizer.zero_grad()
        with torch.autocast(device_type=device, dtype=amp_dtype, enabled=use_amp):
            recon_batch, mu, logvar = model(data)
            NLL, KLD = loss_function(recon_batch, data, mu, logvar, model.log_var_x)
            loss = NLL + beta * KLD
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        step += 1
        elbo = (NLL + KLD).item()
        train_loss += elbo
        if batch_idx % args.log_interval == 0:
            print(
                "Train Epoch: {} [{}/{} ({:.0f}%)]\tLoss: {:.6f}\tKL: {:.4f}".format(
                    epoch,
                    batch_idx * len(data),
                    len(train_loader.dataset),
                    100.0 * batch_idx / len(train_loader),
                    elbo / len(data),
                    KLD.item() / len(data),
                )
            )

    print("====> Epoch: {} Average loss: {:.4f}".format(epoch, train_loss / len(train_loader.dataset)))


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for (data,) in test_loader:
            data = (data.to(device) - MEAN) / STD
            with torch.autocast(device_type=device, dtype=amp_dtype, enabled=use_amp):
                recon_batch, mu, logvar = model(data)
                NLL, KLD = loss_function(recon_batch, data, mu, logvar, model.log_var_x)
            test_loss += (NLL + KLD).item()

    print("====> Test set loss: {:.4f}".format(test_loss / len(test_loader.dataset)))


if __name__ == "__main__":
    for epoch in range(1, args.epochs + 1):
        train(epoch)
        test(epoch)
