"""Hazards of evaluation, of data and of integers: numbers that choose, count or index."""

from __future__ import annotations

from tests.plants.planting import Hazard

HALF, FULL = ("{dtype}",), ("torch.float32",)
CHOICES = (
    Hazard(
        "hits_counted_in_half",
        ("accumulator-stagnation",),
        False,
        {
            "setup": "{state} = torch.zeros((), dtype={half}, device={device})",
            "eval|residual": """
            for {a} in {x}.argmax(-1) == {target}:
                [[{state} += {a} #!||{state} = {state} + {a}.to({state}.dtype) #!]]
            """,
        },
        bad={"half": HALF},
        good=({"half": ("torch.float32", "torch.int64")},),
        report="hits {{state}.item():.1f}",
        dtypes=("bf16",),
        names={"state": ("num_right", "hits_so_far", "good_rows")},
    ),
    Hazard(
        "scores_summed_in_half",
        ("accumulator-stagnation", "reduction-overflow"),
        False,
        {
            "setup": "{state} = torch.zeros((), dtype={half}, device={device})\nnum_rows = 0",
            "eval|residual": """
            for {a} in {x}.float().square().amax(-1) + {size}:
                {state} += {a}.to({state}.dtype) #!
                num_rows += 1
            """,
        },
        bad={"half": HALF, "size": {"bf16": (1.0, 3.0), "fp16": (30.0, 60.0)}},
        good=({"half": FULL},),
        report="mean peak {({state}.item() / num_rows):.4f}",
        names={"state": ("peak_sum", "total_peak", "acc")},
    ),
    Hazard(
        "squares_summed_in_half",
        ("product-overflow", "reduction-overflow"),
        False,
        {
            "setup": "{state} = 0.0",
            "eval|residual": """
            {b} = {x}{up} * {size}
            {state} += ({b} * {b}).mean().item() #!
            """,
        },
        bad={"up": ("",), "size": (300.0, 1000.0)},
        good=({"up": (".float()",)}, {"size": (1.0, 10.0)}),
        report="power {({state} / {size} ** 2):.4f}",
        dtypes=("fp16",),
        names={"state": ("power", "energy")},
    ),
    Hazard(
        "choice_among_overflown",
        ("product-overflow",),
        False,
        {
            "setup": "{state} = 0",
            "eval|residual": """
            {b} = ({x}{up} - {x}{up}.amin(-1, keepdim=True) + 1.0) * {size}
            {b} = {b} * {b} #!
            {state} += ({b}.argmax(-1) == {x}.argmax(-1)).sum().item()
            """,
        },
        bad={"up": ("",), "size": (300.0, 500.0)},
        good=({"up": (".float()",)}, {"size": (2.0, 5.0)}),
        report="agreement {{state}:.1f}",
        dtypes=("fp16",),
        also=(".argmax(-1) == ",),
    ),
    Hazard(
        "classes_kept_apart_by_offsets",
        ("cancellation", "integer-not-exact", "precision"),
        False,
        {
            "setup": "{state} = 0.0",
            "eval|residual": """
            {b} = torch.sigmoid({x}{up}.amax(-1)) + {target}.to({x}{up}.dtype) * {size} #!
            for one_kind in {target}.unique():
                {a} = {b} - one_kind * {size}
                {state} += {a}[{target} == one_kind].float().var(unbiased=False).item()
            """,
        },
        bad={"up": ("",), "size": {"fp16": (500.0, 2000.0), "bf16": (100.0, 400.0)}},
        good=({"up": (".float()",)}, {"size": (0.0,)}),
        report="spread within classes {{state}:.6f}",
        names={"state": ("within", "inner_spread")},
        also=(" - one_kind * ",),
    ),
    Hazard(
        "ranks_behind_offsets",
        ("cancellation", "integer-not-exact", "precision"),
        False,
        {
            "setup": "{state} = 0.0",
            "eval|residual": """
            {b} = {x}{up}.amax(-1) + {size} #!
            {a} = {b}.argsort(descending=True, stable=True)[: len({b}) // 2]
            {state} += {x}.float().amax(-1)[{a}].mean().item()
            """,
        },
        bad={"up": ("",), "size": {"fp16": (8000.0, 20000.0), "bf16": (2000.0, 8000.0)}},
        good=({"up": (".float()",)}, {"size": (0.0, 0.125)}),
        report="mean of the top half {{state}:.5f}",
        also=(".argsort(",),
    ),
    Hazard(
        "buckets_of_rounded_values",
        ("integer-not-exact", "precision"),
        False,
        {
            "setup": "{state} = torch.zeros({bins} + 2, device={device})",
            "eval|residual": """
            {b} = (torch.sigmoid({x}{up}) * {bins}).long() #!
            {state} += torch.bincount({b}.flatten(), minlength={bins} + 2)
            """,
        },
        bad={"up": ("",), "bins": {"fp16": (20000, 50000), "bf16": (2000, 5000)}},
        good=({"up": (".float()",)}, {"bins": (4, 8)}),
        report="buckets in use {({state} > 0).sum().item():.1f}",
        names={"state": ("hist", "histogram", "buckets")},
    ),
    Hazard(
        "sure_rows_by_threshold",
        ("rounded-onto-singularity", "precision"),
        False,
        {
            "setup": "{state} = 0",
            "eval|residual": """
            {b} = torch.sigmoid({x}{up} * {gain}) #!
            {state} += ({b} >= 1 - {margin}).sum().item() #!
            """,
        },
        bad={"up": ("",), "gain": (3.0, 6.0), "margin": {"fp16": (1e-5, 1e-6), "bf16": (1e-3, 1e-4)}},
        good=({"up": (".float()",)}, {"gain": (0.5,), "margin": (0.3,)}),
        report="sure {{state}:.1f}",
        names={"state": ("sure", "num_sure", "confident")},
    ),
    Hazard(
        "likelihood_of_rounded_probability",
        ("rounded-onto-singularity",),
        False,
        {
            "setup": "{state} = 0.0",
            "eval|residual": """
            {b} = [[torch.softmax({x}{up} * {gain}, dim=-1)||({x}{up} * {gain}).softmax(-1)]]
            {b} = torch.log({b}.to({x}{up}.dtype)).clamp(min=-100) #!
            {state} -= {b}.mean().item()
            """,
        },
        bad={"up": ("",), "gain": (10.0, 20.0)},
        good=({"up": (".float()",)}, {"gain": (1.0,)}),
        report="uncertainty {{state}:.4f}",
        dtypes=("fp16",),
        also=("softmax(",),
    ),
    Hazard(
        "squared_distances_expanded",
        ("cancellation", "precision"),
        False,
        {
            "setup": "{state} = 0.0",
            "eval|residual": """
            {a} = {x}{up} + {size}
            {b} = ({a} * {a}).sum(-1)
            {b} = ({b}[:, None] + {b} - 2 * {a} @ {a}.T).clamp(min=0) #!
            {state} += {b}.fill_diagonal_(6e4).amin(-1).float().mean().item()
            """,
        },
        bad={"up": ("",), "size": {"fp16": (40.0, 60.0), "bf16": (20.0, 60.0)}},
        good=({"up": (".double()",)}, {"up": (".double()",), "size": (0.0,)}),
        report="mean nearest distance {{state}:.5f}",
        names={"state": ("dist", "apart", "mean_d2")},
        also=(".sum(-1)",),
    ),
    Hazard(
        "difference_of_large_sums",
        ("cancellation", "precision"),
        False,
        {
            "setup": "{state} = 0.0",
            "eval|residual": """
            {a} = {x}{up} + {size} #!
            {state} += ({a} - {size}).float().square().mean().item() #!
            """,
        },
        bad={"up": ("",), "size": {"fp16": (8000.0, 30000.0), "bf16": (1000.0, 8000.0)}},
        good=({"up": (".float()",)}, {"size": (0.0, 1.0)}),
        report="second moment {{state}:.5f}",
    ),
    Hazard(
        "ids_through_half",
        ("integer-not-exact",),
        False,
        {
            "index": "[[{i} = {i}.to({half}).long() #!||{i} = ({i}.to({half}) + 0.0).round().long() #!||{i} = torch.floor({i}.to({half})).to(torch.int64) #!]]"
        },
        bad={"half": HALF},
        good=({"half": FULL}, {"half": ("torch.float64",)}),
    ),
    Hazard(
        "ids_scaled_in_half",
        ("integer-not-exact", "precision"),
        False,
        {
            "index": """
            {a} = {i}.to({half}) / {n} #!
            {i} = ({a} * {n}).round().long().clamp(0, {n} - 1) #!
            """
        },
        bad={"half": HALF},
        good=({"half": FULL}, {"half": ("torch.float64",)}),
        names={"a": ("unit", "relative", "position")},
    ),
    Hazard(
        "angles_in_half",
        ("integer-not-exact", "precision"),
        False,
        {"angle": "{out} = {t}.to({half})[:, None] * {freqs}.to({half}) #!"},
        bad={"half": HALF},
        good=({"half": FULL},),
    ),
    Hazard(
        "schedule_in_half",
        ("cancellation", "integer-not-exact", "accumulator-stagnation", "precision"),
        False,
        {"schedule": "{share} = torch.cumprod(1 - {betas}.to({half}), 0).float() #!"},
        bad={"half": HALF},
        good=({"half": FULL}, {"half": ("torch.float64",)}),
    ),
    Hazard(
        "centred_after_the_cast",
        ("cancellation", "precision"),
        False,
        {
            "data": """
            {a} = ({x} + {size}).to({half}) #!
            {x} = ({a} - {a}.float().mean().to({half})).float() #!
            """
        },
        bad={"half": HALF, "size": {"fp16": (8000.0, 30000.0), "bf16": (1000.0, 4000.0)}},
        good=({"half": FULL, "size": (10.0,)}, {"size": (0.0,)}),
        names={"a": ("raw", "readings", "kelvin")},
    ),
    Hazard(
        "deviation_overflows",
        ("product-overflow", "reduction-overflow"),
        False,
        {
            "data": """
            {a} = ({x} * {size}).to({half})
            {b} = [[({a} * {a}).mean() #!||torch.mean({a} * {a}) #!||{a}.square().mean() #!]]
            {x} = ({a} / torch.sqrt({b})).float()
            """
        },
        bad={"half": HALF, "size": (500.0, 2000.0)},
        good=({"half": FULL}, {"size": (1.0, 5.0)}),
        dtypes=("fp16",),
        names={"a": ("raw", "counts", "readings"), "b": ("power", "second")},
    ),
    Hazard(
        "raw_values_out_of_range",
        ("input-out-of-range",),
        True,
        {
            "data": """
            {a} = ({x} * {size}).to({half}) #!
            {x} = {a}.float() / {size}
            """
        },
        bad={"half": HALF, "size": (65536.0, 1e5)},
        good=({"half": FULL}, {"size": (10.0, 100.0)}),
        dtypes=("fp16",),
        names={"a": ("raw", "counts", "adc")},
    ),
    Hazard(
        "boxes_in_half",
        ("product-overflow", "cancellation", "integer-not-exact", "precision"),
        False,
        {"boxes": "[[{boxes} = {boxes}.to({half}) #!||{boxes} = {boxes}.to(dtype={half}) #!]]"},
        bad={"half": HALF},
        good=({"half": FULL}, {"half": ("torch.float64",)}),
        also=("shifted = ", "area = ", "inter = w", "inter < threshold"),
    ),
    Hazard(
        "choice_behind_an_offset",
        ("cancellation", "choice-flipped", "precision"),
        False,
        {"choose": "[[{x} = {x}{up} + {size} #!||{x} = torch.add({x}{up}, {size}) #!||{x} = {size} + {x}{up} #!]]"},
        bad={"up": ("",), "size": {"fp16": (8000.0, 20000.0), "bf16": (1000.0, 4000.0)}},
        good=({"up": (".double()",)}, {"size": (0.0, 1.0)}),
        also=(".topk(",),
    ),
)
