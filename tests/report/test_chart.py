"""The floatline chart: what it says is what was counted."""

import xml.etree.ElementTree as ET

import torch
from rich.console import Console

from floatline.numerics.ranges import measure_ranges
from floatline.report.chart import draw_ranges


def chart_of(values: list[float], to: str = "fp16", **options):
    return draw_ranges(measure_ranges(torch.tensor(values), to), to, **options)


def test_the_summary_gives_the_counted_shares():
    chart = chart_of([1e-9, 3e-6, 0.5, 7e4])
    assert chart.summary == "25.0 % become zero, 25.0 % subnormal, 25.0 % fit, 25.0 % overflow"


def test_a_share_too_small_to_round_is_not_called_zero():
    chart = draw_ranges(measure_ranges(torch.tensor([1e-9] + [1.0] * 9999), "fp16"), "fp16")
    assert chart.summary.startswith("< 0.1 % become zero")


def test_every_value_stands_in_one_column():
    values = (torch.randn(5000) * torch.exp(torch.randn(5000) * 8)).tolist()
    for to in ("fp16", "bf16", "fp8_e4m3fn"):
        assert abs(sum(column.share for column in chart_of(values, to).columns) - 1) < 1e-9


def test_columns_take_the_colour_of_what_happens_to_them():
    zones = {column.first: column.zone for column in chart_of([1.0]).columns}
    assert (zones[-26], zones[-25], zones[-15], zones[-14], zones[15], zones[16]) == (
        "zero",
        "subnormal",
        "subnormal",
        "normal",
        "normal",
        "overflow",
    )


def test_the_marks_stand_at_the_format_s_limits():
    assert {name: exponent for exponent, name in chart_of([1.0]).marks} == {
        "floor": -24,
        "subnormal line": -14,
        "ceiling": 16,
    }


def test_a_wide_range_is_folded_into_the_width():
    chart = chart_of([1e-38, 1.0, 1e38], "bf16", width=40)
    assert len(chart.columns) <= 40
    assert max(len(line) for line in str(chart).splitlines()[2:]) <= 40


def test_the_smallest_share_is_visible():
    lines = str(chart_of([1.0] * 100_000 + [1e-3])).splitlines()
    assert sum(character != " " for character in lines[7]) == 2


def test_an_empty_tensor_can_be_drawn():
    assert "0 % fit" in str(chart_of([0.0, 0.0]))


def test_plain_text_has_no_escape_codes_and_rich_has_colours():
    chart = chart_of([1e-9, 1.0])
    assert "\x1b" not in str(chart)
    console = Console(force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(chart)
    assert "\x1b[31m" in capture.get()


def test_the_svg_escapes_the_sign_of_a_small_share():
    ET.fromstring(chart_of([1.0] * 100_000 + [1e-3]).svg())


def test_the_svg_is_well_formed_and_escapes_its_title():
    svg = chart_of([1e-9, 1.0], title="<script>alert(1)</script> & co").svg()
    root = ET.fromstring(svg)
    assert "script" not in {element.tag.split("}")[1] for element in root.iter()}
    assert "<script>" not in svg
    named = "{http://www.w3.org/2000/svg}title"
    assert sum(e.tag.endswith("rect") and e.find(named) is not None for e in root.iter()) == 2
