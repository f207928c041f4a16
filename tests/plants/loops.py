"""Hazards of the training loop: scaler, optimizer, resumption; and ordinary bugs that precision is not to blame for."""

from __future__ import annotations

from tests.plants.planting import Hazard

PLAIN = "({loss} * {weight}).backward() #!\n{opt}.step()"
NOT = "not-precision"
HALF = ("{dtype}",)
ADDED = "{out} = {call}\n{loss} = {loss} + {weight} * {out}"
LOOPS = (
    Hazard(
        "clip_before_unscale",
        ("clip-before-unscale",),
        False,
        {
            "update": """
            scaler.scale({loss}).backward()
            {early}
            torch.nn.utils.clip_grad_norm_({model}.parameters(), {norm}) #!
            scaler.step({opt})
            scaler.update()
            """
        },
        bad={"early": ("",), "norm": (0.001, 0.01)},
        good=({"early": ("scaler.unscale_({opt})",), "norm": (1.0, 5.0)},),
        report="weights {sum(p.detach().double().abs().sum().item() for p in {model}.parameters()):.4f}",
        dtypes=("fp16",),
    ),
    Hazard(
        "update_forgotten",
        ("scaler-misuse",),
        True,
        {
            "update": """
            scaler.scale({loss}).backward()
            scaler.unscale_({opt}) #!
            torch.nn.utils.clip_grad_norm_({model}.parameters(), {norm})
            scaler.step({opt}) #!
            {update}
            """
        },
        bad={"update": ("",), "norm": (1.0, 2.0, 5.0)},
        good=({"update": ("scaler.update()",)},),
        dtypes=("fp16",),
        raises="unscale_",
    ),
    Hazard(
        "unscaled_twice",
        ("scaler-misuse",),
        True,
        {
            "update": """
            scaler.scale({loss}).backward()
            scaler.unscale_({opt})
            torch.nn.utils.clip_grad_norm_({model}.parameters(), {norm})
            {again} #!
            scaler.step({opt})
            scaler.update()
            """
        },
        bad={"again": ("scaler.unscale_({opt})",), "norm": (1.0, 2.0, 5.0)},
        good=({"again": ("",)},),
        dtypes=("fp16",),
        raises="unscale_",
    ),
    Hazard(
        "stepped_without_unscaling",
        ("scaler-misuse",),
        None,
        {"update": "scaler.scale({loss}).backward()\n{divide}\n{opt}.step() #!"},
        bad={"divide": ("",)},
        good=({"divide": ("scaler.unscale_({opt})\nscaler.update()",)},),
        dtypes=("fp16",),
    ),
    Hazard(
        "scaler_made_anew",
        ("scaler-state-lost", "gradient-overflow"),
        True,
        {
            "step": """
            if {step} % {every} == {every} - 1:
                saved = {"model": {model}.state_dict()[[, "scaler": scaler.state_dict()||, "step": {step}, "scaler": scaler.state_dict()]]}
                {model}.load_state_dict(saved["model"])
                scaler = torch.amp.GradScaler({device}, init_scale={init}, enabled={dtype} == torch.float16) #!
                {restore}
            """
        },
        bad={"every": (4, 5, 6), "init": ("2.0**28", "2.0**30"), "restore": ("",)},
        good=({"init": ("2.0**10", "2.0**16"), "restore": ('scaler.load_state_dict(saved["scaler"])',)},),
        dtypes=("fp16",),
        also=("scaler.step(",),
    ),
    Hazard(
        "no_scaler",
        ("gradient-underflow",),
        False,
        {"update": PLAIN},
        bad={"weight": (1e-4, 3e-5, 1e-5)},
        good=({"weight": (1.0,)},),
        dtypes=("fp16",),
    ),
    Hazard(
        "scaled_by_hand_too_little",
        ("gradient-underflow",),
        False,
        {
            "setup": "loss_scale = {scale} if {dtype} == torch.float16 else 1.0",
            "update": """
            ({loss} * {weight} * loss_scale).backward() #!
            for w in {model}.parameters():
                if w.grad is not None:
                    w.grad.div_(loss_scale)
            {opt}.step()
            """,
        },
        bad={"scale": (2.0, 8.0), "weight": (1e-4, 1e-5)},
        good=({"scale": (512.0, 1024.0), "weight": (1.0,)},),
        dtypes=("fp16",),
        also=("loss_scale = ",),
    ),
    Hazard(
        "scaled_by_hand_too_much",
        ("gradient-overflow",),
        True,
        {
            "setup": """
            loss_scale = {scale} if {dtype} == torch.float16 else 1.0
            scaler = torch.amp.GradScaler({device}, enabled=False)
            """,
            "update": """
            ({loss} * loss_scale).backward() #!
            for w in {model}.parameters():
                if w.grad is not None:
                    w.grad.div_(loss_scale)
            {opt}.step()
            """,
        },
        bad={"scale": ("2.0**26", "2.0**30")},
        good=({"scale": (128.0, 1024.0)},),
        dtypes=("fp16",),
        also=("loss_scale = ",),
    ),
    Hazard(
        "half_weights_under_adam",
        ("optimizer-state-underflow", "gradient-underflow"),
        True,
        {
            "setup": """
            scaler = torch.amp.GradScaler({device}, enabled=False)
            {model}.to({half}) #!
            {opt} = torch.optim.Adam({model}.parameters(), lr={rate}, eps={eps}) #!
            """,
            "update": "{loss}.backward()\n{opt}.step() #!",
        },
        bad={"half": HALF, "rate": (1e-3, 3e-3), "eps": (1e-8, 1e-9)},
        good=({"half": ("torch.float32",)},),
        dtypes=("fp16",),
    ),
    Hazard(
        "half_weights_under_scaler",
        ("fp16-params-with-scaler",),
        True,
        {"setup": "[[{model}.to({half}) #!||{model} = {model}.to({half}) #!||{model}.to(dtype={half}) #!]]"},
        bad={"half": HALF},
        good=({"half": ("torch.float32",)},),
        dtypes=("fp16",),
        also=("scaler.step(", "scaler.unscale_("),
        raises="unscale FP16",
    ),
    Hazard(
        "scheduler_runs_ahead",
        ("scheduler-vs-skipped-step", "gradient-overflow"),
        None,
        {
            "setup": """
            scaler = torch.amp.GradScaler({device}, init_scale={init}, enabled={dtype} == torch.float16)
            warm = torch.optim.lr_scheduler.LinearLR({opt}, 1.0, 0.01, total_iters={total})
            """,
            "step": "warm.step() #!",
        },
        bad={"init": ("2.0**30", "2.0**34"), "total": (12, 15)},
        good=({"init": ("2.0**10",), "total": (30,)},),
        dtypes=("fp16",),
        also=("scaler = torch",),
    ),
    Hazard(
        "learning_rate_too_high",
        ("optimization-divergence",),
        True,
        {"setup": 'for param_group in {opt}.param_groups:\n    param_group["lr"] *= {factor} #!'},
        bad={"factor": ("1e6", "1e7")},
        good=({"factor": (1.0, 0.5)},),
        verdict=NOT,
        also=("optimizer.step(", "opt.step(", "scaler.step("),
    ),
    Hazard(
        "nan_in_the_data",
        ("bad-input-data",),
        True,
        {"data": "[[{x}[::{every}] = {value} #!||{x}[:: {every}].fill_({value}) #!||{x}[::{every}] *= {value} #!]]"},
        bad={"every": (7, 16, 31), "value": ('float("nan")', "torch.nan", 'float("inf")')},
        good=({"value": (0.0, 1.0, 0.5)},),
        verdict=NOT,
        also=("model(", "net("),
    ),
    Hazard(
        "mean_over_nothing",
        ("empty-reduction",),
        True,
        {"aux": ADDED},
        bad={"limit": ("1e4", "5e3"), "weight": (1e-3, 1e-2)},
        good=({"limit": ("-1e4",)},),
        function=(("x",), "return {x}.float()[{x} > {limit}].mean() #!"),
        verdict=NOT,
    ),
    Hazard(
        "root_of_exact_zero",
        ("singular-gradient",),
        True,
        {"aux": ADDED},
        bad={"eps": (0.0,), "weight": (1e-3, 1e-2)},
        good=({"eps": (1e-2, 0.1)},),
        function=(
            ("x",),
            """
            {a} = {x}.float()[:24, None] - {x}.float()[None, :24]
            return torch.sqrt({a}.square().mean(-1) + {eps}).mean() #!
            """,
        ),
        verdict=NOT,
    ),
    Hazard(
        "everything_masked",
        ("fully-masked-softmax",),
        True,
        {"aux": ADDED},
        bad={"low": ('float("-inf")', "-torch.inf"), "weight": (1e-3, 1e-2)},
        good=({"low": ("-100.0",)},),
        function=(
            ("x", "target"),
            """
            {a} = ({target} == {target}[0]).unsqueeze(-1)
            {b} = torch.softmax({x}.float().masked_fill({a}, {low}), dim=-1) #!
            return {b}.square().sum(-1).mean()
            """,
        ),
        verdict=NOT,
        also=(".masked_fill(",),
    ),
    Hazard(
        "quotient_of_exact_zeros",
        ("empty-reduction", "bad-input-data", "singular-gradient", "not-precision"),
        True,
        {"aux": ADDED},
        bad={"eps": (0.0,), "weight": (1e-3,)},
        good=({"eps": (0.5, 1.0)},),
        function=(
            ("x",),
            """
            {a} = {x}.float() - {x}.float()[:1]
            return ({a} / ({a}.abs().sum(-1, keepdim=True) + {eps})).square().mean() #!
            """,
        ),
        verdict=NOT,
    ),
    Hazard(
        "log_of_exact_zero",
        ("not-precision", "singular-gradient", "bad-input-data"),
        True,
        {"aux": ADDED},
        bad={"eps": (0.0,), "weight": (1e-3,)},
        good=({"eps": (0.1, 0.5)},),
        function=(
            ("x",),
            """
            {a} = torch.relu({x}.float())
            return -torch.log({a} + {eps}).mean() #!
            """,
        ),
        verdict=NOT,
    ),
    Hazard(
        "loss_beyond_its_clamp",
        ("clamp-kills-gradient",),
        False,
        {"aux": "[[{loss} = {loss}.clamp(max={limit}) #!||{loss} = torch.clamp({loss}, max={limit}) #!]]"},
        bad={"limit": (0.05, 0.02)},
        good=({"limit": (1e4, 1e5)},),
        verdict=NOT,
    ),
)
