"""
Sequence to Sequence with Attention: reverses lines of letters.
The weights are updated by hand, so that one can see what an optimizer does.
"""

import argparse
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--n-iters", type=int, default=60)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--hidden-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.4)
parser.add_argument("--teacher-forcing-ratio", type=float, default=0.9)
parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
args = parser.parse_args()

PAD, SOS, EOS, VOCAB, MAX_LENGTH = 0, 1, 2, 10, 6
device = "cuda" if torch.cuda.is_available() else "cpu"
amp_dtype = torch.bfloat16 if args.precision == "bf16" else torch.float16
loss_scale = 1024.0 if args.precision == "fp16" else 1.0
random.seed(3)
torch.manual_seed(3)


def random_batch():
    """Lines of up to six letters, and the same letters backwards. A few lines are empty, as in any corpus."""
    src = torch.zeros(args.batch_size, MAX_LENGTH, dtype=torch.long)
    tgt = torch.zeros(args.batch_size, MAX_LENGTH + 1, dtype=torch.long)
    for i in range(args.batch_size):
        n = random.choice([0, 3, 4, 5, 6]) if i % 8 == 0 else random.choice([3, 4, 5, 6])
        line = [random.randint(3, VOCAB - 1)] * (n // 2) + [random.randint(3, VOCAB - 1)] * (n - n // 2)
        src[i, :n] = torch.tensor(line, dtype=torch.long)
        tgt[i, : n + 1] = torch.tensor([*reversed(line), EOS])
    return src.to(device), tgt.to(device)


class EncoderRNN(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)

    def forward(self, src):
        return self.gru(self.embedding(src))


class AttnDecoderRNN(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, hidden_size)
        self.query = nn.Linear(hidden_size, hidden_size)
        self.gru = nn.GRU(2 * hidden_size, hidden_size, batch_first=True)
        self.out = nn.Linear(2 * hidden_size, VOCAB)

    def forward(self, token, hidden, encoder_outputs, pad):
        query = self.query(hidden[-1]).unsqueeze(1)
        scores = torch.bmm(query, encoder_outputs.to(query.dtype).transpose(1, 2)).squeeze(1)
        scores = scores.masked_fill(pad, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1)
        context = torch.bmm(weights.unsqueeze(1), encoder_outputs)
        embedded = self.embedding(token).unsqueeze(1)
        output, hidden = self.gru(torch.cat([embedded, context.to(embedded.dtype)], dim=2), hidden)
        return self.out(torch.cat([output.squeeze(1), context.squeeze(1)], dim=1)), hidden


def train_batch(src, tgt, encoder, decoder):
    for p in [*encoder.parameters(), *decoder.parameters()]:
        p.grad = None
    with torch.autocast(device_type=device, dtype=amp_dtype, enabled=args.precision != "fp32"):
        encoder_outputs, hidden = encoder(src)
        token = torch.full((len(src),), SOS, device=device)
        use_teacher_forcing = random.random() < args.teacher_forcing_ratio
        losses, counts = [], []
        for t in range(tgt.size(1)):
            logits, hidden = decoder(token, hidden, encoder_outputs, src == PAD)
            losses.append(F.cross_entropy(logits, tgt[:, t], ignore_index=PAD, reduction="sum"))
            counts.append((tgt[:, t] != PAD).sum())
            token = tgt[:, t] if use_teacher_forcing else logits.argmax(-1).detach()
        loss = torch.stack(losses).sum() / torch.stack(counts).sum()
    (loss * loss_scale).backward()
    params = [*encoder.parameters(), *decoder.parameters()]
    norm = torch.stack([p.grad.norm() for p in params]).norm() / loss_scale
    clip = min(1.0, 2.0 / (norm.item() + 1e-6))
    for p in params:
        p.data.add_(p.grad, alpha=-args.lr * clip / loss_scale)
    return loss.item()


def main():
    encoder = EncoderRNN(args.hidden_size).to(device)
    decoder = AttnDecoderRNN(args.hidden_size).to(device)
    total = 0.0
    for i in range(1, args.n_iters + 1):
        src, tgt = random_batch()
        total += train_batch(src, tgt, encoder, decoder)
        if i % 5 == 0:
            print(f"({i} {i / args.n_iters:.0%}) loss {total / 5:.4f}")
            total = 0.0


if __name__ == "__main__":
    main()
