"""Launched by test_lightning_ranks.py with torchrun: DDP and FSDP2 fits, and what each process found as JSON."""

import json
import logging
import os
import sys
import warnings
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import floatline as fl
from floatline.integrations.lightning import FloatlineCallback, FloatlineFabricPrecision, FloatlinePrecision
from floatline.numerics import cuda_autocast_lists

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
RANK = int(os.environ["RANK"])
OUT = Path(sys.argv[1])
NUM = 12
BAD = 5  # the batch that is broken on the second process alone


class Module(lightning.LightningModule):
    def __init__(self, shard=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3))
        self.shard = shard

    def configure_model(self):
        if self.shard:
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.net[0], mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def training_step(self, batch, _):
        return F.mse_loss(self.net(batch[0]).float(), batch[1].float())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def rows():
    generator = torch.Generator().manual_seed(10 + RANK)
    found = [(torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(NUM)]
    if RANK == 1:
        found[BAD][0][0, 0] = float("nan")
    return torch.utils.data.DataLoader(found, batch_size=None)


def fit(name, strategy, plugin, *, shard=False, callbacks=(), accumulate=1, epochs=1, ckpt_path=None):
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, plugins=[plugin], callbacks=list(callbacks),
        max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, default_root_dir=OUT / name,
        accumulate_grad_batches=accumulate, gradient_clip_val=1.0,
    )  # fmt: skip
    module = Module(shard)
    trainer.fit(module, rows(), ckpt_path=ckpt_path)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return trainer, {
        "weights": torch.cat([weight.detach().float().reshape(-1) for weight in weights]).tolist(),
        "global_step": trainer.global_step,
        "advances": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
    }


def ours(name, strategy, plan, *, save=None, **options):
    callback = FloatlineCallback(OUT / f"{name}-ledger")
    trainer, found = fit(name, strategy, FloatlinePrecision(plan), callbacks=[callback], **options)
    account = callback.accounts[0].run
    found["skipped"] = account.skipped
    found["scale"] = account.scale
    found["metrics"] = {key: float(value) for key, value in trainer.callback_metrics.items()}
    if save is not None:
        trainer.save_checkpoint(save)
    return found


def loop_with_fabric():
    precision = FloatlineFabricPrecision("fp16-mixed")
    strategy = FabricDDP(process_group_backend="gloo")
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[precision])
    fabric.launch()
    module = Module()
    model, optimizer = fabric.setup(module.net, torch.optim.SGD(module.parameters(), lr=0.1))
    schedule = precision.scheduler(torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20))
    for x, y in rows():
        fabric.backward(F.mse_loss(model(x), y))
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    metrics = precision.metrics()
    return {
        "weights": torch.cat([param.detach().reshape(-1) for param in module.parameters()]).tolist(),
        "advances": schedule.last_epoch,
        "skipped": precision.steps.guards[0].accounts.run.skipped,
        "scale": metrics["floatline/scale"],
    }


def ddp():
    return DDPStrategy(process_group_backend="gloo")


def fsdp2():
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


def main():
    path = OUT / "fsdp2.ckpt"
    with cuda_autocast_lists():  # registered once for all fits
        found = {
            "DDP": ours("ddp", ddp(), "fp16-mixed"),
            "DDP, two batches a step": ours("ddp2", ddp(), "fp16-mixed", accumulate=2),
            "DDP, 16-bit weights": ours("ddp-true", ddp(), "fp16-true"),
            "Fabric, DDP": loop_with_fabric(),
            "FSDP2": ours("fsdp2", fsdp2(), "fp16-mixed", shard=True, save=path),
            "FSDP2, whole": ours("fsdp2-whole", fsdp2(), "fp16-mixed", shard=True, epochs=2),
            "FSDP2, resumed": ours("fsdp2-again", fsdp2(), "fp16-mixed", shard=True, epochs=2, ckpt_path=path),
        }
        with fl.HalfOnCPU():
            plain = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
            found["plain Lightning"] = fit("plain", ddp(), plain)[1]
            found["plain Lightning"]["scale"] = plain.scaler.get_scale()
    (OUT / f"{RANK}.json").write_text(json.dumps(found), encoding="utf-8")


main()
