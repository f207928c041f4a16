"""Make the audio_lora workload's base: `python tools/audio_base.py`, some minutes.

A Qwen2-Audio of the workload's default sizes learns to spell words that are none of the workload's, from the voices
that are trained with there. It is kept in FP16. One thread and one seed make it the same each time on the same machine.
"""

from __future__ import annotations

import argparse

import torch
from safetensors.torch import save_file

from floatline.systems.audio_lora.batches import AudioCollator, as_pair, draw_batches, make_examples
from floatline.systems.audio_lora.config import Config
from floatline.systems.audio_lora.model import BASE_WEIGHTS, Answerer, accuracy, answer_loss, make_model
from floatline.systems.audio_lora.speech import BASE_WORDS, HELD_OUT_VOICES, TRAIN_VOICES, WORDS, draw_utterances
from floatline.systems.audio_lora.tokens import spell

STEPS, BATCH, LR, DECAY = 800, 32, 3e-3, 0.05


def train(steps: int) -> torch.nn.Module:
    """The base. Held-out voices are looked at, and decide nothing."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Config()
    model = Answerer(make_model(config))
    collate = AudioCollator(spell(), positions=config.audio_positions)
    heard = draw_utterances(BASE_WORDS, TRAIN_VOICES, takes=1, seed="base")
    held = draw_utterances(BASE_WORDS, HELD_OUT_VOICES, takes=1, seed="base, held out")
    test = make_examples(held, bins=config.mel_bins, seed=None, noise_db=0)
    tests = [as_pair(collate(test[i : i + 64])) for i in range(0, len(test), 64)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps)
    batches, step = [], 0
    while step < steps:
        if not batches:  # two passes with noise of their own
            examples = make_examples(heard, bins=config.mel_bins, seed=step, noise_db=25)
            batches = draw_batches(examples, collate, size=BATCH, count=2 * len(examples) // BATCH, seed=step)
        inputs, (labels,) = batches.pop()
        loss = answer_loss(model.train()(*inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        step += 1
        if step % 200 == 0:
            found = accuracy(model.eval(), tests)
            print(f"step {step}: loss {loss.item():.3f}, accuracy on held-out voices {found:.3f}", flush=True)
    return model.network


def main() -> None:
    """Write the base beside the workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    if set(WORDS) & set(BASE_WORDS):
        raise SystemExit("The base must not have heard the words of the workload.")
    save_file({k: v.half().contiguous() for k, v in train(arguments.steps).state_dict().items()}, BASE_WEIGHTS)
    print(f"{BASE_WEIGHTS}: {BASE_WEIGHTS.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
