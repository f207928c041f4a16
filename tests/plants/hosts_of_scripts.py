"""Marks for the healthy scripts of tests/scripts, which makes them hosts, and a last line with their results."""

from __future__ import annotations

from tests.plants.planting import FOLDER
from tests.scripts.planted import FOLDER as SCRIPTS

DTYPES = '{"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.precision]'
AMP_DTYPE = 'amp_dtype = torch.bfloat16 if args.precision == "bf16" else torch.float16\n'
STEP = "scaler.scale(loss).backward()\n{0}scaler.step(optimizer)\n{0}scaler.update()\n"
UPDATE = "# site: update loss=loss opt=optimizer model=model\n{0}" + STEP + "{0}# end\n"


# The suppression of another host, at the end of the detector.
_SUPPRESS = (FOLDER / "detect.py").read_text(encoding="utf-8").partition("def suppress(")[2].partition("def main(")[0]
SUPPRESS = "def suppress(" + _SUPPRESS.replace("SIDE", "PIXELS")
SUPPRESSED = """\
    kept = 0
    model.eval()
    with torch.no_grad():
        for images, _ in loader:
            with torch.autocast(**amp, enabled=args.precision != "fp32"):
                obj, dist = model(images.to(device))
            for score, sides in zip(obj.float(), dist.float(), strict=True):
                corners = torch.cat([centers - sides[:, :2], centers + sides[:, 2:]], -1)
                # site: boxes boxes=corners
                best = score.topk(12).indices
                kept += len(suppress(corners[best], score[best], best % 3))
    # site: final model=model
    print(f"kept {kept / 160:.3f} final loss {loss.item():.4f}")
"""

