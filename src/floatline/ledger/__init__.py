"""The ledger: what really happened in a run, step by step, on the disk."""

from typing import TYPE_CHECKING

from floatline.base.offered import offer

if TYPE_CHECKING:
    from floatline.ledger.ledger import Ledger

__all__ = ["Ledger"]

__getattr__ = offer(__name__, {"Ledger": "ledger"})
