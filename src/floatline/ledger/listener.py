"""Listener: what else hears of a run's records, once their numbers are on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from floatline.ledger.account import Account
from floatline.ledger.lines import Record


class Listener(Protocol):
    """Hears what the ledger hears, in the same order, on the training thread: it must not take long, or raise."""

    def begin(self, metadata: Mapping[str, Any]) -> None:
        """Hear what the run is; called once, before any record."""
        ...

    def take(self, record: Record, account: Account) -> None:
        """Hear of a step or an event, with the totals so far; they go on counting after the call."""
        ...

    def close(self) -> None:
        """Hear that the run is over."""
        ...
