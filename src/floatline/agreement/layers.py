"""The curve over the layers: how far both sides are from FP32 after each, in whole runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from floatline.agreement.distances import measure_apart, measure_distance, measure_noise
from floatline.agreement.measuring import Measured
from floatline.agreement.result import LayerReading

_SUSPECT = 1.5


def read_layers(measured: Measured) -> tuple[LayerReading, ...]:
    """The curve over the layers: how far both sides are from FP32 after each."""
    found: list[LayerReading] = []
    a, b, exact = measured.a, measured.b, measured.exact
    for phase, pick in (("forward", "layers"), ("backward", "layer_gradients")):
        ours, theirs, truths, moved_a, moved_b = (getattr(ran, pick) for ran in (a, b, exact, *measured.noisy))
        for name, truth in truths.items():
            if name not in ours or name not in theirs or ours[name].shape != truth.shape:
                continue
            x, y = ours[name], theirs[name]
            size = float(truth.double().norm())
            noises = [
                measure_noise(own, [kept[name]]).whole / size if name in kept and size else 0.0
                for own, kept in ((x, moved_a), (y, moved_b))
            ]
            noises = [min(noises)] * 2 if x.dtype == y.dtype and all(noises) else noises
            found.append(
                LayerReading(
                    name,
                    "forward" if phase == "forward" else "backward",
                    measure_apart(x, y, truth),
                    measure_distance(x, truth),
                    measure_distance(y, truth),
                    *noises,
                )
            )
    return tuple(found)


def find_suspects(layers: Sequence[LayerReading]) -> list[str]:
    """Layers in which one side is farther off than the other, even if it is not at the end: what follows hides it."""

    def is_suspect(layer: LayerReading) -> bool:
        low, high = sorted((layer.a / (layer.noise_a or math.inf), layer.b / (layer.noise_b or math.inf)))
        return high > _SUSPECT * max(low, 1.0)

    return list(dict.fromkeys(layer.name for layer in layers if is_suspect(layer)))
