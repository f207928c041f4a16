"""PPO on a pendulum of our own, single file."""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class PendulumEnv:
    """A batch of pendulums that are to stand upright; the reward is the usual negative cost."""

    def __init__(self, num_envs, device):
        self.num_envs, self.device = num_envs, device

    def reset(self):
        self.theta = (torch.rand(self.num_envs, device=self.device) * 2 - 1) * math.pi
        self.omega = torch.rand(self.num_envs, device=self.device) * 2 - 1
        return self.observe()

    def observe(self):
        return torch.stack([self.theta.cos(), self.theta.sin(), self.omega / 8], -1)

    def step(self, action):
        torque = 2 * action.squeeze(-1)
        angle = (self.theta + math.pi) % (2 * math.pi) - math.pi
        cost = angle**2 + 0.1 * self.omega**2 + 0.001 * torque**2
        self.omega = (self.omega + (15 * self.theta.sin() + 3 * torque) * 0.05).clamp(-8, 8)
        self.theta = self.theta + self.omega * 0.05
        return self.observe(), -cost


class Agent(nn.Module):
    def __init__(self, obs=3, act=1, width=64):
        super().__init__()
        self.critic = nn.Sequential(
            nn.Linear(obs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )
        self.actor = nn.Sequential(
            nn.Linear(obs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, act)
        )
        self.log_std = nn.Parameter(torch.full((act,), 0.6))

    def value(self, obs):
        return self.critic(obs).squeeze(-1)

    def policy(self, obs):
        return self.actor(obs), self.log_std.exp()


def log_prob(mean, std, raw):
    """Of a Gaussian squashed by tanh."""
    gauss = -0.5 * ((raw - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)
    squash = 2 * (math.log(2) - raw - F.softplus(-2 * raw))
    return (gauss - squash).sum(-1)


def rollout(agent, env, horizon, gamma, lam):
    obs_buf, raw_buf, logp_buf, rew_buf, val_buf = [], [], [], [], []
    obs = env.reset()
    for _ in range(horizon):
        mean, std = agent.policy(obs)
        raw = mean.float() + std * torch.randn_like(mean, dtype=torch.float32)
        obs_buf.append(obs)
        raw_buf.append(raw)
        logp_buf.append(log_prob(mean, std, raw).float())
        val_buf.append(agent.value(obs).float() * 100)
        obs, reward = env.step(torch.tanh(raw))
        rew_buf.append(reward)
    rewards, values = torch.stack(rew_buf), torch.stack(val_buf)
    last = agent.value(obs).float() * 100
    advantages, gae = torch.zeros_like(rewards), 0.0
    for t in reversed(range(horizon)):
        following = values[t + 1] if t + 1 < horizon else last
        delta = rewards[t] + gamma * following - values[t]
        gae = delta + gamma * lam * gae
        advantages[t] = gae
    returns = advantages + values
    flat = [b.flatten(0, 1) for b in (torch.stack(obs_buf), torch.stack(raw_buf), torch.stack(logp_buf))]
    return (*flat, advantages.flatten(), returns.flatten(), rewards.mean().item())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--horizon", type=int, default=100)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--ent-coef", type=float, default=1e-3)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    args = parser.parse_args()
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    amp_dtype = torch.bfloat16 if args.precision == "bf16" else torch.float16
    autocast = dict(device_type=device, dtype=amp_dtype, enabled=args.precision != "fp32")

    env = PendulumEnv(args.num_envs, device)
    agent = Agent().to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.lr, eps=1e-5)
    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")

    for iteration in range(args.iterations):
        with torch.no_grad(), torch.autocast(**autocast):
            obs, raw, old_logp, adv, returns, mean_reward = rollout(agent, env, args.horizon, 0.97, 0.95)
        v_losses = []
        for _ in range(args.epochs):
            for idx in torch.randperm(len(obs), device=device).chunk(args.minibatches):
                with torch.autocast(**autocast):
                    mean, std = agent.policy(obs[idx])
                    logp = log_prob(mean, std, raw[idx])
                    ratio = torch.exp(logp - old_logp[idx])
                    a = (adv[idx] - adv[idx].mean()) / (adv[idx].std() + 1e-8)
                    pg_loss = torch.max(-a * ratio, -a * ratio.clamp(1 - args.clip, 1 + args.clip)).mean()
                    v_loss = F.mse_loss(agent.value(obs[idx]), returns[idx] / 100)
                    entropy = std.log().sum()
                    loss = pg_loss + v_loss - args.ent_coef * entropy
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                v_losses.append(v_loss.item())
        mean_v = sum(v_losses) / len(v_losses)
        print(f"iteration {iteration} reward {mean_reward:.3f} value_loss {mean_v:.5f} ratio {ratio.mean().item():.3f}")


if __name__ == "__main__":
    main()
