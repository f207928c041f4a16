"""Failures planted into the scripts of this folder: small edits, each with the cause that must be named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Planted:
    """One failure: what is edited in a healthy script, and what is then wrong.

    Args:
        script: Name of the healthy script, without suffix.
        name: Name of the failure, one for each script.
        edits: (old text, new text); every old text occurs exactly once in the healthy script.
        cause: Id of the cause in the catalogue; several where more than one is honestly right.
        line: Text of the line of the edited script at which the cause lies; several where a reader would accept each.
        loud: Whether something becomes inf or NaN, steps are skipped or an exception is raised.
        why: What happens.
        arguments: For the command line of the script.
        verdict: Whether 16 bits are to blame, as the catalogue sorts the cause.
    """

    script: str
    name: str
    edits: tuple[tuple[str, str], ...]
    cause: tuple[str, ...]
    line: tuple[str, ...]
    loud: bool
    why: str
    arguments: tuple[str, ...] = ()
    verdict: Literal["precision", "not-precision"] = "precision"


def make_script(planted: Planted, folder: Path, *, scripts: Path = FOLDER) -> Path:
    """Writes the edited script into `folder` and returns its path; the healthy one lies in `scripts`."""
    text = (scripts / f"{planted.script}.py").read_text(encoding="utf-8")
    for old, new in planted.edits:
        if text.count(old) != 1:
            raise ValueError(f"{planted.script}/{planted.name}: {text.count(old)} times in the script: {old!r}")
        text = text.replace(old, new)
    path = folder / f"{planted.script}.py"
    path.write_text(text, encoding="utf-8")
    return path


_GPT = (
    Planted(
        "gpt",
        "mask_of_minus_1e9",
        (('[:, :, :T, :T] == 0, float("-inf"))', "[:, :, :T, :T] == 0, -1e9)"),),
        ("scalar-out-of-range",),
        ("att = att.masked_fill(self.bias[:, :, :T, :T] == 0, -1e9)",),
        loud=True,
        why="The scores are FP16, and masked_fill refuses a constant that FP16 cannot hold.",
    ),
    Planted(
        "gpt",
        "weights_in_half",
        (("model.to(device)\n", "model.to(device, ptdtype)\n"),),
        ("fp16-params-with-scaler",),
        ("model.to(device, ptdtype)", "scaler.unscale_(optimizer)"),
        loud=True,
        why="The weights are cast to FP16 as a whole, and the scaler refuses to unscale FP16 gradients.",
    ),
    Planted(
        "gpt",
        "left_padding",
        (
            (
                "    y = torch.stack([data[i + 1",
                "    x[::4, :3] = 0  # shorter texts are padded on the left\n    y = torch.stack([data[i + 1",
            ),
            (
                "        att = F.softmax(att, dim=-1)\n",
                '        att = att.masked_fill(pad[:, None, None, :], float("-inf"))\n'
                "        att = F.softmax(att, dim=-1)\n",
            ),
        ),
        ("fully-masked-softmax",),
        ('att = att.masked_fill(pad[:, None, None, :], float("-inf"))', "att = F.softmax(att, dim=-1)"),
        loud=True,
        verdict="not-precision",
        why="The first query of a padded text sees only padding: its softmax has nothing left, in FP32 as well.",
    ),
    Planted(
        "gpt",
        "update_forgotten",
        (("    scaler.step(optimizer)\n    scaler.update()\n", "    scaler.step(optimizer)\n"),),
        ("scaler-misuse",),
        ("scaler.step(optimizer)", "scaler.unscale_(optimizer)"),
        loud=True,
        why="Without scaler.update() the second unscale_ raises.",
    ),
    Planted(
        "gpt",
        "unscale_in_every_micro_step",
        (
            ("        scaler.unscale_(optimizer)\n", ""),
            (
                "        scaler.scale(loss).backward()\n",
                "        scaler.scale(loss).backward()\n        scaler.unscale_(optimizer)\n",
            ),
        ),
        ("scaler-misuse",),
        ("scaler.unscale_(optimizer)",),
        loud=True,
        arguments=("--compile", "--backend", "aot_eager"),
        why="unscale_ belongs behind the last micro-batch; in the second one it raises.",
    ),
)

_GAN = (
    Planted(
        "gan",
        "log_of_one_minus_probability",
        (
            (
                "            errG = criterion(logits, torch.ones_like(logits))\n",
                "            prob_fake = torch.sigmoid(-logits)\n"
                "            errG = -torch.log(1 - prob_fake + 1e-8).mean()\n",
            ),
        ),
        ("eps-underflow", "rounded-onto-singularity"),
        ("errG = -torch.log(1 - prob_fake + 1e-8).mean()", "prob_fake = torch.sigmoid(-logits)"),
        loud=True,
        arguments=("--lr-d", "1e-2", "--r1-gamma", "0"),
        why="The probability of a fake rounds to 1 in FP16 above a logit of 8.3, the guard to 0, and the log is -inf.",
    ),
    Planted(
        "gan",
        "minibatch_deviation_in_half",
        (("        d = x.float() - x.float().mean(0, keepdim=True)\n", "        d = x - x.mean(0, keepdim=True)\n"),),
        ("eps-underflow",),
        ("std = torch.sqrt((d * d).mean(0) + 1e-8)",),
        loud=True,
        why="Where a unit is off in the whole batch its variance is zero, and 1e-8 is zero too in FP16: root of zero.",
    ),
    Planted(
        "gan",
        "penalty_of_scaled_gradients",
        (("        grad_real = grad_real / scaler.get_scale()\n", ""),),
        ("scaled-grad-in-penalty",),
        (
            "(grad_real,) = torch.autograd.grad(scaler.scale(real_logits.float().sum()), real, create_graph=True)",
            "penalty = grad_real.square().sum(dim=(1, 2, 3)).mean()",
        ),
        loud=True,
        why="The R1 penalty squares gradients that still carry the scale of 65536.",
    ),
    Planted(
        "gan",
        "generator_detached",
        (("            logits = netD(fake)\n", "            logits = netD(fake.detach())\n"),),
        ("params-not-trained",),
        ("logits = netD(fake.detach())", "scaler.step(optimizerG)"),
        loud=True,
        verdict="not-precision",
        why="The generator gets no gradient: the scaler finds none to check and raises; FP32 says nothing.",
    ),
)

_VAE = (
    Planted(
        "vae",
        "bce_of_probabilities",
        (
            ("        return self.fc4(h3)\n", "        return torch.sigmoid(self.fc4(h3))\n"),
            ("F.binary_cross_entropy_with_logits(logits, x", "F.binary_cross_entropy(logits, x"),
        ),
        ("rounded-onto-singularity",),
        ('BCE = F.binary_cross_entropy(logits, x, reduction="sum")',),
        loud=True,
        why="Autocast refuses binary_cross_entropy: 16-bit probabilities round onto 0 and 1.",
    ),
    Planted(
        "vae",
        "log_with_guard_of_1e_8",
        (
            ("        return self.fc4(h3)\n", "        return torch.sigmoid(self.fc4(h3))\n"),
            (
                '    BCE = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")\n',
                "    BCE = -torch.sum(x * torch.log(logits + 1e-8) + (1 - x) * torch.log(1 - logits + 1e-8))\n",
            ),
        ),
        ("eps-underflow", "rounded-onto-singularity"),
        ("BCE = -torch.sum(x * torch.log(logits + 1e-8) + (1 - x) * torch.log(1 - logits + 1e-8))",),
        loud=True,
        why="The probability of a bright pixel rounds to 1, the guard of 1e-8 to 0, and 0 * log(0) is NaN.",
    ),
    Planted(
        "vae",
        "empty_scans",
        (
            (
                "    images = torch.maximum(blob, plate)\n",
                "    images = torch.maximum(blob, plate)\n    images[::100] = 0.0  # a few scans are empty\n",
            ),
        ),
        ("bad-input-data",),
        (
            "images = images / images.amax(dim=(1, 2), keepdim=True)",
            "data = data.to(device)",
            "recon_batch, mu, logvar = model(data)",
        ),
        loud=True,
        verdict="not-precision",
        why="An empty picture divided by its maximum is NaN before any model sees it.",
    ),
    Planted(
        "vae",
        "scaler_of_every_epoch",
        (
            (
                "    model.train()\n",
                '    model.train()\n    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")\n',
            ),
        ),
        ("scaler-state-lost",),
        ('scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")',),
        loud=True,
        arguments=("--epochs", "10", "--batch-size", "160"),
        why="A new scaler in every epoch searches its scale again, and skips most of the few steps of the epoch.",
    ),
)

_DIFFUSION = (
    Planted(
        "diffusion",
        "copy_to_model_forgotten",
        (("        self.copy_to_model(self.master_params[0])\n", ""),),
        ("params-not-trained",),
        ("self.opt.step()", "self.opt = torch.optim.AdamW(self.master_params, lr=lr, weight_decay=0.0)"),
        loud=False,
        verdict="not-precision",
        why="The optimizer moves the flat copy, and nothing brings it back into the model, in any precision.",
    ),
    Planted(
        "diffusion",
        "schedule_in_the_models_dtype",
        (
            ("acp = self.alphas_cumprod[t].view(", "acp = self.alphas_cumprod[t].to(model.dtype).view("),
            (
                "        target = noise\n        return ((model(x_t, t) - target) ** 2).mean(dim=(1, 2, 3))\n",
                "        pred = (x_t - acp.sqrt() * model(x_t, t)) / (1 - acp).sqrt()\n"
                "        return ((pred - noise) ** 2).mean(dim=(1, 2, 3))\n",
            ),
        ),
        ("rounded-onto-singularity", "cancellation"),
        (
            "pred = (x_t - acp.sqrt() * model(x_t, t)) / (1 - acp).sqrt()",
            "acp = self.alphas_cumprod[t].to(model.dtype).view(-1, 1, 1, 1)",
        ),
        loud=True,
        arguments=("--precision", "bf16"),
        why="The first entries of the schedule round to 1, and the noise is divided by the root of 1 - 1.",
    ),
    Planted(
        "diffusion",
        "ema_in_the_models_dtype",
        (
            (
                "        self.ema_params = copy.deepcopy(self.master_params)\n",
                "        self.ema_params = [p.detach().to(model.dtype) for p in copy.deepcopy(self.master_params)]\n",
            ),
        ),
        ("accumulator-stagnation",),
        (
            "targ.detach().mul_(self.ema_rate).add_(src.detach(), alpha=1 - self.ema_rate)",
            "self.ema_params = [p.detach().to(model.dtype) for p in copy.deepcopy(self.master_params)]",
        ),
        loud=False,
        arguments=("--precision", "bf16", "--ema_rate", "0.999", "--iterations", "120"),
        why="A 1000th of the difference is less than half a spacing of BF16: the average does not move.",
    ),
    Planted(
        "diffusion",
        "scale_never_lowered",
        (
            ("INITIAL_LOG_LOSS_SCALE = 16.0", "INITIAL_LOG_LOSS_SCALE = 26.0"),
            ("            self.lg_loss_scale -= 1\n", ""),
            ("decreased lg_loss_scale to {self.lg_loss_scale}", "step is skipped"),
        ),
        ("gradient-overflow",),
        ("(loss * loss_scale).backward()",),
        loud=True,
        why="The scale is far too large for FP16 and nothing lowers it: every step is skipped.",
    ),
)

_DETECTOR = (
    Planted(
        "detector",
        "area_in_half",
        (("    dist = dist.float()\n", ""),),
        ("product-overflow",),
        ("area_p = (dist[:, 0] + dist[:, 2]) * (dist[:, 1] + dist[:, 3])",),
        loud=True,
        why="A box of 300 x 300 pixels has an area of 90,000, inf in FP16; the IoU is then zero and teaches nothing.",
    ),
    Planted(
        "detector",
        "raw_sixteen_bit_images",
        ((".float() / 65535\n", ".float()\n"),),
        ("input-out-of-range",),
        (
            "images = torch.stack([image for image, _ in batch]).float()",
            "obj, dist = model(images)",
            "feat = self.backbone(images)",
        ),
        loud=True,
        why="Pixels of 65535 become inf in the cast to FP16; in FP32 the first batch norm hides their size.",
    ),
    Planted(
        "detector",
        "picture_without_match",
        (
            ("inside = (off < 0.4).all(-1)", "inside = (off < 0.12).all(-1)"),
            (
                "                loss_box = iou_loss(dist[positive], where[positive], target[positive]).mean()\n",
                "                cells = zip(dist, where, target, positive)\n"
                "                loss_box = torch.stack(\n"
                "                    [iou_loss(d[p], c[p], t[p]).mean() for d, c, t, p in cells]\n"
                "                ).mean()\n",
            ),
        ),
        ("empty-reduction",),
        ("[iou_loss(d[p], c[p], t[p]).mean() for d, c, t, p in cells]",),
        loud=True,
        verdict="not-precision",
        why="No cell matches in some pictures, and the mean over nothing is NaN in every precision.",
    ),
    Planted(
        "detector",
        "mining_with_minus_1e9",
        (('obj.masked_fill(positive, float("-inf")).flatten()', "obj.masked_fill(positive, -1e9).flatten()"),),
        ("scalar-out-of-range",),
        ("scores = obj.masked_fill(positive, -1e9).flatten()",),
        loud=True,
        why="The objectness is FP16, and masked_fill refuses the constant.",
    ),
)

_SEQ2SEQ = (
    Planted(
        "seq2seq",
        "gradients_not_unscaled",
        (("alpha=-args.lr * clip / loss_scale)", "alpha=-args.lr * clip)"),),
        ("scaler-misuse",),
        ("p.data.add_(p.grad, alpha=-args.lr * clip)",),
        loud=True,
        why="The weights move by gradients that still carry the loss scale of 1024.",
    ),
    Planted(
        "seq2seq",
        "additive_mask_of_minus_1e9",
        (
            (
                "scores.masked_fill(pad, torch.finfo(scores.dtype).min)",
                "scores + pad.to(scores.dtype) * -1e9",
            ),
        ),
        ("scalar-out-of-range",),
        ("scores = scores + pad.to(scores.dtype) * -1e9",),
        loud=True,
        why="-1e9 is -inf in FP16, and an empty line has nothing else in its row: softmax gives NaN.",
    ),
    Planted(
        "seq2seq",
        "empty_line_masked",
        (("torch.finfo(scores.dtype).min)", 'float("-inf"))'),),
        ("fully-masked-softmax",),
        ('scores = scores.masked_fill(pad, float("-inf"))', "weights = F.softmax(scores, dim=-1)"),
        loud=True,
        verdict="not-precision",
        why="The code itself masks every key of an empty line with -inf, in FP32 as well.",
    ),
    Planted(
        "seq2seq",
        "learning_rate_of_100",
        (
            ('"--lr", type=float, default=0.4', '"--lr", type=float, default=100.0'),
            ("    clip = min(1.0, 2.0 / (norm.item() + 1e-6))\n", "    clip = 1.0\n"),
            ("    norm = torch.stack([p.grad.norm() for p in params]).norm() / loss_scale\n", ""),
        ),
        ("optimization-divergence",),
        ("p.data.add_(p.grad, alpha=-args.lr * clip / loss_scale)",),
        loud=True,
        verdict="not-precision",
        why="A learning rate of 100 without clipping diverges in every precision.",
    ),
)

_HF = (
    Planted(
        "hf_trainer",
        "weights_in_half_with_fp16",
        (
            (
                "    model = ReviewClassifier(config)\n",
                "    model = ReviewClassifier(config)\n"
                '    if args.precision == "fp16":\n        model = model.half()\n',
            ),
        ),
        ("fp16-params-with-scaler",),
        ("model = model.half()", "result = trainer.train()"),
        loud=True,
        why="fp16=True brings a scaler, and the weights are FP16 already: it refuses to unscale their gradients.",
    ),
    Planted(
        "hf_trainer",
        "adam_on_half_weights",
        (
            (
                "    model = ReviewClassifier(config)\n",
                "    model = ReviewClassifier(config)\n"
                '    if args.precision == "fp16":\n        model = model.half()\n',
            ),
            ('            fp16=args.precision == "fp16",\n', ""),
        ),
        ("optimizer-state-underflow",),
        ("model = model.half()", "result = trainer.train()"),
        loud=True,
        why="Most second moments of AdamW are zero in FP16: weights jump from 1 to 60 in the first step, later to NaN.",
    ),
    Planted(
        "hf_trainer",
        "empty_reviews",
        (
            ("lengths = torch.randint(8, length + 1", "lengths = torch.randint(0, length + 1"),
            (" / mask.sum(1).clamp(min=1)", " / mask.sum(1)"),
        ),
        ("empty-reduction",),
        ("pooled = (hidden * mask).sum(1) / mask.sum(1)",),
        loud=True,
        verdict="not-precision",
        why="The mean over the words of an empty review is 0 / 0 in every precision.",
    ),
    Planted(
        "hf_trainer",
        "small_updates_of_bf16_weights",
        (
            (
                "    model = ReviewClassifier(config)\n",
                "    model = ReviewClassifier(config)\n"
                '    if args.precision == "bf16":\n        model = model.to(torch.bfloat16)\n',
            ),
        ),
        ("update-lost-to-rounding",),
        ("model = model.to(torch.bfloat16)", "result = trainer.train()"),
        loud=False,
        arguments=("--precision", "bf16", "--learning_rate", "2e-5", "--max_steps", "80"),
        why="Updates of 2e-5 are less than half a spacing of most BF16 weights.",
    ),
)

_ACCELERATE = (
    Planted(
        "accelerate_loop",
        "clip_of_scaled_gradients",
        (("accelerator.clip_grad_norm_(model.", "torch.nn.utils.clip_grad_norm_(model."),),
        ("clip-before-unscale",),
        ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",),
        loud=False,
        why="Only accelerator.clip_grad_norm_ unscales first; torch's clips gradients that carry the scale.",
    ),
    Planted(
        "accelerate_loop",
        "backward_without_accelerator",
        (("accelerator.backward(loss)", "(loss / args.gradient_accumulation_steps).backward()"),),
        ("scaler-misuse",),
        (
            "(loss / args.gradient_accumulation_steps).backward()",
            "accelerator.clip_grad_norm_(model.parameters(), 1.0)",
        ),
        loud=True,
        why="The loss is never scaled, and the scaler has nothing to unscale by: it raises.",
    ),
    Planted(
        "accelerate_loop",
        "entropy_with_guard_of_1e_8",
        (
            (
                "entropy = F.binary_cross_entropy_with_logits(gate_logits, gate.detach())\n",
                "entropy = -(gate * torch.log(gate + 1e-8) + (1 - gate) * torch.log(1 - gate + 1e-8)).mean()\n",
            ),
        ),
        ("eps-underflow", "rounded-onto-singularity"),
        ("entropy = -(gate * torch.log(gate + 1e-8) + (1 - gate) * torch.log(1 - gate + 1e-8)).mean()",),
        loud=True,
        why="A sharp gate is exactly 0 or 1 in FP16, and so is the guard of 1e-8: 0 * log(0) is NaN.",
    ),
    Planted(
        "accelerate_loop",
        "missing_values",
        (
            (
                "    return DataLoader(TensorDataset(x, y)",
                '    x[::211, 3] = float("nan")  # not measured\n    return DataLoader(TensorDataset(x, y)',
            ),
        ),
        ("bad-input-data",),
        (
            'x[::211, 3] = float("nan")  # not measured',
            "for x, y in train_dataloader:",
            "logits, entropy = model(x)",
        ),
        loud=True,
        verdict="not-precision",
        why="Missing values come as NaN and nobody fills them.",
    ),
)

_LIGHTNING = (
    Planted(
        "lightning_fit",
        "clip_after_backward",
        (
            ("        gradient_clip_val=1.0,\n", ""),
            (
                "    def configure_optimizers(self):\n",
                "    def on_after_backward(self):\n"
                "        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)\n\n"
                "    def configure_optimizers(self):\n",
            ),
        ),
        ("clip-before-unscale",),
        ("torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)",),
        loud=False,
        why="on_after_backward runs before Lightning unscales, so the norm that is clipped carries the scale.",
    ),
    Planted(
        "lightning_fit",
        "raw_features",
        (("        x = (x - self.mean) / self.std\n", ""),),
        ("input-out-of-range",),
        (
            "y_hat = self(x)",
            "return self.head(self.backbone(x))",
            "x = torch.stack([area, rooms, age, income, kind], 1)",
        ),
        loud=True,
        why="Incomes above 65504 are inf as soon as the batch is cast to FP16; in FP32 the batch norm takes them.",
    ),
    Planted(
        "lightning_fit",
        "learning_rate_of_5",
        (
            ("        gradient_clip_val=1.0,\n", ""),
            ('"--lr", type=float, default=0.02', '"--lr", type=float, default=5.0'),
        ),
        ("optimization-divergence",),
        ("return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)", "loss = F.mse_loss(y_hat, y)"),
        loud=True,
        verdict="not-precision",
        why="SGD at a learning rate of 5 without clipping diverges in every precision.",
    ),
    Planted(
        "lightning_fit",
        "manual_backward_of_torch",
        (
            ("        gradient_clip_val=1.0,\n", ""),
            ("        self.losses = []\n", "        self.losses = []\n        self.automatic_optimization = False\n"),
            (
                '        self.log("train_loss", loss)\n',
                "        opt = self.optimizers()\n        opt.zero_grad()\n"
                "        loss.backward()\n        opt.step()\n"
                '        self.log("train_loss", loss)\n',
            ),
        ),
        ("scaler-misuse",),
        ("loss.backward()", "opt.step()"),
        loud=True,
        why="self.manual_backward would have scaled the loss; without it the scaler has no scale and raises.",
    ),
)

_DDP = (
    Planted(
        "ddp",
        "step_beside_the_scaler",
        (
            (
                "            scaler.unscale_(optimizer)\n"
                "            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)\n"
                "            scaler.step(optimizer)\n"
                "            scaler.update()\n",
                "            optimizer.step()\n",
            ),
        ),
        ("scaler-misuse",),
        ("optimizer.step()",),
        loud=True,
        why="SGD steps with gradients that are multiplied by 65536.",
    ),
    Planted(
        "ddp",
        "unused_head",
        (
            (
                "        self.fc2 = nn.Linear(64, classes)\n",
                "        self.fc2 = nn.Linear(64, classes)\n        self.aux = nn.Linear(64, classes)\n",
            ),
        ),
        ("params-not-trained",),
        (
            "self.aux = nn.Linear(64, classes)",
            "output = model(images)",
            'model = DDP(net, device_ids=[device] if device_type == "cuda" else None)',
        ),
        loud=True,
        verdict="not-precision",
        why="DDP waits for gradients of a head that the loss does not use, and raises in the second step.",
    ),
    Planted(
        "ddp",
        "clip_before_unscale",
        (("            scaler.unscale_(optimizer)\n", ""),),
        ("clip-before-unscale",),
        ("torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)",),
        loud=False,
        why="The norm that is clipped to 1 carries the scale of 65536.",
    ),
    Planted(
        "ddp",
        "blank_pictures",
        (
            (
                "    def __len__(self):\n",
                "        self.images[::80] = 0  # the shutter was closed\n\n    def __len__(self):\n",
            ),
        ),
        ("bad-input-data",),
        (
            "image = (image - image.mean()) / image.std()",
            "images, target = images.to(device), target.to(device)",
            "output = model(images)",
        ),
        loud=True,
        verdict="not-precision",
        why="A blank picture has deviation 0, and its normalised pixels are NaN.",
    ),
)

_RL = (
    Planted(
        "rl",
        "squashed_action_in_half",
        (
            (
                "raw = mean.float() + std * torch.randn_like(mean, dtype=torch.float32)",
                "raw = (mean + std * torch.randn_like(mean)).to(mean.dtype)",
            ),
            (
                "    squash = 2 * (math.log(2) - raw - F.softplus(-2 * raw))\n",
                "    action = torch.tanh(raw)\n    squash = torch.log(1 - action * action + 1e-8)\n",
            ),
        ),
        ("eps-underflow", "rounded-onto-singularity"),
        ("squash = torch.log(1 - action * action + 1e-8)",),
        loud=True,
        why="tanh of 4.5 is 1 in FP16 and 1e-8 is 0: the log of the density is -inf.",
    ),
    Planted(
        "rl",
        "squared_returns_in_half",
        (
            ("    returns = advantages + values\n", "    returns = (advantages + values).to(mean.dtype)\n"),
            ("args.horizon, 0.97, 0.95)", "args.horizon, 0.99, 1.0)"),
            (
                "                    v_loss = F.mse_loss(agent.value(obs[idx]), returns[idx] / 100)\n",
                "                    err = agent.value(obs[idx]) * 100 - returns[idx]\n"
                "                    v_loss = (err * err).mean() / 10000\n",
            ),
        ),
        ("product-overflow",),
        ("v_loss = (err * err).mean() / 10000",),
        loud=True,
        why="Returns of -300 are ordinary for a pendulum; their square is inf in FP16.",
    ),
    Planted(
        "rl",
        "batch_statistics_of_one",
        (
            (
                "        return torch.stack([self.theta.cos(), self.theta.sin(), self.omega / 8], -1)\n",
                "        obs = torch.stack([self.theta.cos(), self.theta.sin(), self.omega / 8], -1)\n"
                "        return (obs - obs.mean(0)) / (obs.std(0) + 1e-6)\n",
            ),
        ),
        ("empty-reduction",),
        ("return (obs - obs.mean(0)) / (obs.std(0) + 1e-6)",),
        loud=True,
        verdict="not-precision",
        arguments=("--num-envs", "1"),
        why="The standard deviation over one environment is NaN in every precision.",
    ),
    Planted(
        "rl",
        "clip_before_unscale",
        (("                scaler.unscale_(optimizer)\n", ""),),
        ("clip-before-unscale",),
        ("nn.utils.clip_grad_norm_(agent.parameters(), 0.5)",),
        loud=False,
        why="What is left after unscaling is far below the eps of 1e-5 that PPO gives to Adam.",
    ),
)

_GNN = (
    Planted(
        "gnn",
        "half_messages_into_fp32",
        (
            ("msg = self.lin_neigh(h)[src].float()", "msg = self.lin_neigh(h)[src]"),
            ("msg.size(1), dtype=msg.dtype, device=h.device)", "msg.size(1), device=h.device)"),
        ),
        ("dtype-mismatch",),
        ("agg.index_add_(0, dst, msg)",),
        loud=True,
        why="index_add_ wants one dtype: the buffer is FP32, the messages are FP16.",
    ),
    Planted(
        "gnn",
        "isolated_nodes",
        (("agg / deg.clamp(min=1).unsqueeze(1)", "agg / deg.unsqueeze(1)"),),
        ("empty-reduction",),
        ("agg = agg / deg.unsqueeze(1)",),
        loud=True,
        verdict="not-precision",
        why="Papers that nobody cites have no neighbours, and the mean over none is 0 / 0.",
    ),
    Planted(
        "gnn",
        "mean_with_guard_of_1e_8",
        (
            ("msg = self.lin_neigh(h)[src].float()", "msg = self.lin_neigh(h)[src]"),
            ("agg / deg.clamp(min=1).unsqueeze(1)", "agg / (deg.unsqueeze(1) + 1e-8)"),
        ),
        ("eps-underflow",),
        ("agg = agg / (deg.unsqueeze(1) + 1e-8)",),
        loud=True,
        why="Degrees are counted in FP16, where 1e-8 is zero: 0 / 0 for papers that nobody cites.",
    ),
    Planted(
        "gnn",
        "distance_of_self_loops",
        (
            (
                "        score = ((self.q(h)[dst] * self.k(h)[src]).sum(-1) * self.scale).float()\n",
                "        q = self.q(h).float()\n        score = -torch.sqrt(((q[dst] - q[src]) ** 2).sum(-1))\n",
            ),
        ),
        ("singular-gradient",),
        ("score = -torch.sqrt(((q[dst] - q[src]) ** 2).sum(-1))",),
        loud=True,
        verdict="not-precision",
        why="A paper that cites itself is at distance zero, where the root has no finite derivative.",
    ),
)

_FP16_OPTIMIZER = (
    Planted(
        "fp16_optimizer",
        "gradients_not_unscaled",
        (("            p32.grad.div_(self.scaler.loss_scale)\n", ""),),
        ("scaler-misuse",),
        ("p32.grad = p.grad.float()", "self.optimizer.step()"),
        loud=True,
        arguments=("--clip-norm", "1e9", "--lr", "0.1"),
        why="The FP32 copies take over gradients that still carry the loss scale of 32768.",
    ),
    Planted(
        "fp16_optimizer",
        "copy_back_forgotten",
        (
            (
                "        for p32, p in zip(self.fp32_params, self.fp16_params, strict=True):\n"
                "            p.data.copy_(p32.data)\n",
                "",
            ),
        ),
        ("params-not-trained",),
        ("self.optimizer.step()", "self.optimizer = optimizer_cls(self.fp32_params, **kwargs)"),
        loud=False,
        verdict="not-precision",
        why="The FP32 copies are trained, and the model never sees them, in any precision.",
    ),
    Planted(
        "fp16_optimizer",
        "norm_with_eps_of_1e_8",
        (("eps=1e-5):", "eps=1e-8):"),),
        ("eps-underflow",),
        ("return x * torch.rsqrt(ms + self.eps) * self.weight",),
        loud=True,
        why="Padding is a row of zeros; 1e-8 is zero in FP16, and 0 * rsqrt(0) is NaN.",
    ),
    Planted(
        "fp16_optimizer",
        "fixed_scale",
        (
            ("init_scale=2.0**15,", "init_scale=2.0**28,"),
            ("            self.loss_scale /= self.scale_factor\n", ""),
        ),
        ("gradient-overflow",),
        ("(loss * self.scaler.loss_scale).backward()",),
        loud=True,
        why="A scale of 2^28 overflows in every step and is never lowered.",
    ),
    Planted(
        "fp16_optimizer",
        "log_of_softmax",
        (
            (
                "    lprobs = F.log_softmax(logits.float(), dim=-1)\n",
                "    lprobs = torch.log(F.softmax(logits, dim=-1))\n",
            ),
            ("        return self.out(pooled)\n", "        return self.out(pooled) * 10\n"),
        ),
        ("rounded-onto-singularity",),
        ("lprobs = torch.log(F.softmax(logits, dim=-1))",),
        loud=True,
        why="Probabilities below 2.98e-8 are zero in FP16, and the smoothing takes the log of all of them.",
    ),
)

_VICREG = (
    Planted(
        "vicreg",
        "mask_of_minus_9e15",
        (('sim.masked_fill(self_mask, float("-inf"))', "sim.masked_fill(self_mask, -9e15)"),),
        ("scalar-out-of-range",),
        ("sim = sim.masked_fill(self_mask, -9e15)",),
        loud=True,
        why="The similarities come from a product in FP16, and masked_fill refuses the constant.",
    ),
    Planted(
        "vicreg",
        "log_determinant_in_half",
        (
            (
                "        loss = loss + off_diagonal(cov).pow(2).sum() / z.size(1)\n",
                "        eye = torch.eye(z.size(1), dtype=cov.dtype, device=z.device)\n"
                "        loss = loss - 0.1 * torch.logdet(eye + cov)\n",
            ),
        ),
        ("unsupported-half-op",),
        ("loss = loss - 0.1 * torch.logdet(eye + cov)",),
        loud=True,
        why="The covariance comes from a product in FP16, and there is no determinant of 16-bit matrices.",
    ),
    Planted(
        "vicreg",
        "blank_pictures",
        (
            ("        view = view + 0.1 * torch.randn_like(view)\n", ""),
            (
                "    return low + 0.2 * torch.randn(n, 1, 16, 16)\n",
                "    pictures = low + 0.2 * torch.randn(n, 1, 16, 16)\n"
                "    pictures[::40] = 0  # lens cap\n    return pictures\n",
            ),
        ),
        ("bad-input-data",),
        ("view = view / view.std(dim=(1, 2, 3), keepdim=True)", "za, zb = model(xa), model(xb)"),
        loud=True,
        verdict="not-precision",
        why="A blank picture has deviation 0, and its normalised pixels are NaN.",
    ),
    Planted(
        "vicreg",
        "schedule_runs_ahead",
        (
            (
                '    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")\n',
                '    scaler = torch.amp.GradScaler(device, init_scale=2.0**28, enabled=args.precision == "fp16")\n'
                "    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=20)\n",
            ),
            ("        scaler.update()\n", "        scaler.update()\n        scheduler.step()\n"),
        ),
        ("scheduler-vs-skipped-step",),
        ("scheduler.step()",),
        loud=True,
        why="Most of the schedule's 20 steps are skipped while the scale is sought; then the learning rate is zero.",
    ),
)

_SIREN = (
    Planted(
        "siren",
        "index_in_bf16",
        (("        position = index.float()\n", "        position = index.to(dtype)\n"),),
        ("integer-not-exact",),
        ("position = index.to(dtype)",),
        loud=False,
        arguments=("--precision", "bf16"),
        why="Near 4096 BF16 holds every 16th integer only: neighbouring samples share one position.",
    ),
    Planted(
        "siren",
        "no_scaler",
        (('enabled=args.precision == "fp16")\nautocast', "enabled=False)\nautocast"),),
        ("gradient-underflow",),
        ("scaler.scale(loss).backward()", "scaler = torch.amp.GradScaler(device, enabled=False)"),
        loud=False,
        why="The signal is quiet and the mean is over many samples: gradients below 3e-8 are zero in FP16.",
    ),
    Planted(
        "siren",
        "loss_clamped_for_the_log",
        (
            (
                "        loss = F.mse_loss(pred, signal[index])\n",
                "        loss = F.mse_loss(pred, signal[index]).clamp(min=1e-6)  # log10 of it is printed\n",
            ),
        ),
        ("clamp-kills-gradient",),
        ("loss = F.mse_loss(pred, signal[index]).clamp(min=1e-6)  # log10 of it is printed",),
        loud=False,
        verdict="not-precision",
        why="The loss of so quiet a signal is below 1e-6 from the start, and a clamped loss has no gradient.",
    ),
)

_BY_HAND = (
    Planted(
        "by_hand",
        "root_of_squared_distances",
        (
            (
                "torch.linalg.vector_norm(diff.float(), dim=-1)",
                "torch.sqrt((diff.float() ** 2).sum(-1))",
            ),
        ),
        ("singular-gradient",),
        ("return torch.sqrt((diff.float() ** 2).sum(-1))",),
        loud=True,
        verdict="not-precision",
        why="Every point is at distance zero from itself, where the root has no finite derivative.",
    ),
    Planted(
        "by_hand",
        "distance_with_guard_of_1e_8",
        (
            (
                "torch.linalg.vector_norm(diff.float(), dim=-1)",
                "torch.sqrt((diff * diff).mean(-1) + 1e-8)",
            ),
        ),
        ("eps-underflow",),
        ("return torch.sqrt((diff * diff).mean(-1) + 1e-8)",),
        loud=True,
        why="On the diagonal the mean is zero, and in FP16 the guard is as well: no finite derivative.",
    ),
    Planted(
        "by_hand",
        "gradients_not_unscaled",
        (("m.mul_(0.9).add_(p.grad / scale)", "m.mul_(0.9).add_(p.grad)"),),
        ("scaler-misuse",),
        ("m.mul_(0.9).add_(p.grad)", "p -= args.lr * m"),
        loud=True,
        why="The weights move by gradients that still carry the scale of 512.",
    ),
    Planted(
        "by_hand",
        "weights_in_bf16",
        (("    p.requires_grad_()\n", "    p.data = p.data.to(dtype)\n    p.requires_grad_()\n"),),
        ("update-lost-to-rounding",),
        ("p -= args.lr * m", "p.data = p.data.to(dtype)"),
        loud=False,
        arguments=("--precision", "bf16", "--lr", "2e-4", "--epochs", "80"),
        why="Most updates are less than half a spacing of BF16 and round to nothing.",
    ),
    Planted(
        "by_hand",
        "learning_rate_of_20",
        (('"--lr", type=float, default=0.05', '"--lr", type=float, default=20.0'),),
        ("optimization-divergence",),
        ("p -= args.lr * m",),
        loud=True,
        verdict="not-precision",
        why="A learning rate of 20 diverges in every precision.",
    ),
)

PLANTED: tuple[Planted, ...] = (
    *_GPT,
    *_GAN,
    *_VAE,
    *_DIFFUSION,
    *_DETECTOR,
    *_SEQ2SEQ,
    *_HF,
    *_ACCELERATE,
    *_LIGHTNING,
    *_DDP,
    *_RL,
    *_GNN,
    *_FP16_OPTIMIZER,
    *_VICREG,
    *_SIREN,
    *_BY_HAND,
)
SCRIPTS: tuple[str, ...] = tuple(dict.fromkeys(planted.script for planted in PLANTED))

# First and last loss that each healthy script prints in FP32, FP16 and BF16 (torch 2.13, CPU, HalfOnCPU and
# cuda_autocast_lists on). The GAN's is that of its discriminator, the last of diffusion that of its averaged weights,
# that of rl the value loss.
HEALTHY: dict[str, tuple[tuple[float, float], ...]] = {
    "gpt": ((3.4369, 1.1049), (3.4368, 1.1050), (3.4364, 1.1048)),
    "gan": ((1.38, 0.1922), (1.38, 0.2031), (1.38, 0.1817)),
    "vae": ((279.88, 66.56), (279.88, 67.33), (279.88, 66.59)),
    "diffusion": ((1.0200, 0.1439), (1.0200, 0.1439), (1.0195, 0.1439)),
    "detector": ((1.4501, 0.3785), (1.4499, 0.3782), (1.4499, 0.3646)),
    "seq2seq": ((1.8648, 0.4215), (1.8649, 0.3914), (1.8649, 0.4042)),
    "hf_trainer": ((0.8082, 0.0243), (0.8082, 0.0243), (0.8080, 0.0243)),
    "accelerate_loop": ((2.3484, 0.0202), (2.3484, 0.0202), (2.3488, 0.0195)),
    "lightning_fit": ((0.8484, 0.1109), (0.8585, 0.1274), (0.8482, 0.1103)),
    "ddp": ((2.0910, 0.4492), (2.0911, 0.4456), (2.0903, 0.4470)),
    "rl": ((0.1845, 0.0259), (0.2402, 0.0282), (0.1843, 0.0279)),
    "gnn": ((1.6313, 0.0122), (1.6313, 0.0121), (1.6305, 0.0120)),
    "fp16_optimizer": ((2.5724, 0.8432), (2.5724, 0.8426), (2.5721, 0.8478)),
    "vicreg": ((50.67, 35.10), (50.68, 33.76), (50.72, 35.14)),
    "siren": ((2.5995e-07, 7.3288e-09), (2.5980e-07, 7.3299e-09), (2.5977e-07, 7.3245e-09)),
    "by_hand": ((2.2035, 0.1996), (2.2034, 0.1995), (2.2023, 0.1986)),
}
