"""Lightning in FP16 under guard, with a bad batch: two lines in the Trainer, none in the module.

Run it with: python examples/lightning_fit.py (needs: pip install 'floatline[lightning]')
"""

import tempfile

import lightning
import torch
import torch.nn.functional as F
from torch import nn

import floatline as fl
from floatline.integrations.lightning import FloatlineCallback, FloatlinePrecision


class Classifier(lightning.LightningModule):
    """A module that knows nothing of floatline."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))

    def training_step(self, batch: tuple, batch_idx: int) -> torch.Tensor:  # noqa: ARG002
        """Cross-entropy."""
        x, labels = batch
        return F.cross_entropy(self.net(x).float(), labels)

    def configure_optimizers(self) -> dict:
        """A schedule by step: it must not advance on the skipped one."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_loader() -> torch.utils.data.DataLoader:
    """50 batches, of which number 20 has a NaN."""
    x = torch.randn(50, 64, 16, generator=torch.Generator().manual_seed(0))
    labels = x[..., :4].argmax(-1)
    x[20, 0, 0] = float("nan")
    return torch.utils.data.DataLoader(list(zip(x, labels, strict=True)), batch_size=None)


def main() -> None:
    """Fit, and read what happened."""
    torch.manual_seed(0)
    callback = FloatlineCallback()
    trainer = lightning.Trainer(
        plugins=[FloatlinePrecision("fp16-mixed")],  # was: precision="16-mixed"
        callbacks=[callback],
        gradient_clip_val=1.0,
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
    )
    trainer.fit(Classifier(), make_loader())
    print(callback.summary())
    schedule = trainer.lr_scheduler_configs[0].scheduler
    print(f"global_step {trainer.global_step}, schedule at {schedule.last_epoch}")
    ledger = fl.Ledger.read(callback.folder)
    print([(batch, reason) for batch, reason in zip(ledger.batch, ledger.reason, strict=True) if reason])


if __name__ == "__main__":
    main()
