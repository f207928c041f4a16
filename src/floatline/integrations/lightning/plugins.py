"""The plugins and the callback on the base classes of `lightning`."""

from __future__ import annotations

from lightning.fabric.plugins.precision import Precision as FabricBase
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision

from floatline.integrations.lightning.callback import CallbackHooks
from floatline.integrations.lightning.fabric import FabricHooks
from floatline.integrations.lightning.precision import PrecisionHooks


class FloatlinePrecision(PrecisionHooks, Precision):  # noqa: D101
    __doc__ = PrecisionHooks.__doc__


class FloatlineCallback(CallbackHooks, Callback):  # noqa: D101
    __doc__ = CallbackHooks.__doc__


class FloatlineFabricPrecision(FabricHooks, FabricBase):  # noqa: D101
    __doc__ = FabricHooks.__doc__
