"""GRPO on a toy: rollouts in 16 bits and another batch size than the trainer's scores; the drift, and what helps.

A small transformer is to repeat the token that stands first. A copy in the arm's format draws all completions at once;
the trainer scores them in small batches under autocast. Run it with `python examples/grpo_loop.py`; with `--arm bf16
--seed 1` it trains one arm and prints rewards as JSON lines, which `floatline validate` compares (docs/rl.md).
"""

import argparse
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from toy_policy import ARMS, PROMPT, VOCABULARY, Policy, roll_out, score

import floatline as fl

PROMPTS, GROUP, CHUNK = 8, 8, 16


def train(arm: str, seed: int, steps: int) -> SimpleNamespace:
    """GRPO with one arm; the last rollout is not learned from, but measured: its ratios outside and its divergence."""
    torch.manual_seed(seed)
    compute, model, rewards = ARMS[arm], Policy(fp32_head=arm == "fp32-head"), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    scale = 1024.0 if compute == torch.float16 else 1.0  # FP16's gradients need one
    for step in range(steps + 1):
        prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT)).repeat_interleave(GROUP, 0)
        ids, rollout = roll_out(model, compute, prompts)
        reward = (ids[:, PROMPT:] == ids[:, :1]).float().mean(1)
        rewards.append(float(reward.mean()))
        group = reward.view(PROMPTS, GROUP)
        advantage = ((group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-4)).flatten()
        gaps = []
        for part, weight, theirs in zip(ids.split(CHUNK), advantage.split(CHUNK), rollout.split(CHUNK), strict=True):
            ours = score(model, compute, part)
            gaps.append(ours.detach() - theirs)
            ratio = (ours - ours.detach()).exp()  # the trainer takes its own scores for those of the rollout
            (-(ratio * weight[:, None]).mean() * scale * len(part) / len(ids)).backward()
        if step < steps:
            for parameter in model.parameters():
                parameter.grad /= scale
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
    gap = torch.cat(gaps)
    outside = float(((gap.exp() < 0.9) | (gap.exp() > 1.1)).float().mean())
    kl = float((gap.exp() - 1 - gap).sum(1).mean())
    return SimpleNamespace(model=model, rewards=rewards, ids=ids, rollout=rollout, outside=outside, kl=kl)


def write(run: SimpleNamespace, path: Path) -> Path:
    """The last rollout, as another engine would write it."""
    rows = zip(run.ids.tolist(), run.rollout.tolist(), strict=True)
    path.write_text("".join(json.dumps({"tokens": ids, "logprobs": found}) + "\n" for ids, found in rows))
    return path


def main() -> None:
    """The drift of each arm and what parity says of BF16's; or one arm for `floatline validate`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=list(ARMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    for name in [given.arm] if given.arm else ARMS:
        run = train(name, given.seed, given.steps)
        if given.arm:
            for step in range(10, given.steps + 1, 10):
                print(json.dumps({"step": step, "reward": sum(run.rewards[step - 10 : step]) / 10}))
            continue
        print(f"{name}: {100 * run.outside:.2g} % of ratios outside, KL {run.kl:.2g} a sequence")
        if name == "bf16":
            with torch.autocast("cpu", torch.bfloat16):
                print(fl.parity(run.model, write(run, Path(tempfile.mkdtemp()) / "rollout.jsonl")))


if __name__ == "__main__":
    main()
