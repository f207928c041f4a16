"""Hazards of arithmetic in a loss, a layer or an attention: overflow, underflow, rounding onto a singularity."""

from __future__ import annotations

from tests.plants.planting import Hazard

ADDED = "{out} = {call}\n{loss} = {loss} + {weight} * {out}"
FP32 = {"up": (".float()",)}
LOSSES = (
    Hazard(
        "exponential",
        ("exp-overflow",),
        True,
        {"aux": ADDED},
        bad={"up": ("",), "gain": (8.0, 16.0), "weight": (1e-3,)},
        good=(FP32, {"gain": (0.5, 1.0)}),
        function=(
            ("x",),
            """
            {a} = {x}{up} - {x}{up}.mean()
            [[{b} = torch.exp({a}.abs().clamp(max=4) * {gain}) #!||{b} = ({a}.abs().clamp(max=4) * {gain}).exp() #!]]
            return torch.log1p({b}.mean()) #!
            """,
        ),
        dtypes=("fp16",),
    ),
    Hazard(
        "softplus_by_hand",
        ("exp-overflow",),
        True,
        {"aux": ADDED},
        bad={"up": ("",), "gain": (20.0, 40.0), "weight": (1e-3,)},
        good=(FP32, {"gain": (0.5, 1.0)}),
        function=(("x",), "return torch.log(1 + torch.exp({gain} * {x}{up}.clamp(-1.5, 1.5))).mean() #!"),
        dtypes=("fp16",),
    ),
    Hazard(
        "sum_of_magnitudes",
        ("reduction-overflow",),
        True,
        {"aux": ADDED},
        bad={"up": ("",), "gain": (3000.0, 8000.0), "weight": (1e-9,)},
        good=(FP32, {"gain": (0.1, 1.0)}),
        function=(("x",), "[[return torch.sum({x}{up}.abs() * {gain}) #!||return ({x}{up} * {gain}).abs().sum() #!]]"),
        dtypes=("fp16",),
    ),
    Hazard(
        "squares",
        ("product-overflow",),
        True,
        {"aux|inner": ADDED},
        bad={"up": ("",), "gain": (300.0, 1000.0), "weight": (1e-9,)},
        good=(FP32, {"gain": (0.1, 1.0)}),
        function=(
            ("x",),
            """
            {a} = {x}{up} * {gain}
            [[return ({a} * {a}).mean() #!||return {a}.mul({a}).mean() #!||return torch.square({a}).mean() #!]]
            """,
        ),
        dtypes=("fp16",),
    ),
    Hazard(
        "cubes",
        ("product-overflow",),
        True,
        {"aux": ADDED},
        bad={"up": ("",), "gain": (60.0, 100.0), "weight": (1e-10,)},
        good=(FP32, {"gain": (0.1, 0.5)}),
        function=(
            ("x",),
            """
            {a} = {x}{up} * {gain}
            {b} = {a} * {a} * {a} #!
            return {b}.abs().mean()
            """,
        ),
        dtypes=("fp16",),
    ),
    Hazard(
        "log_of_softmax",
        ("rounded-onto-singularity",),
        True,
        {"aux": ADDED},
        bad={"up": ("",), "gain": (6.0, 9.0), "weight": (1e-3,)},
        good=(FP32, {"gain": (0.5, 1.0)}),
        function=(
            ("x",),
            """
            [[{a} = torch.softmax({x}{up}.clamp(-4, 4) * {gain}, dim=-1) #!||{a} = ({x}{up}.clamp(-4, 4) * {gain}).softmax(-1) #!]]
            [[return -torch.log({a}).mean() #!||return -{a}.log().mean() #!]]
            """,
        ),
        dtypes=("fp16",),
        names={"a": ("p", "prob", "probs")},
    ),
    Hazard(
        "log_of_complement",
        ("rounded-onto-singularity", "eps-underflow"),
        True,
        {"aux": ADDED},
        bad={"up": ("",), "gain": {"fp16": (6.0, 10.0), "bf16": (4.0, 8.0)}, "weight": (1e-3,)},
        good=(FP32, {"gain": (0.2,)}),
        function=(
            ("x",),
            """
            [[{a} = torch.sigmoid({x}{up}.clamp(-1.6, 1.6) * {gain}) #!||{a} = ({x}{up}.clamp(-1.6, 1.6) * {gain}).sigmoid() #!]]
            return -torch.log(1 - {a}).mean() #!
            """,
        ),
        names={"a": ("p", "prob", "probs")},
    ),
    Hazard(
        "probability_clamped_below_one",
        ("eps-underflow", "rounded-onto-singularity", "cancellation"),
        True,
        {"aux": ADDED},
        bad={"up": ("",), "gain": (8.0, 12.0), "eps": {"fp16": (1e-6, 1e-7), "bf16": (1e-4, 1e-6)}, "weight": (1e-3,)},
        good=(FP32, {"gain": (0.3,)}),
        function=(
            ("x",),
            """
            {a} = torch.sigmoid({x}{up} * {gain}).clamp({eps}, 1 - {eps}) #!
            return -(0.5 * {a}.log() + 0.5 * (1 - {a}).log()).mean() #!
            """,
        ),
        names={"a": ("p", "prob", "probs")},
    ),
    Hazard(
        "guard_of_a_distance",
        ("eps-underflow",),
        True,
        {"aux": ADDED},
        bad={"up": ("",), "eps": (1e-8, 1e-9, 1e-12), "weight": (1e-3,)},
        good=(FP32, {"eps": (1e-3, 1e-2)}),
        function=(
            ("x",),
            """
            {a} = {x}{up}[:32, None] - {x}{up}[None, :32]
            [[return torch.sqrt(({a} * {a}).mean(-1) + {eps}).mean() #!||return ((({a} * {a}).mean(-1) + {eps}).sqrt()).mean() #!]]
            """,
        ),
        dtypes=("fp16",),
    ),
    Hazard(
        "guard_of_a_quotient",
        ("eps-underflow",),
        True,
        {"aux": ADDED},
        bad={"up": ("",), "eps": (1e-8, 1e-10), "weight": (1e-3,)},
        good=(FP32, {"eps": (1e-3, 1e-2)}),
        function=(
            ("x",),
            """
            {a} = {x}{up}[:32] - {x}{up}[:1]
            {b} = {a}.abs().mean(-1, keepdim=True)
            [[return ({a} / ({b} + {eps})).square().mean() #!||return torch.square({a} / ({b} + {eps})).mean() #!]]
            """,
        ),
        dtypes=("fp16",),
    ),
    Hazard(
        "steep_reciprocal",
        ("gradient-overflow",),
        True,
        {"aux": ADDED},
        bad={"up": ("",), "eps": (1e-3, 5e-4), "weight": (1e-8,)},
        good=(FP32, {"eps": (1.0, 2.0)}),
        function=(
            ("x",),
            """
            {a} = {x}{up} - {x}{up}.detach() + {eps}
            return (1 / {a}).mean() #!
            """,
        ),
        dtypes=("fp16",),
        also=(".backward()",),
    ),
    Hazard(
        "constant_for_the_mask",
        ("scalar-out-of-range",),
        True,
        {"aux": ADDED},
        bad={"up": ("",), "low": ("-1e9", "-1e5", "-9e15"), "weight": (1e-2,)},
        good=(FP32, {"low": ("-1e4", 'float("-inf")', "-6e4")}),
        function=(
            ("x", "target"),
            """
            {a} = torch.nn.functional.one_hot({target}, {x}.size(-1)).bool()
            {b} = {x}{up}.masked_fill({a}, {low}).amax(-1) #!
            return torch.relu({b} - {x}{up}[{a}] + 1).mean()
            """,
        ),
        dtypes=("fp16",),
        raises="without overflow",
    ),
    Hazard(
        "mask_that_is_added",
        ("scalar-out-of-range", "fully-masked-softmax"),
        True,
        {"aux": ADDED},
        bad={"up": ("",), "low": ("-1e9", "-1e5", "-1e8"), "weight": (1e-2,)},
        good=(FP32, {"low": ("-1e4", "-1e3")}),
        function=(
            ("x", "target"),
            """
            {a} = ({target} == {target}[0]).to({x}{up}.dtype).unsqueeze(-1) * {low} #!
            {b} = torch.softmax({x}{up} + {a}, dim=-1) #!
            return ({b} * {b}).sum(-1).mean()
            """,
        ),
        dtypes=("fp16",),
    ),
    Hazard(
        "mask_in_attention",
        ("scalar-out-of-range",),
        True,
        {
            "attention": "[[{scores} = {scores}{up}.masked_fill({mask}, {low}) #!||{scores} = torch.masked_fill({scores}{up}, {mask}, {low}) #!]]"
        },
        bad={"up": ("",), "low": ("-1e9", "-1e5", "-1e30")},
        good=(FP32, {"low": ("-1e4", "-3e4")}),
        dtypes=("fp16",),
        raises="without overflow",
    ),
    Hazard(
        "attention_scaled_late",
        ("activation-overflow", "product-overflow"),
        True,
        {
            "attention": """
            {scores} = ({q}{up} * {size}) @ ({k}{up} * {size}).transpose(-2, -1) #!
            {scores} = {scores} / ({size} * {size} * {q}.size(-1) ** 0.5) #!
            """
        },
        bad={"up": ("",), "size": (512.0, 2048.0)},
        good=({"size": (1.0, 2.0)},),
        dtypes=("fp16",),
    ),
    Hazard(
        "shifted_scores",
        ("cancellation", "precision"),
        False,
        {"attention": "{scores} = {scores}{up} + {size} #!"},
        bad={"up": ("",), "size": {"fp16": (20000.0,), "bf16": (2000.0, 8000.0)}},
        good=({"size": (0.0, 1.0)}, FP32),
    ),
    Hazard(
        "variance_by_two_means",
        ("cancellation",),
        False,
        {"aux": "{state} = {call}\n{loss} = {loss} + 1e-6 * {state}"},
        bad={"up": ("",), "size": {"fp16": (30.0, 60.0), "bf16": (10.0, 30.0)}},
        good=({"up": (".float()",), "size": (5.0,)}, {"size": (0.0,)}),
        function=(
            ("x",),
            """
            {a} = {x}{up} + {size}
            [[return (({a} * {a}).mean() - {a}.mean() * {a}.mean()).clamp(min=0) #!||return ({a}.square().mean() - {a}.mean().square()).clamp(min=0) #!]]
            """,
        ),
        report="variance {{state}.item():.5f}",
        names={"state": ("var", "variance", "spread_now")},
    ),
    Hazard(
        "mean_of_an_overflown_sum",
        ("reduction-overflow",),
        False,
        {"aux": "{state} = {call}"},
        bad={"up": ("",), "gain": (3000.0, 9000.0)},
        good=(FP32, {"gain": (0.1, 1.0)}),
        function=(
            ("x",),
            """
            {a} = ({x}{up}.detach() * {gain}).abs().sum() #!
            return torch.nan_to_num({a} / {x}.numel() / {gain}, posinf=0.0) #!
            """,
        ),
        report="mean magnitude {{state}.item():.5f}",
        dtypes=("fp16",),
        names={"state": ("magnitude", "size_now")},
    ),
    Hazard(
        "layer_normalised_by_overflown_squares",
        ("product-overflow",),
        False,
        {
            "features": """
            {a} = {x}{up} * {size}
            {b} = ({a} * {a}).mean([[dim=1, keepdim=True||1, keepdim=True]]) #!
            {x} = ({a} / torch.sqrt({b} + 1e-5)).to({x}.dtype)
            """
        },
        bad={"up": ("",), "size": (1000.0, 3000.0)},
        good=(FP32, {"size": (2.0, 4.0)}),
        dtypes=("fp16",),
        also=("torch.sqrt(",),
    ),
    Hazard(
        "layer_centred_far_from_zero",
        ("cancellation", "precision"),
        False,
        {
            "features": """
            {a} = {x}{up} + {size} #!
            {x} = ({a} - {size}).to({x}.dtype) #!
            """
        },
        bad={"up": ("",), "size": {"fp16": (4000.0, 16000.0), "bf16": (500.0, 2000.0)}},
        good=(FP32, {"size": (1.0,)}),
    ),
    Hazard(
        "layer_too_large",
        ("activation-overflow", "product-overflow"),
        True,
        {"features": "{x} = ({x}{up} * {size} / {size}).to({x}.dtype) #!"},
        bad={"up": ("",), "size": (1e5, 3e5)},
        good=(FP32, {"size": (2.0, 16.0)}),
        dtypes=("fp16",),
    ),
    Hazard(
        "two_dtypes",
        ("dtype-mismatch",),
        True,
        {"aux": ADDED},
        bad={"up": ("",), "weight": (1e-3,)},
        good=(FP32,),
        function=(
            ("x",),
            """
            {a} = torch.ones({x}.size(-1), 4, device={x}.device)
            return ([[{x}{up} @ {a}||torch.matmul({x}{up}, {a})||torch.mm({x}{up}, {a})]]).square().mean() #!
            """,
        ),
        raises="dtype",
    ),
    Hazard(
        "two_dtypes_by_index",
        ("dtype-mismatch",),
        True,
        {"aux": ADDED},
        bad={"up": ("",), "weight": (1e-6,)},
        good=(FP32,),
        function=(
            ("x", "target"),
            """
            {a} = torch.zeros({x}.size(-1) + 60, {x}.size(-1), device={x}.device)
            {b} = {a}.index_add(0, {target}, {x}{up}) #!
            return {b}.square().mean()
            """,
        ),
        raises="index_add",
    ),
    Hazard(
        "no_kernel_for_half",
        ("unsupported-half-op",),
        True,
        {"aux": ADDED},
        bad={"up": ("",), "weight": (1e-4,)},
        good=(FP32,),
        function=(
            ("x",),
            """
            {a} = {x}{up}.T @ {x}{up} / len({x}) + torch.eye({x}.size(-1), device={x}.device, dtype={x}{up}.dtype)
            return [[torch.linalg.inv({a}).diagonal().mean()||-torch.linalg.slogdet({a})[1] * 0.01||-torch.logdet({a}) * 0.01]] #!
            """,
        ),
        raises="Low precision|not implemented",
    ),
    Hazard(
        "square_in_disabled_region",
        ("autocast-region-misuse", "dtype-mismatch"),
        True,
        {
            "inner": """
            with torch.autocast({device}, enabled=False):
                {a} = torch.eye({x}.size(-1), device={x}.device)
                {out} = ({x}{up} @ {a}).square().mean() #!
            {loss} = {loss} + 1e-3 * {out}
            """
        },
        bad={"up": ("",)},
        good=(FP32,),
        raises="dtype",
    ),
)
