"""What guards know of a run, by the names that every logger of floatline uses."""

from __future__ import annotations

from collections.abc import Sequence

from floatline.formats import find_format
from floatline.guard.guard import Guard
from floatline.guard.outcome import Outcome
from floatline.integrations.loggers.logger import PREFIX, values_of
from floatline.ledger.account import Account
from floatline.ledger.lines import Step

_SHOWN = ("loss", "scale", "grad_norm")
_LAYER = f"{PREFIX}layer_norm/"


class Metrics:
    """Keeps the newest outcomes, and gives their numbers; nothing here waits for the device.

    Attributes:
        latest: The newest outcome whose numbers are on the host.
    """

    def __init__(self) -> None:
        self.latest: Outcome | None = None
        self._layered: Outcome | None = None  # the newest that has norms of layers
        self._given: Outcome | None = None  # the one whose norms were given last

    def learn(self, outcome: Outcome) -> None:
        """Take an outcome whose numbers are on the host."""
        self.latest = outcome
        if outcome.layer_norms is not None:
            self._layered = outcome

    def of_run(self, guards: Sequence[Guard]) -> dict[str, float]:
        """Totals of all optimizers, numbers of the newest step, and how far gradients are from the format's end."""
        if not guards:
            return {}
        account = _added_up([guard.accounts.run for guard in guards])
        found = {f"{PREFIX}applied": float(account.applied)}
        if self.latest is not None:
            found |= values_of(_step(self.latest, with_layers=False), account, None)
        if self._layered is not None:
            layered = values_of(_step(self._layered, with_layers=True), account, find_format(guards[0].plan.compute))
            found |= {name: value for name, value in layered.items() if name == f"{PREFIX}headroom"}
        lost = [guard.lost.share for guard in guards if guard.lost is not None]
        return found | ({f"{PREFIX}lost_share": max(lost)} if lost else {})

    def of_layers(self, guards: Sequence[Guard]) -> dict[str, float]:
        """Norms of layers, and what FP16 lost in them, where there are new ones."""
        if self._layered is None or self._layered is self._given:
            return {}
        self._given = self._layered
        found = {f"{_LAYER}{name}": norm for name, norm in (self._layered.layer_norms or {}).items()}
        for guard in guards:
            lost = () if guard.lost is None else guard.lost.layers
            found |= {f"{PREFIX}lost_share/{name}": share for name, share in lost}
        return found


def _step(outcome: Outcome, *, with_layers: bool) -> Step:
    """The outcome as the ledger writes it, as far as loggers show it."""
    numbers = {name: outcome.numbers[name] for name in _SHOWN}
    counts = {"micro_batches": outcome.micro_batches}
    norms = outcome.layer_norms if with_layers else None
    return Step(outcome.attempt, 0.0, outcome.applied, outcome.reason, None, counts, numbers, norms)


def _added_up(accounts: Sequence[Account]) -> Account:
    skipped = {reason: sum(account.skipped[reason] for account in accounts) for reason in accounts[0].skipped}
    applied = sum(account.applied for account in accounts)
    return Account(attempted=applied + sum(skipped.values()), applied=applied, skipped=skipped)
