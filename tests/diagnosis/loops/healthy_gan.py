"""Two optimizers that fight each other under FP16 autocast and one scaler: healthy, though no loss falls."""

import torch
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 24), nn.LeakyReLU(0.2), nn.Linear(24, 2))
    critic = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
    first = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9))
    second = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    judge = nn.BCEWithLogitsLoss()
    for _ in range(25):
        real = torch.randn(32, 2) * 0.5 + 1
        with torch.autocast("cpu", torch.float16):
            fake = maker(torch.randn(32, 4))
            found = judge(critic(real).float(), torch.ones(32, 1)) + judge(
                critic(fake.detach()).float(), torch.zeros(32, 1)
            )
        second.zero_grad()
        scaler.scale(found).backward()
        scaler.step(second)
        with torch.autocast("cpu", torch.float16):
            fooled = judge(critic(fake).float(), torch.ones(32, 1))
        first.zero_grad()
        scaler.scale(fooled).backward()
        scaler.step(first)
        scaler.update()
