"""Which run folders a user means, and each one's facts whenever they are asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from floatline.errors import LedgerError
from floatline.ledger.follower import is_writer_alive
from floatline.ledger.parts import list_parts
from floatline.ledger.progress import Progress
from floatline.report.run.facts import RunFacts, gather


class Watched:
    """One run that is looked at again and again.

    Args:
        folder: Its folder.
        name: What it is called.
        steps: Steps of the whole run; None takes what its ledger says.
    """

    def __init__(self, folder: Path, *, name: str, steps: int | None = None) -> None:
        self.is_behind = False
        self._progress = Progress(folder)
        self._name, self._steps = name, steps

    def look(self, *, most: int | None = None) -> RunFacts:
        """Read what is new, and say how it stands; `is_behind` says that `most` records were not all."""
        self.is_behind = self._progress.update(most=most) == most
        alive = is_writer_alive(self._progress.follower.folder)
        return gather(self._progress, name=self._name, now=time.time(), alive=alive, steps=self._steps)


def open_runs(folders: Sequence[Path | str], *, steps: int | None = None) -> list[Watched]:
    """The runs of these folders, each by the shortest name that no other has.

    Args:
        folders: Their run folders.
        steps: Steps of each run; None takes what its ledger says.
    """
    folders = [Path(folder) for folder in folders]
    return [Watched(path, name=name, steps=steps) for path, name in zip(folders, _names(folders), strict=True)]


def find_run_folders(places: Sequence[str]) -> list[Path]:
    """The run folders among these, and those inside of these; each once, in order.

    Raises:
        LedgerError: A place is not there, or has no run.
    """
    found: list[Path] = []
    for place in map(Path, places):
        if not place.is_dir():
            raise LedgerError(f"'{place}' is not a folder. Give a run folder, such as runs/NAME.")
        below = sorted(path for path in place.iterdir() if path.is_dir())
        own = [path for path in ([place] if list_parts(place) else below) if list_parts(path)]
        if not own:
            raise LedgerError(f"There is no ledger in '{place}'. Give a run folder, such as runs/NAME.")
        found += [path for path in own if path.resolve() not in {other.resolve() for other in found}]
    return found


def _names(folders: Sequence[Path]) -> list[str]:
    paths = [path.resolve() for path in folders]
    for num in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-num:]) for path in paths]
        if len(set(names)) == len(names):
            break
    else:
        names = [str(path) for path in paths]
    return names
