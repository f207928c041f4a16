"""compare_manifests: what is different between two runs. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from floatline.manifests.facts import ManifestFacts
from floatline.precision.holding import KINDS, formats_of, say_formats

# Shares that are further apart than this are told: a sample of 65,536 elements is off by less.
_APART = 0.01


@dataclass(frozen=True)
class ManifestDifference:
    """One thing that is not the same.

    Args:
        what: Such as 'weights'.
        a: How it is in the first run.
        b: How it is in the second.
    """

    what: str
    a: str
    b: str

    def as_json(self) -> dict[str, str]:
        """Its fields."""
        return asdict(self)


def compare_manifests(a: ManifestFacts, b: ManifestFacts) -> list[ManifestDifference]:
    """What is different, first what is held, then what was measured; nothing where both are alike."""
    found = compare_held(a, b)
    measures = dict(_measure(a)), dict(_measure(b))
    for name in dict.fromkeys([*measures[0], *measures[1]]):
        one, other = (measure.get(name) for measure in measures)
        if one is None or other is None or abs(one - other) > _APART:
            found.append(ManifestDifference(name, _say(one), _say(other)))
    return found


def compare_held(a: ManifestFacts, b: ManifestFacts) -> list[ManifestDifference]:
    """The same without what was measured."""
    first, second = dict(_describe(a)), dict(_describe(b))
    names = [*first, *(name for name in second if name not in first)]
    texts = [ManifestDifference(name, first.get(name, "none"), second.get(name, "none")) for name in names]
    return [row for row in texts if row.a != row.b]


def compare_ranks(a: ManifestFacts, b: ManifestFacts) -> list[ManifestDifference]:
    """The same for two processes of a run: what only one of them has a part of is left out.

    ZeRO, Megatron and pipelines give whole layers to one process or another. A kind that one of them has none of, or
    in another format, is told.
    """
    kinds = {kind for kind in KINDS if set(formats_of(a.holdings, kind)) == set(formats_of(b.holdings, kind))}
    return [row for row in compare_held(a, b) if not ("none" in (row.a, row.b) and row.what.split(" of ")[0] in kinds)]


def _say(share: float | None) -> str:
    return "not measured" if share is None else f"{100 * share:.3g} %"


def _describe(facts: ManifestFacts) -> Iterator[tuple[str, str]]:
    for kind in KINDS:
        groups = dict.fromkeys(row.group for row in facts.holdings if row.kind == kind)
        for group in groups:
            yield f"{kind} of {group}", say_formats(formats_of(facts.holdings, kind, group=group))
    yield "optimizers", ", ".join(facts.optimizers) or "none"
    yield "devices", ", ".join(facts.devices)
    yield "autocast", ", ".join(name.upper() for name in facts.regions) or "off"
    yield "loss scale", "on" if facts.scaled else "off"
    for kind in ("loss", "softmax", "norm", "attention"):
        rows = [row for row in facts.ran if row.kind == kind]
        if rows:
            yield kind, ", ".join(sorted({f"{row.name} in {row.format.upper()}" for row in rows}))
    for name, value in asdict(facts.switches).items():
        yield f"switch {name}", str(value)
    for row in facts.exchanges:
        yield row.who, row.formats


def _measure(facts: ManifestFacts) -> Iterator[tuple[str, float]]:
    flops = facts.flops()
    total = sum(flops.values())
    for name, num in flops.items():
        yield f"FLOPs in {name.upper()}", num / total if total else 0.0
    if facts.step is None:
        return
    updates = sum(row.num_updates for row in facts.updates)
    if updates:
        yield "updates that round away", sum(row.num_lost for row in facts.updates) / updates
    decays = sum(row.num_decays for row in facts.updates)
    if decays:
        yield "weight decay that rounds away", sum(row.num_decays_lost for row in facts.updates) / decays
    for row in facts.states:
        if row.num:
            yield f"{row.name} that cannot decay", row.num_stuck / row.num
    for row in facts.sums:
        yield f"accumulated gradient lost in {row.format.upper()}", row.share
