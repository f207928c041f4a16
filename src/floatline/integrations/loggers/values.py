"""The numbers of a step under the names that the tools show: floatline/loss, floatline/scale, floatline/skipped, …"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from floatline.errors import FormatError
from floatline.formats import Format, find_format
from floatline.ledger.account import Account
from floatline.ledger.lines import Step

PREFIX = "floatline/"


def values_of(step: Step, account: Account, fmt: Format | None) -> dict[str, float]:
    """Everything of a step that is a number.

    Numerics:
        The ledger's numbers as they are. `skipped`, and `skipped_REASON` from the first of its kind on, are totals of
        the run: they are true however seldom a row is logged. `headroom` is how often the largest element of any
        gradient can double at least: log2(max / norm x scale x micro-batches) of the layer nearest to the ceiling,
        -inf where a norm is not finite. It is there where norms by layer were recorded and the format is known.

    Args:
        step: The step.
        account: Totals of the run, with it.
        fmt: The format of the plan; None where it is not known.
    """
    values = dict(step.numbers)
    if "epoch" in step.counts:
        values["epoch"] = step.counts["epoch"]
    values["skipped"] = account.num_skipped
    values |= {f"skipped_{reason.replace('-', '_')}": count for reason, count in account.skipped.items() if count}
    norms = step.layer_norms or {}
    values |= {f"layer_norm/{name}": norm for name, norm in norms.items()}
    if norms and fmt is not None:
        held = step.numbers.get("scale", 1.0) * step.counts.get("micro_batches", 1)
        highest = max(norm * held if math.isfinite(norm) else math.inf for norm in norms.values())
        values["headroom"] = math.log2(fmt.max / highest) if 0 < highest < math.inf else -math.inf
        if highest == 0:
            del values["headroom"]
    return {f"{PREFIX}{name}": float(value) for name, value in values.items()}


def describe_format(metadata: Mapping[str, Any]) -> Format | None:
    """The format that the plan in the metadata computes in; None where there is none."""
    plan = plan_of(metadata)
    try:
        return find_format(plan["compute"]) if "compute" in plan else None
    except FormatError:
        return None


def plan_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The plan in the metadata; empty where there is none."""
    plan = metadata.get("plan")
    return cast("dict[str, Any]", plan) if isinstance(plan, dict) else {}
