"""parity: are two computations the same numbers, where do they part, and whose fault is it?"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

from torch import nn

from floatline.agreement.compiled.arms import find_wrong_part
from floatline.agreement.compiled.backends import find_compiler
from floatline.agreement.descent import descend
from floatline.agreement.layers import find_suspects, read_layers
from floatline.agreement.logprobs.comparing import BAND, LogprobParity, compare_logprobs
from floatline.agreement.measuring import measure_pair
from floatline.agreement.result import Parity
from floatline.agreement.sides import Given, Side
from floatline.errors import ParityError


@overload
def parity(f: nn.Module, g: str | Path, batch: None = None, *, band: tuple[float, float] = BAND) -> LogprobParity: ...


@overload
def parity(
    f: Callable[..., Any],
    g: Callable[..., Any],
    batch: Any,
    *,
    backward: bool = True,
    reference: Callable[..., Any] | None = None,
    names: tuple[str, str] = ("A", "B"),
) -> Parity: ...


def parity(
    f: Callable[..., Any],
    g: Callable[..., Any] | str | Path,
    batch: Any = None,
    *,
    backward: bool = True,
    reference: Callable[..., Any] | None = None,
    names: tuple[str, str] = ("A", "B"),
    band: tuple[float, float] = BAND,
) -> Parity | LogprobParity:
    """Compare two computations that must agree, and say which is nearer to FP32::

        print(fl.parity(model, torch.compile(model), batch))
        fl.parity(attention, my_kernel, (q, k, v)).verdict  # "agree", "farther", "other-function" or "wrong"
        fl.parity(model, "rollout.jsonl")  # log-probs that another engine gave to the same tokens

    Both run as they are: in their formats, with their kernels, under the autocast that is on. Wrap the call in
    `fl.HalfOnCPU()` where 16-bit products on a CPU shall be those of a GPU. Weights, gradients and buffers stay as
    they are.

    Numerics:
        Distances are relative, in the Euclidean norm. What is exact is FP64 up to 16 million weights and inputs, and
        FP32 above. What rounding explains is measured, by moving every rounding by one unit. A side is wrong beyond 8
        times that, and farther from 2 times the other's on. Checked by tests/agreement/test_parity.py.

    Args:
        f: A: a function, a module, or what torch.compile made of one.
        g: B: the same. Two modules must have weights of the same names, with the same values, to be the same function.
        batch: What both are called with: a tensor, a tuple of positional arguments, or a dict of named ones.
        backward: Whether gradients are compared, too: of weights, and for functions of the floating-point inputs.
        reference: What is meant, where that is neither; None is f.
        names: What A and B are called in sentences.
        band: Of a file of log-probs: the ratios of probabilities that are fine.

    Raises:
        ParityError: One of them cannot be run, or they have no output in common.
    """
    if isinstance(g, str | Path):
        if not isinstance(f, nn.Module):
            raise ParityError(f"'{f!r:.60}' is no module. Log-probs in a file are compared with those of a module.")
        return compare_logprobs(f, g, band=band)
    meant = None if reference is None else Side.of(reference)
    return compare_sides(Side.of(f), Side.of(g), Given.of(batch), backward=backward, reference=meant, names=names)


def compare_sides(
    a: Side,
    b: Side,
    given: Given,
    *,
    backward: bool = True,
    reference: Side | None = None,
    names: tuple[str, str] = ("A", "B"),
) -> Parity:
    """The same of two sides that run in contexts of their own; see `parity`."""
    start = time.perf_counter()
    _check_weights(a, b)
    measured = measure_pair(a, b, given, backward=backward, look=True, reference=reference)
    layers, entry, notes = read_layers(measured), None, list(measured.notes)
    if reference is None and (measured.worst.verdict != "agree" or find_suspects(layers)):
        if b.opaque and b.plain is a.plain:
            compiler = find_compiler(b.function)
            place, _ = find_wrong_part(a, given, measured, compiler, notes, backward=backward)
        else:
            place = descend(a, b, given, measured, backward=backward).place
        entry = place if place.reading.verdict != "agree" else None
    return Parity(
        *names,
        readings=measured.readings,
        layers=layers,
        entry=entry,
        notes=tuple(notes),
        seconds=time.perf_counter() - start,
        asks_of_b=b.opaque and b.plain is a.plain,
    )


def _check_weights(a: Side, b: Side) -> None:
    """Refuse two modules whose weights have the same names and other shapes."""
    if a.module is None or b.module is None:
        return
    ours = dict[str, nn.Parameter](a.module.named_parameters())
    for name, weight in b.module.named_parameters():
        if name in ours and ours[name].shape != weight.shape:
            raise ParityError(
                f"Weight '{name}' is {tuple(ours[name].shape)} in A and {tuple(weight.shape)} in B. "
                "Build both with the same sizes."
            )
