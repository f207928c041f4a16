"""Exponents: the relations of a graph solved, as groups of values that can be scaled each on its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction

from floatline.folding.homogeneity import Relation, Unknown

_Row = dict[Unknown, Fraction]


class Exponents:
    """All sets of exponents that meet the relations.

    Every unknown is a multiple of the exponent of its group; groups can be chosen freely. What a group must not be
    changed by is kept: an unknown that is zero knows why. Weights that stand between two groups follow from both.

    Numerics:
        Exact: fractions, no floating-point numbers. Checked by tests/folding/test_exponents.py.

    Attributes:
        zeros: Unknowns, by the root of their group, that must stay as they are, and what asks for it.
    """

    def __init__(
        self,
        relations: Iterable[Relation],
        *,
        may_follow: Callable[[Unknown], bool],
        size: Callable[[Unknown], float],
    ) -> None:
        """Solve the relations.

        Args:
            relations: What must hold.
            may_follow: Whether an unknown is a weight or a setting: it takes what the values around it leave.
            size: How large a value is; of two values that are multiplied the smaller one stays as it is.
        """
        self.zeros: dict[Unknown, str] = {}
        self._parents: dict[Unknown, tuple[Unknown, Fraction]] = {}
        self._members: dict[Unknown, set[Unknown]] = defaultdict(set)
        self._followers: list[tuple[Unknown, _Row]] = []
        left = [(dict(relation.terms), relation.why) for relation in relations]
        rows = [({unknown: Fraction(factor) for unknown, factor in terms.items()}, why) for terms, why in left]
        for terms, _ in rows:
            for unknown in terms:
                self._members[self._find(unknown)[0]].add(unknown)
        self._solve(rows, may_follow, size)

    def groups(self) -> dict[Unknown, dict[Unknown, Fraction]]:
        """Roots of the groups that can be chosen, with each member's multiple of the root's exponent."""
        following = {root for root, _ in self._followers}
        return {
            root: {member: self._find(member)[1] for member in members}
            for root, members in self._members.items()
            if root not in self.zeros and root not in following
        }

    def assign(self, chosen: Mapping[Unknown, Fraction | int]) -> dict[Unknown, Fraction]:
        """The exponent of every unknown, from those of the groups; groups that are not named stay as they are."""
        roots: dict[Unknown, Fraction] = {root: Fraction(value) for root, value in chosen.items()}

        def value(unknown: Unknown) -> Fraction:
            root, multiple = self._find(unknown)
            return roots.get(root, Fraction(0)) * multiple

        for root, row in reversed(self._followers):  # what was taken out last knows no other that follows
            roots[root] = sum((factor * value(other) for other, factor in row.items()), Fraction(0))
        found = {member: value(member) for members in self._members.values() for member in members}
        return {member: value for member, value in found.items() if value}

    def why_zero(self, unknown: Unknown) -> str | None:
        """What asks for a value as it is; None where it can be scaled."""
        return self.zeros.get(self._find(unknown)[0])

    def _find(self, unknown: Unknown) -> tuple[Unknown, Fraction]:
        """The root of the group and the unknown's multiple of it."""
        path: list[Unknown] = []
        factor = Fraction(1)
        root = unknown
        while root in self._parents:
            path.append(root)
            root, own = self._parents[root]
            factor *= own
        whole = factor
        for one in path:  # shorten the path
            own = self._parents[one][1]
            self._parents[one] = (root, whole)
            whole /= own
        return root, factor

    def _reduce(self, row: _Row) -> _Row:
        found: _Row = defaultdict(Fraction)
        for unknown, factor in row.items():
            root, multiple = self._find(unknown)
            if root not in self.zeros:
                found[root] += factor * multiple
        return {root: factor for root, factor in found.items() if factor}

    def _solve(
        self,
        rows: list[tuple[_Row, str]],
        may_follow: Callable[[Unknown], bool],
        size: Callable[[Unknown], float],
    ) -> None:
        while rows := self._settle(rows):
            # Three unknowns or more are left in every row. A weight follows from the values that it stands between.
            place = next(
                ((number, root) for number, (row, _) in enumerate(rows) if (root := self._weight(row, may_follow))),
                None,
            )
            if place is None:
                row, why = rows[0]
                smallest = min(row, key=lambda root: max(map(size, self._members[root])))
                self.zeros[smallest] = f"{why} multiplies two values, and one must stay as it is"
                continue
            number, (root,) = place
            row, _ = rows.pop(number)
            follows = {other: -factor / row[root] for other, factor in row.items() if other != root}
            self._followers.append((root, follows))
            rows = [(self._without(one, root, follows), why) for one, why in rows]

    def _weight(self, row: _Row, may_follow: Callable[[Unknown], bool]) -> tuple[Unknown] | None:
        return next(((root,) for root in row if all(map(may_follow, self._members[root]))), None)

    @staticmethod
    def _without(row: _Row, root: Unknown, follows: _Row) -> _Row:
        """A row with one unknown replaced by what it follows from."""
        if root not in row:
            return row
        found: _Row = defaultdict(Fraction, {other: factor for other, factor in row.items() if other != root})
        for other, factor in follows.items():
            found[other] += row[root] * factor
        return dict(found)

    def _settle(self, rows: list[tuple[_Row, str]]) -> list[tuple[_Row, str]]:
        """Use rows of one or two unknowns until there are none."""
        while True:
            left: list[tuple[_Row, str]] = []
            for row, why in rows:
                reduced = self._reduce(row)
                if len(reduced) > 2:
                    left.append((reduced, why))
                elif len(reduced) == 2:
                    self._join(reduced)
                elif reduced:
                    self.zeros[next(iter(reduced))] = self._first_reason(row, why)
            if len(left) == len(rows):
                return left
            rows = left

    def _first_reason(self, row: _Row, why: str) -> str:
        """What asks for a value as it is: of two that are equal, what asks for the other."""
        reasons = [reason for unknown in row if (reason := self.why_zero(unknown))]
        if len(reasons) > 1:
            return f"{why} must give what it gave"
        return reasons[0] if reasons else why

    def _join(self, row: _Row) -> None:
        (kept, factor), (root, own) = row.items()
        self._parents[root] = (kept, -factor / own)
        self._members[kept] |= self._members.pop(root)
