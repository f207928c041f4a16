"""Writes docs/messages.md: error messages as people search for them, each with what the catalogue says of it.

python tools/messages_page.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from floatline.causes import CAUSES, Cause, find_named_causes, find_symptom

PAGE = Path(__file__).parent.parent / "docs" / "messages.md"

MESSAGES: dict[str, tuple[str, ...]] = {
    "NaN, inf and a loss scale that falls": (
        "Training loss is nan",
        "Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 32768.0",
        "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped.",
        "Function 'LogBackward0' returned nan values in its 0th output.",
        "Function 'SoftmaxBackward0' returned nan values in its 0th output.",
        "Function 'SqrtBackward0' returned nan values in its 0th output.",
        "Function 'MulBackward0' returned nan values in its 0th output.",
        "Function 'NativeLayerNormBackward0' returned nan values in its 0th output.",
        "probability tensor contains either `inf`, `nan` or element < 0",
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.",
        "Input contains NaN, infinity or a value too large for dtype('float32').",
        "RuntimeWarning: Mean of empty slice",
        "RuntimeWarning: overflow encountered in exp",
        "RuntimeWarning: overflow encountered in multiply",
        "RuntimeWarning: overflow encountered in reduce",
        "RuntimeWarning: overflow encountered in cast",
    ),
    "The loss scaler, the optimizer and the schedule": (
        "ValueError: Attempting to unscale FP16 gradients.",
        "AssertionError: No inf checks were recorded for this optimizer.",
        "RuntimeError: unscale_() has already been called on this optimizer since the last update().",
        "RuntimeError: step() has already been called since the last update().",
        "UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`.",
        "KeyError: 'scaler'",
        "The current optimizer does not allow for gradient clipping because it performs unscaling of gradients.",
        "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
        "ValueError: optimizer got an empty parameter list",
    ),
    "Formats that meet, or that an operation does not know": (
        "RuntimeError: value cannot be converted to type at::Half without overflow",
        "RuntimeError: expected scalar type Half but found Float",
        "RuntimeError: mat1 and mat2 must have the same dtype, but got Half and Float",
        "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) should be the same",
        "RuntimeError: Index put requires the source and destination dtypes match",
        "RuntimeError: \"slow_conv2d_cpu\" not implemented for 'Half'",
        "RuntimeError: linalg.svd: Low precision dtypes not supported. Got Half",
        "TypeError: Got unsupported ScalarType BFloat16",
    ),
    "Memory and several processes": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "Watchdog caught collective operation timeout",
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
    ),
}

_INTRO = """\
<!-- Made by tools/messages_page.py from src/floatline/causes/. Do not edit by hand. -->

# Error messages

What a message means, and what to change. `floatline explain "MESSAGE"` says the same for any message of the
[catalogue](causes.md), and `python train.py 2>&1 | floatline explain -` reads it out of a log. Where a message does not
decide the cause, `floatline diagnose -- python train.py` [runs the script and names the line](diagnose.md).
"""


def page(messages: dict[str, tuple[str, ...]] = MESSAGES) -> str:
    """The whole page."""
    blocks, told = [_INTRO], set[str]()
    for title, texts in messages.items():
        blocks.append(f"## {title}\n")
        blocks += ["\n".join(_entry(text, told)) for text in texts]
    return "\n".join(blocks)


def _entry(text: str, told: set[str]) -> Iterator[str]:
    """A message; of a cause or symptom that was told before, only the name."""
    yield f"### {_plain(text)}\n"
    named, symptom = find_named_causes(text), find_symptom(text)
    known = named[0].title if named else "" if symptom is None else symptom.title
    if known in told:
        where = f"[{named[0].id}](causes/{named[0].id}.md)" if named else "the same causes, in the same order"
        yield f"**{_plain(known)}**, as above: {where}.\n"
        return
    told.add(known)
    if named:
        yield from _one(named[0])
    elif symptom is not None:
        links = ", ".join(f"[{name}](causes/{name}.md)" for name in symptom.causes)
        yield f"**{_plain(symptom.title)}.** The message alone does not decide the cause. {_plain(symptom.check)}\n"
        yield f"In the order worth checking: {links}.\n"
    else:
        raise ValueError(f"The catalogue does not know {text!r}.")


def _one(cause: Cause) -> Iterator[str]:
    yield f"**{_plain(cause.title)}** ([{cause.id}](causes/{cause.id}.md)). {_plain(cause.mechanism)}\n"
    for remedy in cause.remedies:
        code, _, why = remedy.partition("  # ")
        yield f"- `{code}`: {_plain(why)}" if why else f"- {_plain(code)}"
    yield ""


def _plain(text: str) -> str:
    return re.sub(r"([*_<`\[\]])", r"\\\1", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.name}: {sum(map(len, MESSAGES.values()))} messages, {len(CAUSES)} causes")
