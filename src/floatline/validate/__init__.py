"""Paired validation against FP32: `floatline.validate(target)`, and the parts that it is made of."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from floatline.validate.result import Validation


class _Package(ModuleType):
    """The package can be called: Python binds `floatline.validate` to it as soon as a module of it is imported."""

    def __call__(self, *args: Any, **options: Any) -> Validation:
        """See `floatline.validate.target_study.validate`, which this is."""
        from floatline.validate.target_study import validate

        return validate(*args, **options)


sys.modules[__name__].__class__ = _Package
