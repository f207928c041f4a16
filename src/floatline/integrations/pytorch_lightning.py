"""The same plugins and callback for `import pytorch_lightning`, whose classes are not those of `lightning`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from floatline.integrations.lightning.callback import CallbackHooks
from floatline.integrations.lightning.fabric import FabricHooks
from floatline.integrations.lightning.precision import PrecisionHooks

if TYPE_CHECKING:
    from lightning.fabric.plugins.precision import Precision as FabricBase
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.precision import Precision
else:
    FabricBase = importlib.import_module("lightning_fabric.plugins.precision").Precision
    Callback: Any = importlib.import_module("pytorch_lightning.callbacks").Callback
    Precision = importlib.import_module("pytorch_lightning.plugins.precision").Precision

__all__ = ["FloatlineCallback", "FloatlineFabricPrecision", "FloatlinePrecision"]


class FloatlinePrecision(PrecisionHooks, Precision):  # noqa: D101
    __doc__ = PrecisionHooks.__doc__


class FloatlineCallback(CallbackHooks, Callback):  # noqa: D101
    __doc__ = CallbackHooks.__doc__


class FloatlineFabricPrecision(FabricHooks, FabricBase):  # noqa: D101
    __doc__ = FabricHooks.__doc__
