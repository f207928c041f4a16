"""Two sides run in their own arithmetic, in FP32 and with roundings moved: from runs to readings."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from floatline.agreement.arithmetic import Nudged, Widened
from floatline.agreement.distances import Noise, measure_apart, measure_distance, measure_excess, measure_noise
from floatline.agreement.reading import Reading
from floatline.agreement.sides import Given, Ran, Side, find_unrounded, run_side
from floatline.errors import ParityError

_SMALL = 2**24
"""Up to so many weights and inputs, FP64 stands for exact: it costs seconds."""
# How many units of float32 are one unit of a format.
_UNITS = {torch.bfloat16: 2**16, torch.float16: 2**13}


@dataclass(frozen=True)
class Measured:
    """Two sides on the same arguments.

    Args:
        readings: One for each output and gradient.
        a: A's run, with what its layers were called with.
        b: B's.
        exact: A in FP32 or FP64.
        noisy: A and B with their roundings moved.
        notes: What a reader must know.
    """

    readings: tuple[Reading, ...]
    a: Ran
    b: Ran
    exact: Ran
    noisy: tuple[Ran, Ran]
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> Reading:
        """The reading that decides."""
        return max(self.readings, key=lambda reading: reading.weight)


@dataclass
class _Runs:
    """Every run of one side, by what was done to it; `base` is the run whose roundings were moved."""

    own: Ran
    base: Ran
    nudged: list[Ran] = field(default_factory=list[Ran])
    formats: set[torch.dtype] = field(default_factory=set[torch.dtype])


def measure_pair(
    a: Side,
    b: Side,
    given: Given,
    *,
    backward: bool = True,
    cotangents: Mapping[str, Tensor] | None = None,
    look: bool = False,
    reference: Side | None = None,
) -> Measured:
    """Run two sides in their own arithmetic, in FP32 and with roundings moved, and measure how far they are apart.

    Numerics:
        Exact is FP64 where the computation is small and the device has it, else FP32. What rounding explains is the
        smallest of: how far the side's own roundings move it; A's in FP32, moved by units of the side's coarsest
        format; and the other side's, where both compute in the same formats. So a side is not excused by needless
        roundings of its own. Checked by tests/agreement/test_measuring.py.

    Args:
        a: The first.
        b: The second.
        given: The arguments of both.
        backward: Whether gradients are compared.
        cotangents: See `run_side`.
        look: Whether layers are kept.
        reference: What is meant; None is A.

    Raises:
        ParityError: The reference cannot be computed in FP32, or the sides have no output in common.
    """
    wide = _choose_exact(a, given)
    weights = find_unrounded(a, b)
    notes: list[str] = []

    own_a = run_side(
        a.function, a.own_inputs(given), backward=backward, cotangents=cotangents, look=look, around=a.around
    )

    def run_wide(side: Side, dtype: torch.dtype, *, nudge: int = 0, look: bool = False) -> Ran:
        drawn = own_a.cotangents
        return _run_wide(side, given, dtype, drawn, backward=backward, look=look, nudge=nudge, weights=weights)

    exact = run_wide(reference or a, wide, look=look)
    if exact.random:
        notes.append(
            "Random numbers are drawn. Every run starts from the same seed, but formats may draw other numbers: call "
            ".eval(), or leave out dropout, for a certain answer."
        )
    runs_a = _nudge(a, own_a, given, weights, backward=backward)
    b_look = look and not b.opaque
    drawn = own_a.cotangents
    if b.opaque:
        _run_on_other_numbers(b, given, backward=backward)
    own_b = run_side(b.function, b.own_inputs(given), backward=backward, cotangents=drawn, look=b_look, around=b.around)
    exact_b: Ran | None = None
    try:
        exact_b = exact if b.plain is a.plain and reference is None else run_wide(b, wide)
    except ParityError as error:
        notes.append(f"B in FP32: {error} It is compared with A's FP32 only.")
    runs_b = _Runs(own_b, own_a, runs_a.nudged, runs_a.formats)
    if not b.opaque:
        runs_b = _nudge(b, own_b, given, weights, backward=backward)
    algorithm = {
        dtype: run_wide(a, torch.float32, nudge=units)
        for dtype, units in {torch.float32: 1, **_UNITS}.items()
        if dtype in (_coarsest(runs_a.formats), _coarsest(runs_b.formats), torch.float32)
    }
    plain32 = exact if wide == torch.float32 and reference is None else run_wide(a, torch.float32)
    every = [own_a, own_b, exact, plain32, runs_a.base, runs_b.base, *runs_a.nudged, *runs_b.nudged]
    _count_as_outputs(
        own_a.written | own_b.written, [*every, *algorithm.values(), *([exact_b] if exact_b is not None else [])]
    )
    readings = _read(runs_a, runs_b, exact, exact_b, algorithm, plain32, "FP64" if wide == torch.float64 else "FP32")
    if not any(reading.phase == "forward" for reading in readings):
        raise ParityError(
            f"A gives {_list(own_a)}, B gives {_list(own_b)}: no floating-point output is in both. "
            "Let both return the same structure."
        )
    notes += _compare_choices(own_a, own_b)
    shared = [reading for reading in readings if reading.shared]
    if shared:
        worst = max(shared, key=lambda reading: reading.excess_a)
        notes.append(
            f"{worst.name}: both are {worst.excess_a:.2g} times as far from FP32 as rounding explains, by the same "
            "numbers: it is the operation that both use."
        )
    return Measured(readings, own_a, own_b, exact, (runs_a.nudged[0], runs_b.nudged[0]), tuple(notes))


def _run_on_other_numbers(side: Side, given: Given, *, backward: bool) -> None:
    """Run compiled code once on other weights, buffers and inputs: numbers that it keeps instead of reading are old."""

    def change(tensor: Tensor) -> None:
        tensor.detach().mul_(0.5).add_(0.25)

    held = [] if side.module is None else [*side.module.parameters(), *side.module.buffers()]
    floats = [tensor for tensor in dict.fromkeys(held) if tensor.is_floating_point()]
    before = [tensor.detach().clone() for tensor in floats]
    other = side.own_inputs(given).fresh(None, tracked=False)
    try:
        for tensor in (*floats, *other.tensors().values()):
            change(tensor)
        with contextlib.suppress(Exception):  # not every computation takes any numbers; those that count come next
            run_side(side.function, other, backward=backward, around=side.around)
    finally:
        for tensor, old in zip(floats, before, strict=True):
            tensor.detach().copy_(old)


def _count_as_outputs(written: set[str], runs: Sequence[Ran]) -> None:
    """What arguments and buffers hold afterwards is a result, where one of the sides has written to them."""
    for run in runs:
        run.outputs |= {f"{name}, afterwards": run.after[name] for name in written if name in run.after}


def is_same(a: Side, b: Side, given: Given, *, backward: bool, cotangents: Mapping[str, Tensor]) -> bool:
    """Whether two sides give the same bits, in their own arithmetic and in a wide one."""
    wide = _choose_exact(a, given)
    runs = [
        run_side(s.function, s.own_inputs(given), backward=backward, cotangents=cotangents, around=s.around)
        for s in (a, b)
    ]
    if not _equal(*runs):
        return False
    return _equal(*(_run_wide(side, given, wide, runs[0].cotangents, backward=backward) for side in (a, b)))


def _equal(a: Ran, b: Ran) -> bool:
    ours, theirs = {**a.outputs, **a.gradients}, {**b.outputs, **b.gradients}
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _choose_exact(a: Side, given: Given) -> torch.dtype:
    tensors = list(given.tensors().values())
    size = a.num_elements() + sum(t.numel() for t in tensors)
    devices = {t.device.type for t in (*tensors, *(a.module.parameters() if a.module is not None else ()))}
    return torch.float64 if size <= _SMALL and "mps" not in devices else torch.float32


def _run_wide(
    side: Side,
    given: Given,
    dtype: torch.dtype,
    cotangents: Mapping[str, Tensor],
    *,
    backward: bool,
    look: bool = False,
    nudge: int = 0,
    weights: Mapping[str, Tensor] | None = None,
) -> Ran:
    mode = Nudged(1, units=max(nudge, 1))
    function = side.in_format(dtype, weights)
    if nudge > 1:  # a side that has its weights rounded
        _move_weights(function, weights or {}, mode, nudge)
    modes = [*([mode] if nudge else []), Widened(dtype)]
    try:
        return run_side(
            function,
            given,
            dtype=dtype,
            cotangents=cotangents,
            backward=backward,
            look=look,
            modes=modes,
            around=side.around,
        )
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise ParityError(f"It cannot be computed in {str(dtype)[6:]}: {type(error).__name__}: {reason}.") from error


def _nudge(side: Side, own: Ran, given: Given, weights: Mapping[str, Tensor], *, backward: bool) -> _Runs:
    """The eager side twice more, its roundings moved: each at random, and all of a tensor in one direction."""
    runs = _Runs(own, own if side.plain is side.function else _run_plain(side, own, given, backward=backward))
    held = dict(side.module.named_parameters()) if side.module is not None else {}
    rounded = {name: fine for name, fine in weights.items() if held[name].element_size() < fine.element_size()}
    for seed, together in ((1, False), (2, True), (3, False)):
        mode = Nudged(seed, together=together)
        plain = copy.deepcopy(side.plain) if rounded else side.plain
        _move_weights(plain, rounded, mode, 1)
        runs.nudged.append(
            run_side(
                plain,
                side.own_inputs(given),
                cotangents=own.cotangents,
                backward=backward,
                look=seed == 1,
                modes=[mode],
                around=side.around,
            )
        )
        runs.formats |= mode.formats
    return runs


def _run_plain(side: Side, own: Ran, given: Given, *, backward: bool) -> Ran:
    return run_side(
        side.plain, side.own_inputs(given), cotangents=own.cotangents, backward=backward, around=side.around
    )


def _move_weights(function: Callable[..., Any], names: Mapping[str, Tensor], mode: Nudged, units: int) -> None:
    """Move the weights that one side has rounded: that is a rounding, too."""
    if not isinstance(function, nn.Module) or not names:
        return
    with torch.no_grad():
        for name, parameter in function.named_parameters():
            if name in names:
                mode.move(parameter, units)


def _coarsest(formats: set[torch.dtype]) -> torch.dtype:
    return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in formats), torch.float32)


def _read(
    a: _Runs,
    b: _Runs,
    exact: Ran,
    exact_b: Ran | None,
    algorithm: Mapping[torch.dtype, Ran],
    plain32: Ran,
    called: str,
) -> tuple[Reading, ...]:
    found: list[Reading] = []
    same_formats = _coarsest(a.formats) == _coarsest(b.formats)
    for phase, pick in (("forward", _outputs), ("backward", _gradients)):
        for name, truth in pick(exact).items():
            if name not in pick(a.own) or name not in pick(b.own):
                continue
            x, y = pick(a.own)[name], pick(b.own)[name]

            own_a, own_b = (measure_noise(pick(runs.base)[name], _pick_all(runs.nudged, pick, name)) for runs in (a, b))
            shared = {dtype: measure_noise(pick(plain32)[name], [pick(run)[name]]) for dtype, run in algorithm.items()}
            floor = measure_distance(pick(algorithm[torch.float32])[name], truth)
            same = [own_a, own_b] if same_formats else []
            least = measure_noise(truth, [pick(algorithm[torch.float32])[name].to(truth.dtype)])  # FP32's own floor
            noise_a = _least(own_a, shared[_coarsest(a.formats)], *same).at_least(least)
            noise_b = _least(own_b, shared[_coarsest(b.formats)], *same).at_least(least)
            truth_b = truth if exact_b is None or name not in pick(exact_b) else pick(exact_b)[name]
            excess_a, row_a = measure_excess(x, truth, noise_a)
            excess_b, row_b = measure_excess(y, truth_b, noise_b)
            reading = Reading(
                name=name,
                phase="forward" if phase == "forward" else "backward",
                apart=measure_apart(x, y, truth),
                a=measure_distance(x, truth),
                b=measure_distance(y, truth),
                floor=floor,
                functions=None if exact_b is None else measure_distance(truth_b, truth),
                excess_a=excess_a,
                excess_b=excess_b,
                excess_apart=measure_excess(y, x, max(noise_a, noise_b, key=lambda noise: noise.whole))[0],
                row_a=row_a,
                row_b=row_b,
                exact=called,
            )
            found.append(reading)
    return tuple(found)


def _pick_all(runs: Sequence[Ran], pick: Callable[[Ran], dict[str, Tensor]], name: str) -> list[Tensor]:
    return [pick(run)[name] for run in runs if name in pick(run)]


def _outputs(ran: Ran) -> dict[str, Tensor]:
    return ran.outputs


def _gradients(ran: Ran) -> dict[str, Tensor]:
    return ran.gradients


def _least(*noises: Noise) -> Noise:
    """The least of them; what cannot be looked into has none of its own."""
    seen = [noise for noise in noises if noise.whole > 0]
    return min(seen or noises, key=lambda noise: noise.whole)


def _compare_choices(a: Ran, b: Ran) -> list[str]:
    """Integers and truth values that differ."""
    notes: list[str] = []
    for name in a.choices.keys() & b.choices.keys():
        x, y = a.choices[name], b.choices[name]
        if x.shape == y.shape and (num := int((x != y).sum())):
            notes.append(f"{name}: {num:,} of {x.numel():,} choices differ between A and B.")
    return notes


def _list(ran: Ran) -> str:
    return ", ".join(ran.outputs) or "nothing"
