"""Exponents: relations solved exactly, weights that follow, values that must stay, and why."""

from fractions import Fraction

from floatline.folding.exponents import Exponents
from floatline.folding.homogeneity import Relation


def solve(*relations, weights=(), sizes=None):
    return Exponents(
        [Relation(terms, why) for terms, why in relations],
        may_follow=lambda unknown: unknown in weights,
        size=lambda unknown: (sizes or {}).get(unknown, 0.0),
    )


def test_equal_values_are_one_group_and_a_square_has_twice_the_exponent():
    found = solve(({"a": 1, "b": -1}, "sum"), ({"c": 1, "b": -2}, "square"))
    (root,) = found.groups()
    chosen = found.assign({root: Fraction(2) / found.groups()[root]["a"]})
    assert chosen == {"a": 2, "b": 2, "c": 4}


def test_a_weight_follows_from_the_values_that_it_stands_between():
    found = solve(({"out": 1, "x": -1, "w": -1}, "mm"), weights={"w"})
    assert set(found.groups()) == {"x", "out"}
    assert found.assign({"x": -3}) == {"x": -3, "w": 3}
    assert found.assign({"x": -3, "out": -3}) == {"x": -3, "out": -3}


def test_a_weight_that_is_used_twice_binds_what_is_around_it():
    uses = [({"out": 1, "x": -1, "w": -1}, "one"), ({"y": 1, "z": -1, "w": -1}, "two")]
    found = solve(*uses, ({"x": 1}, "silu"), ({"z": 1}, "silu"), weights={"w"})
    (root,) = found.groups()
    assert set(found.assign({root: 1})) == {"out", "y", "w"}


def test_a_norm_undoes_what_it_reads():
    norm = (
        ({"square": 1, "x": -2}, "pow"),
        ({"r": 1, "square": Fraction(1, 2)}, "rsqrt"),
        ({"n": 1, "x": -1, "r": -1}, "mul"),
    )
    found = solve(*norm)
    assert found.why_zero("n") == "mul"
    assert found.why_zero("x") is None


def test_what_must_stay_tells_the_first_reason():
    found = solve(({"a": 1, "b": -1}, "sum"), ({"b": 1, "c": -1}, "later sum"), ({"c": 1}, "gelu"))
    assert {found.why_zero(name) for name in "abc"} == {"gelu"}
    assert found.groups() == {}


def test_of_two_values_that_are_multiplied_the_smaller_one_stays():
    found = solve(({"out": 1, "a": -1, "b": -1}, "mul"), sizes={"a": 2.0, "b": 900.0, "out": 1800.0})
    assert found.why_zero("a") == "mul multiplies two values, and one must stay as it is"
    (root,) = found.groups()
    assert set(found.assign({root: -1})) == {"b", "out"}


def test_a_contradiction_leaves_nothing_to_choose():
    assert solve(({"a": 1, "b": -1}, "same"), ({"a": 1, "b": -2}, "twice")).groups() == {}
