"""Make the distill workload's tokenizers and teacher from its text: `python tools/distill_teacher.py`, some minutes.

The teacher is a GPT-2 with an exit after every layer: its head reads each of them, and all are trained. It is kept in
FP16. One thread and one seed make it the same each time on the same machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from floatline.systems.distill.config import Config
from floatline.systems.distill.networks import build_teacher, read_exits
from floatline.systems.distill.text import TEACHER_WEIGHTS, TOKENIZERS, read_text, split_text

STUDENT_TOKENS, TEACHER_TOKENS = 768, 1024
STEPS, BATCH, LENGTH, LR, DECAY, DROPOUT = 600, 16, 64, 3e-3, 0.3, 0.15
ASCII = [chr(code) for code in (10, *range(32, 127))]


def make_tokenizers(text: str) -> None:
    """The teacher's like GPT-2's (bytes), the student's like SentencePiece's (characters, spaces as marks)."""
    teacher = Tokenizer(models.BPE())
    teacher.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    teacher.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    teacher.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=TEACHER_TOKENS, initial_alphabet=alphabet, show_progress=False)
    )
    student = Tokenizer(models.BPE(unk_token="<unk>"))
    student.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    student.decoder = decoders.Metaspace(prepend_scheme="never")
    student.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=STUDENT_TOKENS, special_tokens=["<unk>"], initial_alphabet=ASCII, show_progress=False
        ),
    )
    for name, tokenizer in (("teacher", teacher), ("student", student)):
        TOKENIZERS[name].write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")


def exit_losses(model: torch.nn.Module, window: torch.Tensor) -> list[torch.Tensor]:
    """Cross-entropy at every exit."""
    logits, _ = read_exits(model, window[:, :-1], exits=(1, 2, 3))
    return [F.cross_entropy(each.flatten(0, 1), window[:, 1:].flatten()) for each in logits.unbind(2)]


def train(steps: int) -> torch.nn.Module:
    """The teacher, trained on the training part alone. The held-out part is looked at, and decides nothing."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(TOKENIZERS["teacher"]))
    train_text, held_out = split_text(read_text())
    ids, held = (torch.tensor(tokenizer.encode(text).ids) for text in (train_text, held_out))
    held = held[: len(held) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    model = build_teacher(Config(teacher="random", dropout=DROPOUT, length=48), vocabulary=tokenizer.get_vocab_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps)
    for step in range(1, steps + 1):
        starts = torch.randint(len(ids) - LENGTH - 1, (BATCH, 1))
        losses = exit_losses(model.train(), ids[starts + torch.arange(LENGTH + 1)])
        optimizer.zero_grad()
        (losses[-1] + 0.3 * sum(losses[:-1])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            with torch.no_grad():
                now = [round(float(loss), 4) for loss in exit_losses(model.eval(), held)]
            print(f"step {step}: train {losses[-1].item():.3f}, held out at each exit {now} nats a token", flush=True)
    return model


def main() -> None:
    """Write both files beside the workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    make_tokenizers(split_text(read_text())[0])
    weights = {
        k: v.half().contiguous() for k, v in train(arguments.steps).state_dict().items() if k != "lm_head.weight"
    }
    save_file(weights, TEACHER_WEIGHTS)
    print(f"{TEACHER_WEIGHTS}: {Path(TEACHER_WEIGHTS).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
