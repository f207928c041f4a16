"""The axis of a format's limits: percent from end to end, and a strip without gaps."""

import itertools
import re

import pytest

from floatline.report.document.format_scale import FormatScale

FP16 = FormatScale([-24, -14, 16])


def test_limits_stand_in_order_with_room_at_both_ends():
    places = [FP16.at(limit) for limit in FP16.limits]
    assert 0.0 < places[0] < places[1] < places[2] < 100.0
    assert places[0] == pytest.approx(100.0 - places[2])


@pytest.mark.parametrize(("exponent", "place"), [(-200, 0.0), (200, 100.0), (-4.0, 50.0)])
def test_what_is_beyond_the_ends_stands_at_them(exponent, place):
    assert FP16.at(exponent) == pytest.approx(place)


def test_the_zones_of_a_strip_meet_and_fill_it():
    found = [
        tuple(map(float, pair))
        for pair in re.findall(r'x="([\d.]+)%" .*? width="([\d.]+)%"', "".join(FP16.zones(0, 8)))
    ]
    assert len(found) == 4
    assert found[0][0] == 0.0
    for (left, width), (following, _) in itertools.pairwise(found):
        assert left + width == pytest.approx(following, abs=0.02)
    assert sum(found[-1]) == pytest.approx(100.0, abs=0.02)


def test_each_limit_is_named_with_its_number():
    assert re.findall(r">([^<]+)</text>", "".join(FP16.head())) == [
        "floor",
        "2⁻²⁴",
        "subnormal",
        "2⁻¹⁴",
        "ceiling",
        "2¹⁶",
    ]
