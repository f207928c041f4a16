"""Failures of three scripts, for rescue: made by someone who did not know how floatline works, and kept as they came."""

from __future__ import annotations

from pathlib import Path

from tests.scripts.planted import Planted

HERE = Path(__file__).parent

RESCUES: tuple[Planted, ...] = (
    Planted(
        'nano',
        'one_of_two_optimizers_unscaled',
        (
            (
                'decay_params = [p for p in model.parameters() if p.dim() >= 2]\n'
                'nodecay_params = [p for p in model.parameters() if p.dim() < 2]\n',
                'emb_params = [model.wte.weight, model.lm_head.weight]\n'
                'rest = [p for p in model.parameters() if all(p is not e for e in emb_params)]\n'
                'decay_params = [p for p in rest if p.dim() >= 2]\n'
                'nodecay_params = [p for p in rest if p.dim() < 2]\n',
            ),
            (
                'optimizer = torch.optim.AdamW(optim_groups, lr=learning_rate, betas=(beta1, beta2), eps=adam_eps)\n',
                'optimizer = torch.optim.AdamW(optim_groups, lr=learning_rate, betas=(beta1, beta2), eps=adam_eps)\n'
                '# embedding and head get an optimizer of their own, without decay\n'
                'optimizer_emb = torch.optim.Adam(emb_params, lr=learning_rate, betas=(beta1, beta2), eps=adam_eps)\n'
                'optimizers = [optimizer, optimizer_emb]\n',
            ),
            (
                '    for param_group in optimizer.param_groups:\n'
                '        param_group["lr"] = lr\n',
                '    for opt in optimizers:\n'
                '        for param_group in opt.param_groups:\n'
                '            param_group["lr"] = lr\n',
            ),
            (
                '    scaler.step(optimizer)\n'
                '    scaler.update()\n'
                '    # flush the gradients as soon as we can, no need for this memory anymore\n'
                '    optimizer.zero_grad(set_to_none=True)\n',
                '    for opt in optimizers:\n'
                '        scaler.step(opt)\n'
                '    scaler.update()\n'
                '    # flush the gradients as soon as we can, no need for this memory anymore\n'
                '    for opt in optimizers:\n'
                '        opt.zero_grad(set_to_none=True)\n',
            ),
        ),
        ('clip-before-unscale', 'scaler-misuse'),
        ('scaler.unscale_(optimizer)',),
        loud=False,
        why='Embedding and head have a second optimizer, and only the first is unscaled before the clip over all parameters.',
        arguments=('--precision', 'fp16'),
    ),
    Planted(
        'nano',
        'bare_step_after_unscale',
        (
            (
                'scaler = torch.amp.GradScaler(device, enabled=(precision == "fp16"))\n',
                'scaler = torch.amp.GradScaler(device, growth_interval=10, enabled=(precision == "fp16"))\n',
            ),
            (
                '    scaler.step(optimizer)\n',
                '    optimizer.step()\n',
            ),
        ),
        ('scaler-misuse',),
        ('optimizer.step()',),
        loud=True,
        why='unscale_ and clip, and then optimizer.step() instead of scaler.step(): a step whose gradients overflow is not skipped.',
        arguments=('--precision', 'fp16'),
    ),
    Planted(
        'nano',
        'rotary_angles_under_autocast',
        (
            (
                '        with torch.autocast(device_type=device, enabled=False):\n'
                '            freqs = pos[:, :, None].float() @ self.inv_freq[None, None, :].float()\n',
                '        freqs = pos[:, :, None].float() @ self.inv_freq[None, None, :].float()\n',
            ),
        ),
        ('integer-not-exact', 'activation-overflow', 'cancellation'),
        ('freqs = pos[:, :, None].float() @ self.inv_freq[None, None, :].float()',),
        loud=False,
        why='The angles of the rotary embedding come from a matmul under autocast.',
        arguments=('--precision', 'bf16'),
    ),
    Planted(
        'nano',
        'moments_in_half',
        (
            (
                '\n'
                '# initialize a GradScaler. If enabled=False scaler is a no-op\n',
                '\n'
                'class SmallAdamW(torch.optim.Optimizer):\n'
                '    """AdamW whose state takes half the memory."""\n'
                '\n'
                '    def __init__(self, params, lr, betas, eps, weight_decay=0.0):\n'
                '        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))\n'
                '\n'
                '    @torch.no_grad()\n'
                '    def step(self, closure=None):\n'
                '        for group in self.param_groups:\n'
                '            b1, b2 = group["betas"]\n'
                '            for p in group["params"]:\n'
                '                state = self.state[p]\n'
                '                if not state:\n'
                '                    state["step"] = 0\n'
                '                    state["exp_avg"] = torch.zeros_like(p, dtype=ptdtype)\n'
                '                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=ptdtype)\n'
                '                state["step"] += 1\n'
                '                m = state["exp_avg"].float().lerp(p.grad, 1 - b1)\n'
                '                v = state["exp_avg_sq"].float().mul(b2).addcmul(p.grad, p.grad, value=1 - b2)\n'
                '                state["exp_avg"].copy_(m)\n'
                '                state["exp_avg_sq"].copy_(v)\n'
                '                m_hat = state["exp_avg"].float() / (1 - b1 ** state["step"])\n'
                '                v_hat = state["exp_avg_sq"].float() / (1 - b2 ** state["step"])\n'
                '                p.mul_(1 - group["lr"] * group["weight_decay"])\n'
                '                p.addcdiv_(m_hat, v_hat.sqrt() + group["eps"], value=-group["lr"])\n'
                '\n'
                '\n'
                '# initialize a GradScaler. If enabled=False scaler is a no-op\n',
            ),
            (
                'optimizer = torch.optim.AdamW(optim_groups, lr=learning_rate, betas=(beta1, beta2), eps=adam_eps)\n',
                'optimizer = SmallAdamW(optim_groups, lr=learning_rate, betas=(beta1, beta2), eps=adam_eps)\n',
            ),
        ),
        ('optimizer-state-underflow',),
        ('state["exp_avg_sq"] = torch.zeros_like(p, dtype=ptdtype)',),
        loud=True,
        why='AdamW keeps its second moment in FP16 to save memory; the weights are FP32.',
        arguments=('--precision', 'fp16'),
    ),
    Planted(
        'nano',
        'powers_factored_out',
        (
            (
                '        weight = torch.tril(self.decay ** (t[:, None] - t[None, :]).clamp(min=0))\n'
                '        return x + self.gate * (weight @ x) * (1 - self.decay)\n',
                '        # decay^(t-s) = decay^t * decay^-s: no matrix of T x T powers\n'
                '        past = torch.tril(torch.ones(len(t), len(t), device=x.device)) @ (x * (self.decay ** -t)[:, None])\n'
                '        return x + self.gate * past * (self.decay ** t)[:, None] * (1 - self.decay)\n',
            ),
        ),
        ('product-overflow', 'exp-overflow', 'activation-overflow'),
        ('past = torch.tril(torch.ones(len(t), len(t), device=x.device)) @ (x * (self.decay ** -t)[:, None])',),
        loud=True,
        why='The exponential average is factorised into decay^t * sum(decay^-s x_s), and the matmul runs in FP16.',
        arguments=('--precision', 'fp16'),
    ),
    Planted(
        'mnist',
        'second_backward_not_scaled',
        (
            (
                '        scaler.scale(loss).backward()\n',
                '        scaler.scale(loss).backward()\n'
                '        # sharpness-aware: the gradient that counts is taken at the worst point nearby\n'
                '        params = [p for p in model.parameters() if p.grad is not None]\n'
                '        norm = torch.stack([p.grad.norm() for p in params]).norm() + 1e-12\n'
                '        shift = [args.rho * p.grad / norm for p in params]\n'
                '        with torch.no_grad():\n'
                '            for p, e in zip(params, shift):\n'
                '                p.add_(e)\n'
                '        optimizer.zero_grad()\n'
                '        with torch.autocast(device_type=device, dtype=args.dtype, enabled=args.use_amp):\n'
                '            loss = F.nll_loss(model(data), target)\n'
                '        loss.backward()\n'
                '        with torch.no_grad():\n'
                '            for p, e in zip(params, shift):\n'
                '                p.sub_(e)\n',
            ),
            (
                '    parser.add_argument("--gamma", type=float, default=0.7, metavar="M", help="Learning rate step gamma (default: 0.7)")\n',
                '    parser.add_argument("--gamma", type=float, default=0.7, metavar="M", help="Learning rate step gamma (default: 0.7)")\n'
                '    parser.add_argument("--rho", type=float, default=0.02, help="neighbourhood of SAM")\n',
            ),
        ),
        ('scaler-misuse',),
        ('loss.backward()',),
        loud=False,
        why='SAM: the second backward does not go through scaler.scale, but scaler.step divides by the scale.',
        arguments=('--precision', 'fp16'),
    ),
    Planted(
        'mnist',
        'cube_root_of_cubes',
        (
            (
                '        self.fc1 = nn.Linear(576, 64)\n'
                '        self.fc2 = nn.Linear(64, 10)\n',
                '        self.fc1 = nn.Linear(144, 64)\n'
                '        self.fc2 = nn.Linear(64, 10)\n'
                '\n'
                '    def gem(self, x, eps=1e-4):\n'
                '        # generalized mean with p = 3 over fields of 2 x 2\n'
                '        x = x.clamp(min=eps)\n'
                '        return F.avg_pool2d(x * x * x, 2).pow(1.0 / 3.0)\n',
            ),
            (
                '        x = F.max_pool2d(x, 2)\n',
                '        x = self.gem(F.max_pool2d(x, 2))\n',
            ),
        ),
        ('rounded-onto-singularity', 'eps-underflow', 'singular-gradient'),
        ('return F.avg_pool2d(x * x * x, 2).pow(1.0 / 3.0)',),
        loud=True,
        why='GeM pooling with p = 3 written as x * x * x after clamp(min=1e-4).',
        arguments=('--precision', 'fp16'),
    ),
    Planted(
        'mnist',
        'clamp_of_probabilities',
        (
            (
                '        output = F.log_softmax(x, dim=1)\n'
                '        return output\n',
                '        return torch.sigmoid(16 * x)\n'
                '\n'
                '\n'
                'def bce_loss(prob, target):\n'
                '    # one against the rest, each class for itself\n'
                '    prob = torch.clamp(prob, 1e-7, 1 - 1e-7)\n'
                '    one_hot = F.one_hot(target, prob.size(1)).to(prob.dtype)\n'
                '    pos = -one_hot * torch.log(prob)\n'
                '    neg = -(1 - one_hot) * torch.log(1 - prob)\n'
                '    return (pos + neg).sum(dim=1).mean()\n',
            ),
            (
                '            loss = F.nll_loss(output, target)\n',
                '            loss = bce_loss(output, target)\n',
            ),
            (
                '            test_loss += F.nll_loss(output, target, reduction="sum").item()  # sum up batch loss\n',
                '            test_loss += bce_loss(output, target).item() * len(target)  # sum up batch loss\n',
            ),
        ),
        ('eps-underflow', 'rounded-onto-singularity'),
        ('prob = torch.clamp(prob, 1e-7, 1 - 1e-7)',),
        loud=True,
        why='Probabilities are clamped to 1e-7 .. 1 - 1e-7 before log(1 - p).',
        arguments=('--precision', 'bf16'),
    ),
    Planted(
        'mnist',
        'norm_statistics_in_half',
        (
            (
                '        self.conv1 = nn.Conv2d(1, 8, 3, 1)\n',
                '        self.conv1 = nn.Conv2d(1, 8, 3, 1)\n'
                '        self.bn1 = nn.BatchNorm2d(8)\n',
            ),
            (
                '        x = self.conv1(x)\n',
                '        x = self.bn1(self.conv1(x))\n',
            ),
            (
                '    images = images.float().div(255).sub(0.2).div(0.3).unsqueeze(1)\n',
                '    images = images.float().mul(16).unsqueeze(1)  # counts of a camera of 12 bits; bn1 brings them into range\n',
            ),
            (
                '    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)\n'
                '    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")\n',
                '    if args.use_amp:\n'
                '        model = model.to(args.dtype)  # weights and optimizer state at half the size\n'
                '    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)\n'
                '    scaler = torch.amp.GradScaler(device, enabled=False)\n',
            ),
        ),
        ('fp16-params-with-scaler', 'update-lost-to-rounding', 'optimizer-state-underflow', 'activation-overflow', 'reduction-overflow'),
        ('model = model.to(args.dtype)  # weights and optimizer state at half the size',),
        loud=False,
        why='The model with its batch norm is cast to FP16 and fed raw 12-bit counts.',
        arguments=('--precision', 'fp16'),
    ),
    Planted(
        'mnist',
        'norms_logged_in_place',
        (
            (
                '\n'
                'def train(args, model, device, train_loader, optimizer, scaler, epoch):\n',
                '\n'
                'def log_grad_norm(model, scaler):\n'
                '    total = 0.0\n'
                '    for p in model.parameters():\n'
                '        if p.grad is None:\n'
                '            continue\n'
                '        p.grad.data.div_(scaler.get_scale())  # the true gradient, without the loss scale\n'
                '        total += p.grad.norm().item() ** 2\n'
                '    return total**0.5\n'
                '\n'
                '\n'
                'def train(args, model, device, train_loader, optimizer, scaler, epoch):\n',
            ),
            (
                '        scaler.scale(loss).backward()\n',
                '        scaler.scale(loss).backward()\n'
                '        grad_norm = log_grad_norm(model, scaler)\n',
            ),
            (
                '                "Train Epoch: {} [{}/{} ({:.0f}%)]\\tLoss: {:.6f}".format(\n',
                '                "Train Epoch: {} [{}/{} ({:.0f}%)]\\tLoss: {:.6f}\\tGrad: {:.3f}".format(\n',
            ),
            (
                '                    loss.item(),\n',
                '                    loss.item(),\n'
                '                    grad_norm,\n',
            ),
        ),
        ('scaler-misuse',),
        ('p.grad.data.div_(scaler.get_scale())  # the true gradient, without the loss scale',),
        loud=False,
        why='A helper that logs the gradient norm divides p.grad by the scale in place, and scaler.step unscales again.',
        arguments=('--precision', 'fp16'),
    ),
    Planted(
        'vae2',
        'outputs_far_from_zero',
        (
            (
                '        return self.fc4(h3)\n'
                '\n'
                '    def forward(self, x):\n'
                '        mu, logvar = self.encode(x.view(-1, PIXELS))\n',
                '        return self.fc4(h3) * STD + MEAN  # back in metres\n'
                '\n'
                '    def forward(self, x):\n'
                '        mu, logvar = self.encode((x.view(-1, PIXELS) - MEAN) / STD)\n',
            ),
            (
                '    err = recon_x - x\n',
                '    err = (recon_x - x) / STD\n',
            ),
            (
                '    for batch_idx, (data,) in enumerate(train_loader):\n'
                '        data = (data.to(device) - MEAN) / STD\n',
                '    for batch_idx, (data,) in enumerate(train_loader):\n'
                '        data = data.to(device)\n',
            ),
            (
                '            data = (data.to(device) - MEAN) / STD\n',
                '            data = data.to(device)\n',
            ),
        ),
        ('cancellation', 'integer-not-exact'),
        ('return self.fc4(h3) * STD + MEAN  # back in metres',),
        loud=False,
        why='The decoder returns metres (about 2100) under autocast instead of normalised heights.',
        arguments=('--precision', 'fp16'),
    ),
    Planted(
        'vae2',
        'one_term_not_scaled',
        (
            (
                'scaler = torch.amp.GradScaler(device, init_scale=2.0**3, enabled=args.precision == "fp16")\n',
                'scaler = torch.amp.GradScaler(device, init_scale=2.0**9, enabled=args.precision == "fp16")\n',
            ),
            (
                '            loss = NLL + beta * KLD\n'
                '        scaler.scale(loss).backward()\n',
                '            recon_loss = NLL / len(data)\n'
                '            kl_loss = beta * KLD / len(data)\n'
                '        scaler.scale(recon_loss).backward(retain_graph=True)\n'
                '        kl_loss.backward()\n',
            ),
        ),
        ('scaler-misuse',),
        ('kl_loss.backward()',),
        loud=False,
        why='Reconstruction and KL go backward separately, and only the first is scaled.',
        arguments=('--precision', 'fp16'),
    ),
    Planted(
        'vae2',
        'zero_grad_after_good_steps',
        (
            (
                'scaler = torch.amp.GradScaler(device, init_scale=2.0**3, enabled=args.precision == "fp16")\n',
                'scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")\n',
            ),
            (
                '        optimizer.zero_grad()\n',
                '',
            ),
            (
                '        scaler.step(optimizer)\n'
                '        scaler.update()\n'
                '        step += 1\n',
                '        scale = scaler.get_scale()\n'
                '        scaler.step(optimizer)\n'
                '        scaler.update()\n'
                '        if scaler.get_scale() >= scale:  # the step was not skipped\n'
                '            optimizer.zero_grad()\n'
                '            step += 1\n',
            ),
        ),
        ('scaler-misuse',),
        ('optimizer.zero_grad()',),
        loud=True,
        why='Gradients are zeroed only when the step was not skipped.',
        arguments=('--precision', 'fp16'),
    ),
    Planted(
        'vae2',
        'half_with_adam',
        (
            (
                'weights = [p for p in model.parameters() if p is not model.log_var_x]\n'
                'optimizer = optim.Adam([{"params": weights}, {"params": [model.log_var_x], "lr": 10 * args.lr}], lr=args.lr)\n'
                'scaler = torch.amp.GradScaler(device, init_scale=2.0**3, enabled=args.precision == "fp16")\n',
                'if args.precision == "fp16":\n'
                '    model = model.half()\n'
                'weights = [p for p in model.parameters() if p is not model.log_var_x]\n'
                'optimizer = optim.Adam([{"params": weights}, {"params": [model.log_var_x], "lr": 10 * args.lr}], lr=args.lr, eps=1e-4)  # 1e-8 is 0 in half\n'
                'scaler = torch.amp.GradScaler(device, enabled=False)\n',
            ),
        ),
        ('optimizer-state-underflow', 'update-lost-to-rounding', 'activation-overflow'),
        ('model = model.half()',),
        loud=False,
        why='model.half() with Adam (eps 1e-4), no scaler, loss summed over batch and pixels.',
        arguments=('--precision', 'fp16'),
    ),
    Planted(
        'vae2',
        'variances_by_squares',
        (
            (
                '\n'
                '# Reconstruction + KL divergence losses, the sum over pixels and latents, per batch\n',
                '\n'
                'window = torch.full((1, 1, 5, 5), 1 / 25, device=device)\n'
                '\n'
                '\n'
                'def ssim_loss(recon, x, C1=1e-4, C2=9e-4):\n'
                '    recon, x = ((t.view(-1, 1, SIDE, SIDE) * STD + 236) / 256 for t in (recon, x))  # 256 metres as 0..1\n'
                '    mu1, mu2 = F.conv2d(recon, window), F.conv2d(x, window)\n'
                '    sigma1_sq = F.conv2d(recon * recon, window) - mu1 * mu1\n'
                '    sigma2_sq = F.conv2d(x * x, window) - mu2 * mu2\n'
                '    sigma12 = F.conv2d(recon * x, window) - mu1 * mu2\n'
                '    ssim = ((2 * mu1 * mu2 + C1) * (2 * sigma12 + C2)) / ((mu1**2 + mu2**2 + C1) * (sigma1_sq + sigma2_sq + C2))\n'
                '    return (1 - ssim).mean()\n'
                '\n'
                '\n'
                '# Reconstruction + KL divergence losses, the sum over pixels and latents, per batch\n',
            ),
            (
                '    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())\n',
                '    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())\n'
                '    NLL = NLL + 2000 * len(x) * ssim_loss(recon_x, x)\n',
            ),
        ),
        ('cancellation',),
        ('sigma1_sq = F.conv2d(recon * recon, window) - mu1 * mu1',),
        loud=True,
        why='An SSIM term whose variances are E[x^2] - E[x]^2 from FP16 convolutions.',
        arguments=('--precision', 'fp16'),
    ),
)