EDITS: dict[str, tuple[tuple[str, str], ...]] = {
    "gnn": (
        ("\n\ndef make_graph", "\n# site: helpers\n\n\ndef make_graph"),
        (AMP_DTYPE, f"dtype = {DTYPES}\n    amp_dtype = dtype\n"),
        (
            '"fp16")\n\n    for epoch',
            '"fp16")\n    # site: data x=x\n    # site: setup model=model opt=optimizer\n\n    for epoch',
        ),
        (
            "        scaler.scale(loss)",
            "        # site: aux x=out loss=loss target=y\n"
            "        # site: update loss=loss opt=optimizer model=model\n        scaler.scale(loss)",
        ),
        (
            "scaler.update()\n",
            "scaler.update()\n        # end\n        # site: step model=model loss=loss step=epoch\n",
        ),
        (
            '\n\nif __name__ == "__main__"',
            "    with torch.no_grad(), torch.autocast(device_type=device, dtype=dtype, enabled=args.precision"
            ' != "fp32"):\n        out = model(x, src, dst)\n    # site: eval x=out target=y\n'
            "    # site: final model=model\n"
            '    print(f"final loss {loss.item():.4f} accuracy {acc:.4f}")\n\n\nif __name__ == "__main__"',
        ),
    ),
    "siren": (
        ("import torch.nn.functional as F\n", "import torch.nn.functional as F\n\n# site: helpers\n"),
        (
            "        position = index.float()\n",
            "        # site: index i=index n=self.n\n        position = index.float()\n",
        ),
        (
            "        return torch.cat([phase.sin(), phase.cos()], -1)\n",
            "        freqs = 2 * math.pi * self.freqs / self.n\n        # site: angle out=phase t=index freqs=freqs\n"
            "        return torch.cat([phase.sin(), phase.cos()], -1)\n",
        ),
        ("\nfor step in", "# site: setup model=model opt=optimizer\n\nfor step in"),
        (
            "    " + STEP.format("    "),
            "    # site: aux x=pred[:,None] loss=loss\n    "
            + UPDATE.format("    ")
            + "    # site: step model=model loss=loss step=step\n",
        ),
        (
            ' dB")\n',
            ' dB")\n# site: final model=model\nprint(f"final loss {loss.item():.4e} snr {snr:.2f}")\n',
        ),
    ),
    "vicreg": (
        ("\n\ndef random_views", "\n# site: helpers\n\n\ndef random_views"),
        ("    pictures = make_pictures(256)", f"    dtype = {DTYPES}\n    pictures = make_pictures(256)"),
        (
            "    for step in",
            "    # site: data x=pictures\n    # site: setup model=model opt=optimizer\n    for step in",
        ),
        (
            "nt_xent(za, zb)\n        optimizer",
            "nt_xent(za, zb)\n            # site: inner x=za loss=loss\n        # site: aux x=za loss=loss\n        optimizer",
        ),
        (
            "        " + STEP.format("        "),
            "        " + UPDATE.format("        ") + "        # site: step model=model loss=loss step=step\n",
        ),
        (
            '\n\nif __name__ == "__main__"',
            '    # site: final model=model\n    print(f"final loss {loss.item():.4f}")\n\n\nif __name__ == "__main__"',
        ),
    ),
    "gpt": (
        ("from torch.nn import functional as F\n", "from torch.nn import functional as F\n\n# site: helpers\n"),
        ("ptdtype = {", "dtype = ptdtype = {"),
        (
            "        att = att.masked_fill(",
            "        hidden = self.bias[:, :, :T, :T] == 0\n"
            "        # site: attention scores=att mask=hidden q=q k=k\n        att = att.masked_fill(",
        ),
        (
            "\nX, Y = get_batch()\nt0",
            "# site: setup model=model opt=optimizer\n\nX, Y = get_batch()\nt0",
        ),
        (
            "    optimizer.zero_grad(set_to_none=True)\n",
            "    # site: step model=model loss=loss step=iter_num\n    optimizer.zero_grad(set_to_none=True)\n",
        ),
        (
            ':.0f}ms")\n',
            ':.0f}ms")\n# site: final model=model\nprint(f"final loss {lossf:.4f}")\n',
        ),
    ),
    "vae": (
        ("\nparser = ", "\n# site: helpers\n\nparser = "),
        (AMP_DTYPE, f"dtype = amp_dtype = {DTYPES}\n"),
        (
            "        scaler.scale(loss)",
            "        # site: aux x=recon_batch loss=loss goal=data.flatten(1)\n        scaler.scale(loss)",
        ),
        (
            "\n\n# Reconstruction",
            "\n# site: setup model=model opt=optimizer\n\n\n# Reconstruction",
        ),
    ),
    "detector": (
        ("\nIMAGE, GRID", "\n# site: helpers\n\nIMAGE, GRID"),
        ("    amp = dict(", f"    dtype = {DTYPES}\n    amp = dict("),
        ("        obj = self.cls(feat)", "        # site: features x=feat\n        obj = self.cls(feat)"),
        (
            "\n    for epoch in",
            "    # site: setup model=model opt=optimizer\n    step = 0\n\n    for epoch in",
        ),
        (
            "                loss = loss_cls + loss_box\n",
            "                loss = loss_cls + loss_box\n            # site: aux x=obj loss=loss\n",
        ),
        (
            "            scaler.scale(loss)",
            "            # site: update loss=loss opt=optimizer model=model\n            scaler.scale(loss)",
        ),
        (
            "scaler.update()\n",
            "scaler.update()\n            # end\n            # site: step model=model loss=loss step=step\n"
            "            step += 1\n",
        ),
        ("def main():", SUPPRESS + "def main():"),
        ("        k = min(int(", "        # site: choose x=scores\n        k = min(int("),
        ('\n\nif __name__ == "__main__"', SUPPRESSED + '\n\nif __name__ == "__main__"'),
    ),
    "by_hand": (
        ("\nparser = ", "\n# site: helpers\n\nparser = "),
        ("points, labels = points.to", "# site: data x=points\npoints, labels = points.to"),
        (
            "    (loss * scale).backward()\n",
            "    # site: aux x=logits loss=loss target=y\n    (loss * scale).backward()\n",
        ),
    ),
    "diffusion": (
        ("\nINITIAL_LOG", "\n# site: helpers\n\nINITIAL_LOG"),
        (
            "    loop = TrainLoop(",
            f"    dtype = {DTYPES}\n    betas = torch.linspace(2e-4, 0.04, diffusion.steps, device=device)\n"
            "    # site: schedule betas=betas share=diffusion.alphas_cumprod\n    loop = TrainLoop(",
        ),
        ("        emb = self.time_embed", "        # site: index i=timesteps n=500\n        emb = self.time_embed"),
        ("        return self.out(F.silu(h))", "        # site: features x=h\n        return self.out(F.silu(h))"),
    ),
    "fp16_optimizer": (
        ("        return self.out(pooled)\n", "        # site: features x=pooled\n        return self.out(pooled)\n"),
    ),
    "rl": (
        (
            "                optimizer.zero_grad()\n",
            "                # site: aux x=mean loss=loss\n                optimizer.zero_grad()\n",
        ),
        ("\n\nclass PendulumEnv", "\n# site: helpers\n\n\nclass PendulumEnv"),
        (
            "                scaler.scale(loss)",
            "                # site: update loss=loss opt=optimizer model=agent\n                scaler.scale(loss)",
        ),
        ("                scaler.update()\n", "                scaler.update()\n                # end\n"),
        (AMP_DTYPE, f"dtype = amp_dtype = {DTYPES}\n"),
    ),
}


def read_hosts() -> dict[str, str]:
    """Texts of all hosts, by name, with their marks."""
    hosts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.py"))}
    for name, edits in EDITS.items():
        text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
        for old, new in edits:
            if text.count(old) != 1:
                raise ValueError(f"{name}: {text.count(old)} times in the script: {old!r}")
            text = text.replace(old, new)
        hosts[f"script_{name}"] = text
    return hosts
