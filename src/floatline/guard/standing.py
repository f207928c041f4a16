"""Standing: what recovery has counted up to now, as it goes into a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from floatline.errors import GuardError


@dataclass
class Standing:
    """Streaks, rollbacks and the outcomes of the last steps."""

    attempt: int = -1  # the last that was seen
    bad: int = 0  # skipped steps since the last applied one
    bad_since: int = 0  # attempt of the first of them
    collapses: int = 0  # overflows in a row at the smallest scale
    nonfinite: int = 0  # non-finite losses since the last applied step
    outliers: int = 0  # of loss or norm, since the last applied step
    outlier_since: int = 0
    loss_outliers: int = 0  # in a row
    sound: bool = False  # the canary was sound since the last applied step
    rollbacks: int = 0
    since_rollback: int = 0  # applied steps
    undone: int = -1  # steps up to this attempt were under way at the last rollback
    accepted: int = -1  # outliers up to this attempt were judged by windows that are gone
    scaled: bool = False  # a scale above the smallest was seen
    question: str = ""  # why weights or canary were asked for
    outcomes: str = ""  # of the last `success_window` steps: 1 applied, 0 skipped
    noted: int = -1  # the last outlier that was trained on

    def end_streaks(self) -> None:
        """Begin to count anew what is counted in a row."""
        self.bad = self.collapses = self.nonfinite = self.outliers = self.loss_outliers = 0
        self.sound, self.question = False, ""

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Standing:
        """What `as_json` was called on; GuardError for anything else."""
        state = {"noted": -1, **state}  # checkpoints of version 0.1 do not have it
        for field in fields(cls):
            value = state.get(field.name)
            if type(value).__name__ != field.type:
                raise GuardError(
                    f"The state of recovery has {field.name} = {value!r:.40}, not of type {field.type}. "
                    "Load a checkpoint of this version."
                )
        return cls(**{field.name: state[field.name] for field in fields(cls)})
