"""Manifest: what a run really computes in, with its verdict, and how it is checked, saved and read. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, cast

from floatline.base.files import read_bounded, write_whole
from floatline.base.plain_records import from_plain, to_plain
from floatline.errors import ComparisonError, ManifestError
from floatline.manifests.expectation import resolve_expectation
from floatline.manifests.facts import ManifestFacts
from floatline.manifests.judge import ManifestLine, describe_ranks, judge, summarize

SCHEMA = 1
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Manifest(ManifestFacts):
    """What a run computes in: the facts, the verdict that follows from them, and whether they are what was believed.

    It holds what was read from live objects, and the measures of one real step where one was made. The arguments are
    those of `ManifestFacts`.
    """

    @cached_property
    def lines(self) -> tuple[ManifestLine, ...]:
        """The verdict: what is wrong, each with the catalogue's id and the fix."""
        return tuple(judge(self))

    @property
    def summary(self) -> str:
        """One line: what it computes in, and whether that loses anything."""
        return summarize(self)

    def differences(self, expected: str | PathLike[str]) -> tuple[str, ...]:
        """What is not as expected, one sentence each; nothing where all is.

        Args:
            expected: A plan's name, such as 'bf16-mixed', or a YAML file.
        """
        return resolve_expectation(expected).differences(self)

    def check(self, expected: str | PathLike[str]) -> None:
        """Raise where something is not as expected: for a test that a run computes in what its owner believes.

        Args:
            expected: As in `differences`.

        Raises:
            ManifestError: With every difference.
        """
        found = self.differences(expected)
        if found:
            said = "; ".join(found)
            raise ManifestError(f"The run is not '{expected}': {said}. Change the run, or what is expected of it.")

    def as_json(self) -> dict[str, Any]:
        """What `floatline manifest --format json` prints; a list of ranks, so that several processes fit in."""
        return {
            "schema": SCHEMA,
            "summary": self.summary,
            "findings": [line.as_json() for line in self.lines],
            "ranks": [to_plain(self)],
        }

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as JSON, whole or not at all."""
        try:
            write_whole(Path(path), json.dumps(self.as_json(), indent=2, ensure_ascii=False, allow_nan=False))
        except OSError as error:
            raise ManifestError(f"'{path}' cannot be written: {error.strerror}. Choose another path.") from None

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Manifest:
        """Read one that `save` or `floatline manifest --format json` wrote.

        Raises:
            ManifestError: The file is missing, or holds something else.
        """
        try:
            text = read_bounded(Path(path), most=_MOST_BYTES).decode("utf-8")
            return read_manifest(json.loads(text))
        except OSError as error:
            raise ManifestError(f"Manifest '{path}' cannot be read: {error.strerror}. Check the path.") from None
        except (UnicodeDecodeError, ValueError, RecursionError):
            raise ManifestError(
                f"'{path}' holds no manifest. Give a file that `floatline manifest --format json` wrote."
            ) from None

    def __str__(self) -> str:
        """The summary, and what is wrong."""
        return "\n".join(filter(None, [describe_ranks(self), self.summary, *map(str, self.lines)]))


def read_manifest(data: Any) -> Manifest:
    """What `as_json` gave; ValueError for anything else."""
    ranks = cast("dict[str, Any]", data).get("ranks") if isinstance(data, dict) else None
    if not isinstance(ranks, list) or not ranks or cast("dict[str, Any]", data).get("schema") != SCHEMA:
        raise ValueError("no manifest")
    try:
        return from_plain(Manifest, cast("list[Any]", ranks)[0])
    except ComparisonError as error:
        raise ValueError(str(error)) from None
