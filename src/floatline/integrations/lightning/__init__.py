"""Lightning: a precision plugin and a callback for the Trainer, and a precision plugin for Fabric; loaded on use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from floatline.integrations.lightning.plugins import FloatlineCallback, FloatlineFabricPrecision, FloatlinePrecision

__all__ = ["FloatlineCallback", "FloatlineFabricPrecision", "FloatlinePrecision"]


def __getattr__(name: str) -> Any:
    """Load a public name: Lightning takes seconds to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module("floatline.integrations.lightning.plugins"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lightning":
            raise
        raise ImportError(
            f"{name} needs lightning. Install it with: pip install 'floatline[lightning]'. "
            "For `import pytorch_lightning`, take floatline.integrations.pytorch_lightning."
        ) from None
    globals()[name] = value
    return value
