"""Makes the pictures of the documentation from real figures: docs/pictures/*.svg."""

import sys
from pathlib import Path

import torch

import floatline as fl

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import how_low  # noqa: E402
import small_gpt  # noqa: E402


def main() -> None:
    """The floatline chart of a small GPT's gradients, untrained, with and without loss scaling."""
    folder = ROOT / "docs" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model, batches, loss_fn, _, _ = small_gpt.build()
    exact = how_low.gradients(model, batches[0], loss_fn, fp16=False, scale=1.0)
    for name, scale in (("gradients", 1.0), ("gradients_scaled", 2.0**16)):
        measured = how_low.total([gradient * scale for gradient in exact])
        title = f"a small GPT's gradients against FP16, loss scale {scale:,.0f}"
        (folder / f"{name}.svg").write_text(fl.draw_ranges(measured, "fp16", title=title).svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
