"""`python -m floatline.systems.audio_lora --config paper_r64 --gpus 0`: fine-tune with transformers' Trainer."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from floatline.errors import FloatlineError, TargetError, suggest
from floatline.systems.audio_lora.config import VARIANTS, Config
from floatline.workload.config import merge, parse_pairs


def main() -> None:
    """Read the command line, train, and print what came out."""
    parser = argparse.ArgumentParser(prog="python -m floatline.systems.audio_lora", description=__doc__)
    parser.add_argument("--config", default="fp32_adapters", help=f"Settings by their name: {', '.join(VARIANTS)}.")
    parser.add_argument("--epochs", type=float, default=1.0, help="Passes over the examples.")
    parser.add_argument("--max-steps", type=int, default=-1, help="Ends the run after so many steps; -1 does not.")
    parser.add_argument("--batch-size", type=int, help="Utterances in a batch.")
    parser.add_argument("--gradient-accumulation", type=int, help="Batches for each update.")
    parser.add_argument("--gpus", type=int, metavar="N", help="The GPU to train on; without it, the first.")
    parser.add_argument("--save-steps", type=int, default=0, help="Steps between checkpoints; 0: one after each epoch.")
    parser.add_argument("--resume", action="store_true", help="Go on from the last checkpoint in the folder.")
    parser.add_argument("--seed", type=int, default=0, help="Seed for the adapters, the noise and the order.")
    parser.add_argument(
        "--output", default="floatline-runs/audio_lora_hf", help="Folder for adapters, base and ledger."
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="Any other setting of the workload.")
    given = parser.parse_intermixed_args()  # settings may stand between options
    try:
        config = _read(given)
        _choose_gpu(given.gpus)
        from floatline.systems.audio_lora.hf import train

        found = train(
            config,
            given.output,
            epochs=given.epochs,
            max_steps=given.max_steps,
            seed=given.seed,
            save_steps=given.save_steps,
            resume=given.resume,
        )
    except FloatlineError as error:
        sys.stderr.write(f"floatline: {error}\n")
        raise SystemExit(2) from None
    what = "voices" if config.audio is None else "recordings"
    said = f"accuracy {found['eval_accuracy']:.4f} on {what} that were held out; adapters in {given.output}"
    sys.stdout.write(f"{found['summary']}\n{said}\n")


def _choose_gpu(number: int | None) -> None:
    """Show the Trainer one GPU: with several it would train on all of them at once."""
    import torch

    have = torch.cuda.device_count()
    if number is None and have < 2:
        return
    if have == 0:
        sys.stderr.write(f"floatline: there is no GPU {number} here; it trains on the CPU.\n")
        return
    if not 0 <= (number or 0) < have:
        raise TargetError(f"--gpus is {number}, and there are GPUs 0 to {have - 1}. Name one of them.")
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    chosen = number or 0
    os.environ["CUDA_VISIBLE_DEVICES"] = shown[chosen] if len(shown) == have else str(chosen)


def _read(given: argparse.Namespace) -> Config:
    if given.config not in VARIANTS:
        raise TargetError(f"Config '{given.config}' is not known. {suggest(given.config, VARIANTS)}")
    own = {"batch_size": given.batch_size, "accumulate": given.gradient_accumulation}
    asked: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    return Config(**merge(VARIANTS[given.config], asked, parse_pairs(given.settings)))


if __name__ == "__main__":
    main()
