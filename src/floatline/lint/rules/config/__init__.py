"""FL3xx: configurations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from floatline.lint.configs import Setting, SettingsDocument, read_dtype
from floatline.lint.configs.loads import LOADED_ELSEWHERE

if TYPE_CHECKING:
    from floatline.fixes import FixKind

# With any of these in the file, what is trained may not be the FP16 weights: adapters, master weights, frozen parts.
OTHER_TRAINING = ("deepspeed", "fsdp", "4bit", "8bit", "quant")
OTHER_WEIGHTS = ("peft", "lora", "adapter", "requires_grad", "freeze", *OTHER_TRAINING)


def half_checkpoints(document: SettingsDocument) -> Iterator[Setting]:
    """The dtypes of models that a Python file loads in FP16 and trains, where nothing in it names FP32."""
    if document.mentions("float32", ".float()"):
        return
    for model in document.of_kind("checkpoint"):
        dtype = model.first("torch_dtype", "dtype", LOADED_ELSEWHERE)
        if dtype is not None and read_dtype(dtype) == "fp16":
            yield dtype


def fix_of(dtype: Setting) -> FixKind | None:
    """The rewrite of such a dtype, where it stands in the file that is linted."""
    return None if dtype.key == LOADED_ELSEWHERE else "fp32-setting"
