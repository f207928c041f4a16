"""A Lightning module: healthy in BF16, or with log(softmax) on half logits on request."""

import logging
import sys
import warnings

import lightning
import torch
from torch import nn

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Digits(lightning.LightningModule):
    def __init__(self, broken):
        super().__init__()
        self.broken = broken
        self.body = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))

    def training_step(self, batch, _):
        x, y = batch
        logits = self.body(x)
        if self.broken:
            chances = (40 * logits).half().softmax(-1)
            return -chances.log().float().gather(1, y[:, None]).mean()
        return nn.functional.cross_entropy(logits.float(), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(120, 12)
    data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
    trainer = lightning.Trainer(
        accelerator="cpu", precision="bf16-mixed", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, barebones=False,
    )  # fmt: skip
    trainer.fit(Digits("--broken" in sys.argv), torch.utils.data.DataLoader(data, batch_size=8))
