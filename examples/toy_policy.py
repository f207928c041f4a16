"""A small transformer that draws tokens in one format and scores them in another, for examples/grpo_loop.py."""

import copy

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, PROMPT, LENGTH = 8, 32, 3, 6
ARMS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32-head": torch.bfloat16}


class Policy(nn.Module):
    """Tokens to logits, which lie around 24 as those of large models do: a softmax does not see it, and BF16 does."""

    def __init__(self, *, fp32_head: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(PROMPT + LENGTH, WIDTH)
        self.layers = nn.ModuleList([layer, copy.deepcopy(layer)])
        self.norm, self.head, self.fp32_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY), fp32_head
        nn.init.constant_(self.head.bias, 24.0)

    def forward(self, ids: Tensor) -> Tensor:
        """One row of logits for each token."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        hidden = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=hidden)
        with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu") and not self.fp32_head):
            x = self.norm(x)
            return self.head(x) if not self.fp32_head else x.float() @ self.head.weight.float().T + self.head.bias


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probs of tokens, of logits that are widened first."""
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


@torch.no_grad()
def roll_out(model: Policy, compute: torch.dtype, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Complete all prompts at once by a copy in another format; gives the tokens, and the log-probs it had."""
    engine, found = copy.deepcopy(model).to(compute), []
    for _ in range(LENGTH):
        logits = engine(ids)[:, -1]
        drawn = torch.multinomial(logits.float().softmax(-1), 1)
        found.append(logprobs_of(logits, drawn[:, 0]))
        ids = torch.cat([ids, drawn], 1)
    return ids, torch.stack(found, 1)


def score(model: Policy, compute: torch.dtype, ids: Tensor) -> Tensor:
    """The trainer's log-probs of the completions."""
    with torch.autocast("cpu", compute, enabled=compute != torch.float32):
        return logprobs_of(model(ids[:, :-1]), ids[:, 1:])[:, PROMPT - 1 :]
