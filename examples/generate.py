"""A script that generates and trains nothing: `floatline diagnose --forward -- examples/generate.py` looks into it."""

import torch
from born_in_bf16 import forward


@torch.inference_mode()
def main() -> None:
    """Continue some prompts, always with the likeliest token."""
    torch.manual_seed(0)
    model, tokens = forward()
    for _ in range(6):
        logits = model(tokens)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    print("generated", tokens[0, -6:].tolist())


main()
