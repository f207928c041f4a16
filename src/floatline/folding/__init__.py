"""Folding: values too large for FP16 scaled by powers of two that the outputs do not see, found and proven."""

from typing import TYPE_CHECKING

from floatline.base.offered import offer

if TYPE_CHECKING:
    from floatline.folding.model_fit import ModelFit, fit_model
    from floatline.folding.scale_fold import Fold, fold

__all__ = ["Fold", "ModelFit", "fit_model", "fold"]

__getattr__ = offer(
    __name__,
    {"Fold": "scale_fold", "ModelFit": "model_fit", "fit_model": "model_fit", "fold": "scale_fold"},
)
