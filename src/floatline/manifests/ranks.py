"""What processes that train together do not have in common: told first, by the manifest of the first one. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from floatline.manifests.difference import compare_held
from floatline.manifests.facts import ManifestFacts
from floatline.manifests.judge import DIGEST
from floatline.manifests.manifest import Manifest
from floatline.manifests.rows import RankRow


def combine_ranks(found: Mapping[int, Manifest]) -> tuple[Manifest, ...]:
    """The manifests by rank; the first has what the others do not have as it does."""
    first, *others = (found[rank] for rank in sorted(found))
    rows = tuple(row for other in others for row in _tell_apart(first, other))
    return replace(first, apart=rows), *others


def _tell_apart(first: ManifestFacts, other: ManifestFacts) -> Iterator[RankRow]:
    for row in compare_held(first, other):
        yield RankRow(other.rank, row.what, row.a, row.b)
    if first.num_ranks != other.num_ranks:
        yield RankRow(other.rank, "processes", str(first.num_ranks), str(other.num_ranks))
    if first.digest != other.digest:
        yield RankRow(other.rank, DIGEST, first.digest, other.digest)
    if first.bad_loss != other.bad_loss:
        yield RankRow(other.rank, "loss", say_bad_loss(first.bad_loss), say_bad_loss(other.bad_loss))


def say_bad_loss(step: int | None) -> str:
    """Where a loss was not finite first."""
    return "finite" if step is None else f"not finite at step {step}"
