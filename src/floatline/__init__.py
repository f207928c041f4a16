"""floatline takes PyTorch training from FP32 to 16 bits and keeps FP32's results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from floatline.base.offered import load_old_name, offer, redirect_old_modules

if TYPE_CHECKING:
    from floatline import optim
    from floatline.agreement.comparing import parity
    from floatline.diagnosis.target_diagnosis import diagnose
    from floatline.errors import FloatlineError
    from floatline.findings import GuardStop
    from floatline.folding.scale_fold import fold
    from floatline.guard.guard import Guard
    from floatline.guard.policy import Policy
    from floatline.guard.scaler import LossScaler
    from floatline.ledger.ledger import Ledger
    from floatline.manifests.live import manifest
    from floatline.numerics.half_on_cpu import HalfOnCPU
    from floatline.plans.plan import Plan
    from floatline.rescuing.rescue import rescue
    from floatline.validation.target_study import validate

__version__ = "0.1.0"

__all__ = [
    "FloatlineError",
    "Guard",
    "GuardStop",
    "HalfOnCPU",
    "Ledger",
    "LossScaler",
    "Plan",
    "Policy",
    "__version__",
    "diagnose",
    "fold",
    "manifest",
    "optim",
    "parity",
    "rescue",
    "validate",
]

# Loaded on first use, so that `import floatline` and the command line's help need no torch.
_load = offer(
    __name__,
    {
        "FloatlineError": "errors",
        "Guard": "guard.guard",
        "GuardStop": "findings",
        "HalfOnCPU": "numerics.half_on_cpu",
        "Ledger": "ledger.ledger",
        "LossScaler": "guard.scaler",
        "Plan": "plans.plan",
        "Policy": "guard.policy",
        "diagnose": "diagnosis.target_diagnosis",
        "fold": "folding.scale_fold",
        "manifest": "manifests.live",
        "optim": "optim",
        "parity": "agreement.comparing",
        "rescue": "rescuing.rescue",
        "validate": "validation.target_study",
    },
)

redirect_old_modules()


def __getattr__(name: str) -> Any:
    """Load a public name from its home; an older one with a warning."""
    return _load(name) if name in __all__ else load_old_name(name)


def __dir__() -> list[str]:
    """Public names, loaded or not."""
    return sorted(__all__)
