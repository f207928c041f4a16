"""Ledgers of made-up runs, for the tests of the terminal view and of the page."""

import math

import floatline as fl

EVIL = "<script>alert(1)</script>"


def make_run(
    folder,
    *,
    steps: int = 300,
    planned: int | None = None,
    plan: str | None = "fp16",
    layers: tuple[str, ...] = ("body.0.weight", "body.1.weight", "head.weight"),
    skips: bool = True,
    stop: str = "",
    close: bool = True,
    part_bytes: int = 64 << 20,
) -> fl.Ledger:
    """Write a run whose every number is known.

    The loss falls from 4 to 1; steps 50, 100, … overflow and halve the scale of 65,536; step 75 has a NaN loss. Layer k
    has the norm 2 ** -k where it is recorded, every tenth step, and the last one is infinite in the overflows.
    """
    metadata = {} if plan is None else {"plan": {"name": f"{plan}-mixed", "compute": plan, "weights": "fp32"}}
    if planned is not None:
        metadata["steps"] = planned
    ledger = fl.Ledger.create(folder, metadata=metadata, part_bytes=part_bytes)
    scale = 65536.0
    for i in range(1, steps + 1):
        overflow, lost = skips and i % 50 == 0, skips and i == 75
        norms = {name: 2.0**-k for k, name in enumerate(layers)}
        if overflow and layers:
            norms[layers[-1]] = math.inf
        ledger.append(
            epoch=(i - 1) // 100,
            batch=(i - 1) % 100,
            micro_batches=1,
            loss=math.nan if lost else 1 + 3 * (steps - i) / max(steps - 1, 1),
            scale=scale,
            grad_norm=math.inf if overflow else 0.5 + i % 5,
            lr=1e-3,
            lost_share=0.0125 if i % 100 == 0 else None,
            reason="overflow" if overflow else "forward-nonfinite" if lost else None,
            layer_norms=norms if layers and i % 10 == 0 else None,
        )
        scale /= 2 if overflow else 1
        if skips and i == 120:
            ledger.event("rollback", "weights are those of step 100", values={"to": 100})
    if stop:
        ledger.event("stop", stop)
    if close:
        ledger.close()
    else:
        ledger.flush()
    return ledger
