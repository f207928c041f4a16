"""Hazards of states that live through many steps: averages, counters, weights, moments of optimizers."""

from __future__ import annotations

from tests.plants.planting import Hazard

HALF, FULL = ("{dtype}",), ("torch.float32",)
STILL = ("accumulator-stagnation",)
BY_HAND = """
({loss} * {scale}).backward()
with torch.no_grad():
    for w, {state}_1, {state}_2 in zip({model}.parameters(), moment1, moment2):
        if w.grad is None:
            continue
        g = w.grad / {scale}
        {state}_1.mul_(0.9).add_(g.to({state}_1.dtype), alpha=0.1)
        {state}_2.mul_(0.99).add_((g * g).to({state}_2.dtype), alpha=0.01) #!
        w -= {rate} * ({state}_1.float() / ({state}_2.float().sqrt() + {eps})) #!
        w.grad = None
"""
MOMENTS = """
moment1 = [torch.zeros_like(p, dtype=torch.float32) for p in {model}.parameters()]
moment2 = [torch.zeros_like(p, dtype={half}) for p in {model}.parameters()] #!
"""
STATES = (
    Hazard(
        "average_of_weights",
        STILL,
        False,
        {
            "setup": """
            {state} = [p.detach().clone().to({half}) for p in {model}.parameters()]
            {old} = [p.detach().clone() for p in {model}.parameters()]
            """,
            "step": """
            with torch.no_grad():
                for {a}, {b} in zip({state}, {model}.parameters()):
                    [[{a}.mul_({decay}).add_({b}.to({a}.dtype), alpha=1 - {decay}) #!||{a}.lerp_({b}.to({a}.dtype), 1 - {decay}) #!||{a}.copy_({decay} * {a} + (1 - {decay}) * {b}.to({a}.dtype)) #!]]
            """,
        },
        bad={"half": HALF, "decay": {"fp16": (0.9995, 0.9998), "bf16": (0.995, 0.998, 0.999)}},
        good=({"half": FULL}, {"decay": (0.5, 0.7)}),
        report="average moved {sum((e.float() - s.float()).norm().item() for e, s in zip({state}, {old})):.5f}",
        names={"state": ("ema", "shadow", "averaged", "teacher")},
    ),
    Hazard(
        "equal_average_of_weights",
        STILL,
        False,
        {
            "setup": "{state} = [p.detach().clone().to({half}) for p in {model}.parameters()]",
            "step": """
            with torch.no_grad():
                for {a}, {b} in zip({state}, {model}.parameters()):
                    {a} += ({b}.detach() - {a}).to({a}.dtype) / ({step} + {ahead}) #!
            """,
        },
        bad={"half": HALF, "ahead": {"fp16": (2000, 5000), "bf16": (300, 800)}},
        good=({"half": FULL}, {"ahead": (2, 3)}),
        report="gap to average {sum((e.float() - p.detach()).square().sum().item() for e, p in zip({state}, {model}.parameters())):.6f}",
        names={"state": ("swa", "mean_weights", "averages")},
    ),
    Hazard(
        "smoothed_loss",
        STILL,
        False,
        {
            "setup": "{state} = torch.full((), {start}, dtype={half}, device={device})",
            "step": "[[{state} = {decay} * {state} + (1 - {decay}) * {loss}.detach().to({state}.dtype) #!||{state}.add_((1 - {decay}) * ({loss}.detach() - {state}).to({state}.dtype)) #!]]",
        },
        bad={"half": HALF, "start": (12.0, 20.0), "decay": {"fp16": (0.9998,), "bf16": (0.998, 0.999)}},
        good=({"half": FULL}, {"decay": (0.6, 0.8)}),
        report="smoothed {({state}.item() - {start}):.5f}",
        names={"state": ("smooth", "running", "meter", "loss_avg")},
    ),
    Hazard(
        "counter_of_steps",
        STILL,
        False,
        {
            "setup": "{state} = torch.tensor({start}, dtype={half}, device={device})",
            "step": "[[{state} += 1 #!||{state} = {state} + 1 #!||{state}.add_(1) #!]]",
        },
        bad={"half": HALF, "start": {"fp16": (2048.0, 4096.0), "bf16": (256.0, 512.0, 1024.0)}},
        good=({"half": ("torch.float32", "torch.float64", "torch.int64")}, {"start": (0.0, 8.0)}),
        report="steps in this run {({state}.item() - {start}):.1f}",
        names={"state": ("global_step", "num_updates", "seen", "counter")},
    ),
    Hazard(
        "decay_of_a_memory",
        (*STILL, "update-lost-to-rounding"),
        False,
        {
            "setup": "{state} = torch.randn(64, 16, device={device}).to({half})",
            "step": "[[{state}.mul_({keep}) #!||{state} = {state} * {keep} #!||{state} *= {keep} #!]]",
        },
        bad={"half": HALF, "keep": {"fp16": (0.9998, 0.9999), "bf16": (0.9985, 0.999)}},
        good=({"half": FULL}, {"keep": (0.9, 0.95)}),
        report="memory lost {(1 - {state}.float().norm().item() / 32):.5f}",
        names={"state": ("memory", "bank", "prototypes", "slots")},
    ),
    Hazard(
        "sum_of_squared_gradients",
        (*STILL, "gradient-underflow", "optimizer-state-underflow", "precision"),
        False,
        {
            "setup": "{state} = [torch.zeros_like(p, dtype={half}) for p in {model}.parameters()]",
            "step": """
            for {a}, {b} in zip({state}, {model}.parameters()):
                if {b}.grad is not None:
                    [[{a} += ({b}.grad.to({a}.dtype) * {size}) ** 2 #!||{a}.addcmul_({b}.grad.to({a}.dtype) * {size}, {b}.grad.to({a}.dtype) * {size}) #!]]
            """,
        },
        bad={"half": HALF, "size": (1e-3, 3e-4)},
        good=({"half": FULL}, {"size": (1.0,)}),
        report="fisher {(sum(f.double().sum().item() for f in {state}) / {size} ** 2):.6e}",
        dtypes=("fp16",),
        names={"state": ("fisher", "importance", "sensitivity")},
    ),
    Hazard(
        "second_moment_too_small",
        ("optimizer-state-underflow", "precision"),
        None,
        {"setup": MOMENTS, "update": BY_HAND},
        bad={"half": HALF, "scale": (1024.0,), "rate": (1e-3, 2e-3), "eps": (1e-8, 1e-7)},
        good=({"half": FULL},),
        dtypes=("fp16",),
        alone=True,
    ),
    Hazard(
        "weights_in_bf16",
        ("update-lost-to-rounding",),
        False,
        {
            "setup": """
            {model}.to({half}) #!
            for param_group in {opt}.param_groups:
                param_group["lr"] = {rate}
            {old} = [p.detach().float().clone() for p in {model}.parameters()]
            """,
        },
        bad={"half": HALF, "rate": {"bf16": (2e-5, 5e-5)}},
        good=({"half": FULL, "rate": (1e-3,)},),
        report="moved {sum((p.detach().float() - s).abs().sum().item() for p, s in zip({model}.parameters(), {old})):.6f}",
        dtypes=("bf16",),
        also=("scaler.step(",),
    ),
    Hazard(
        "frozen_decay_of_weights",
        ("update-lost-to-rounding", *STILL),
        False,
        {
            "setup": "{state} = torch.nn.Parameter(torch.ones(256, device={device}, dtype={half}))",
            "step": """
            with torch.no_grad():
                [[{state}.mul_(1 - {rate}) #!||{state} -= {rate} * {state} #!||{state}.add_({state}, alpha=-{rate}) #!]]
            """,
        },
        bad={"half": HALF, "rate": {"fp16": (1e-4, 2e-4), "bf16": (1e-3, 5e-4)}},
        good=({"half": FULL}, {"rate": (0.05,)}),
        report="decayed {(1 - {state}.detach().float().mean().item()):.5f}",
        names={"state": ("gain", "scale_param", "anchor")},
    ),
    Hazard(
        "variance_over_time",
        ("cancellation", *STILL),
        False,
        {
            "setup": "{state} = torch.zeros(3, dtype={half}, device={device})",
            "step": """
            {a} = ({loss}.detach() * 0.1 + {center}).to({state}.dtype)
            {state} += torch.stack([torch.ones_like({a}), {a}, {a} * {a}]) #!
            """,
        },
        bad={"half": HALF, "center": {"fp16": (20.0, 30.0), "bf16": (10.0, 20.0)}},
        good=({"half": ("torch.float32", "torch.float64"), "center": (2.0, 4.0)},),
        report="deviation {({state}[2] / {state}[0] - ({state}[1] / {state}[0]) ** 2).item():.6f}",
        names={"state": ("moments", "sums", "stats")},
        also=('print(f"deviation',),
    ),
    Hazard(
        "intervals_of_time",
        ("cancellation", "integer-not-exact", "precision"),
        False,
        {
            "setup": """
            {state} = (torch.arange(200, device={device}) * {gap} + {start}).to({half}) #!
            weight_sum = 0.0
            """,
            "step": """
            {a} = {state}[{step} + 1] - {state}[{step}] #!
            weight_sum += torch.exp(-{a}.float() / {gap}).item()
            """,
        },
        bad={"half": HALF, "gap": (0.25, 0.1), "start": {"fp16": (3000.0, 9000.0), "bf16": (500.0, 3000.0)}},
        good=({"half": FULL}, {"start": (0.0,), "gap": (1.0,)}),
        report="time weights {weight_sum:.4f}",
        names={"state": ("stamps", "times", "clock")},
    ),
    Hazard(
        "sine_of_large_angles",
        ("integer-not-exact", "precision"),
        False,
        {
            "setup": """
            {state} = torch.arange({length}, device={device}).to({half}) #!
            {b} = [[torch.sin({state} * {freq}) #!||({state} * {freq}).sin() #!]]
            energy_sum = 0.0
            """,
            "step": "energy_sum += {b}[(31 * {step} + {length} // 2) % {length}].item() ** 2",
        },
        bad={"half": HALF, "length": {"fp16": (8192, 16384), "bf16": (1024, 4096)}, "freq": (0.7, 1.3, 0.31)},
        good=({"half": FULL}, {"length": (64,), "freq": (0.01, 0.02)}),
        report="positional energy {energy_sum:.4f}",
        names={"state": ("pos", "positions", "steps_ahead"), "b": ("table", "sines", "encoding")},
    ),
)
