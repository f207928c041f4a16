"""Folding: values too large for FP16 scaled by powers of two that the outputs do not see, found and proven."""

from typing import TYPE_CHECKING

from floatline.base.offered import offer

if TYPE_CHECKING:
    from floatline.folding.scale_fold import Fold, fold

__all__ = ["Fold", "fold"]

__getattr__ = offer(__name__, {"Fold": "scale_fold", "fold": "scale_fold"})
