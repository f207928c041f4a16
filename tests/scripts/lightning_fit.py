"""House prices with a LightningModule."""

import argparse
import logging
import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class HouseData(L.LightningDataModule):
    def __init__(self, n=960, batch_size=16):
        super().__init__()
        self.n, self.batch_size = n, batch_size

    def setup(self, stage=None):
        g = torch.Generator().manual_seed(0)
        area = 30 + 220 * torch.rand(self.n, generator=g)  # square metres
        rooms = torch.randint(1, 9, (self.n,), generator=g).float()
        age = 120 * torch.rand(self.n, generator=g)
        income = 20_000 + 90_000 * torch.rand(self.n, generator=g)  # of the quarter, per year
        kind = torch.randint(0, 4, (self.n,), generator=g).float()
        x = torch.stack([area, rooms, age, income, kind], 1)
        self.mean, self.std = x.mean(0), x.std(0)
        price = area / 100 + 0.1 * rooms - 0.004 * age + income / 15_000 + 0.2 * torch.sin(kind)
        y = ((price - price.mean()) / price.std()).unsqueeze(1)
        x = (x - self.mean) / self.std
        self.train_set = TensorDataset(x, y)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)


class PriceModel(L.LightningModule):
    def __init__(self, lr=0.02, width=48):
        super().__init__()
        self.lr = lr
        self.backbone = nn.Sequential(
            nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.head = nn.Linear(width, 1)
        self.losses = []

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        y_hat = self(x)
        loss = F.mse_loss(y_hat, y)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        if len(self.losses) % 6 == 0:
            print(f"step {len(self.losses)} train_loss: {sum(self.losses[-6:]) / 6:.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    args = parser.parse_args()
    L.seed_everything(7, verbose=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plugins = []
    if args.precision == "fp16":
        # precision="16-mixed" turns into BF16 on a CPU
        plugins.append(MixedPrecision("16-mixed", device, scaler=torch.amp.GradScaler(device)))
    elif args.precision == "bf16":
        plugins.append(MixedPrecision("bf16-mixed", device))
    trainer = L.Trainer(
        max_epochs=args.max_epochs,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        plugins=plugins,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(PriceModel(lr=args.lr), datamodule=HouseData())


if __name__ == "__main__":
    main()
