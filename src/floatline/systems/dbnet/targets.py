"""Maps: what DBNet learns from the words of a scene (Liao et al. 2020, arXiv:1911.08947)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import cv2
import numpy as np
import pyclipper
from numpy.typing import NDArray
from shapely.geometry import Polygon

from floatline.systems.dbnet.scenes import Scene

Numbers = NDArray[Any]
SHRINK = 0.4
LOWEST, HIGHEST = 0.3, 0.7
# pyclipper counts in whole numbers.
_GRAIN = 1024


@dataclass(frozen=True)
class Maps:
    """Targets of one scene, each of its height and width.

    Args:
        text: 1 inside of the shrunk words.
        text_mask: 0 where a word is to be ignored.
        threshold: 0.7 on the border of a word, falling to 0.3 at the distance that words are shrunk by.
        threshold_mask: 1 where the threshold is learnt.
    """

    text: Numbers
    text_mask: Numbers
    threshold: Numbers
    threshold_mask: Numbers


def make_maps(scene: Scene) -> Maps:
    """The targets of a scene."""
    shape = scene.image.shape[:2]
    maps = Maps(*(np.full(shape, value, np.float32) for value in (0, 1, 0, 0)))
    for polygon, ignored in zip(scene.polygons, scene.ignored, strict=True):
        distance = shrink_distance(polygon)
        shrunk = [] if ignored else offset(polygon, -distance)
        if not shrunk:
            cv2.fillPoly(maps.text_mask, [_rounded(polygon)], 0.0)
            continue
        cv2.fillPoly(maps.text, [_rounded(part) for part in shrunk], 1.0)
        _draw_border(maps, polygon, distance)
    maps.threshold[...] = LOWEST + (HIGHEST - LOWEST) * maps.threshold
    return maps


def shrink_distance(polygon: Numbers) -> float:
    """How far the border moves when a polygon is shrunk: A (1 - r²) / L."""
    shape = Polygon(polygon)
    return shape.area * (1 - SHRINK**2) / max(shape.length, 1e-6)


def offset(polygon: Numbers, distance: float) -> list[Numbers]:
    """The polygon grown by a distance, or shrunk by a negative one; empty where nothing is left."""
    library = cast("Any", pyclipper)  # written in C, without types
    clipper = library.PyclipperOffset()
    path = np.round(polygon * _GRAIN).astype(np.int64).tolist()
    clipper.AddPath(path, library.JT_ROUND, library.ET_CLOSEDPOLYGON)
    found = cast("list[Any]", clipper.Execute(distance * _GRAIN))
    return [np.array(each, np.float64) / _GRAIN for each in found]


def _rounded(polygon: Numbers) -> Numbers:
    return np.round(polygon).astype(np.int32)


def _draw_border(maps: Maps, polygon: Numbers, distance: float) -> None:
    """Fill in 1 - d / D, d being the distance to the nearest side, where it is above what other words gave."""
    grown = offset(polygon, distance)
    if not grown:
        return
    cv2.fillPoly(maps.threshold_mask, [_rounded(part) for part in grown], 1.0)
    height, width = maps.threshold.shape
    left, top = np.floor(grown[0].min(0)).astype(int).clip(0)
    right, bottom = np.ceil(grown[0].max(0)).astype(int) + 1
    rows, columns = np.mgrid[top : min(bottom, height), left : min(right, width)]
    pixels = np.stack([columns, rows], -1)[..., None, :].astype(np.float64)
    starts, ends = polygon.astype(np.float64), np.roll(polygon, -1, axis=0).astype(np.float64)
    sides = ends - starts
    along = ((pixels - starts) * sides).sum(-1) / np.maximum((sides**2).sum(-1), 1e-9)
    nearest = starts + along.clip(0, 1)[..., None] * sides
    away = np.linalg.norm(pixels - nearest, axis=-1).min(-1)
    window = maps.threshold[top:bottom, left:right]
    np.maximum(window, (1 - away / distance).clip(0, 1), out=window)
