"""Views: a scene turned, cropped and brought to a size, its words with it; the aspect of a picture is kept."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from shapely.geometry import MultiPoint, box

from floatline.systems.dbnet.scenes import IGNORED, Scene

Numbers = NDArray[Any]
# As in the paper and in the code of its authors.
_MOST_DEGREES = 10.0
_SMALLEST_CROP, _TRIES = 0.1, 10
# A word of which less is inside of the picture is not learnt, and does not count.
_ENOUGH = 0.5
_STRIDE = 32


def fit_square(scene: Scene, size: int) -> Scene:
    """Scaled so that the longer side has `size` pixels; the rest of the square, right or below, is black."""
    height, width = scene.image.shape[:2]
    return _pad(_scale(scene, size / max(height, width)), size, size)


def fit_height(scene: Scene, height: int) -> Scene:
    """Scaled to a height; the width is filled up with black to a multiple of 32, which the network needs."""
    scaled = _scale(scene, height / scene.image.shape[0])
    return _pad(scaled, height, -(-scaled.image.shape[1] // _STRIDE) * _STRIDE)


def augment(scene: Scene, rng: np.random.Generator, size: int) -> Scene:
    """The paper's augmentations: flipped or not, turned by up to 10 degrees, cropped beside the words, and scaled."""
    turned = turn(scene, rng.uniform(-_MOST_DEGREES, _MOST_DEGREES), flip=bool(rng.random() < 0.5))
    return fit_square(crop(turned, rng), size)


def turn(scene: Scene, degrees: float, *, flip: bool) -> Scene:
    """Turned around the centre, and left and right exchanged; what comes in from outside is black."""
    height, width = scene.image.shape[:2]
    matrix = cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), degrees, 1.0)
    if flip:
        matrix[0] = -matrix[0]
        matrix[0, 2] += width - 1
    image = cv2.warpAffine(scene.image, matrix, (width, height), flags=cv2.INTER_LINEAR)
    moved: list[Numbers] = [each @ matrix[:, :2].T + matrix[:, 2] for each in scene.polygons]
    # A mirror turns clockwise corners around.
    return _keep_inside(image, [each[::-1] if flip else each for each in moved], scene.texts)


def crop(scene: Scene, rng: np.random.Generator) -> Scene:
    """A part of at least a tenth of each side that has a word and cuts none; the whole where none was found."""
    height, width = scene.image.shape[:2]
    columns, rows = (_find_free(scene.polygons, axis, length) for axis, length in ((0, width), (1, height)))
    for _ in range(_TRIES):
        (left, right), (top, bottom) = (np.sort(rng.choice(free, 2)) for free in (columns, rows))
        if right + 1 - left < _SMALLEST_CROP * width or bottom + 1 - top < _SMALLEST_CROP * height:
            continue
        part = _keep_inside(
            scene.image[top : bottom + 1, left : right + 1], [p - [left, top] for p in scene.polygons], scene.texts
        )
        if not all(part.ignored):
            return part
    return scene


def _find_free(polygons: list[Numbers], axis: int, length: int) -> Numbers:
    """Columns or rows that no word is in, and those at the ends."""
    taken = np.zeros(length, bool)
    for polygon in polygons:
        low, high = np.floor(polygon[:, axis].min()), np.ceil(polygon[:, axis].max())
        taken[int(max(low, 0)) : int(max(high + 1, 0))] = True
    taken[[0, -1]] = False
    return np.flatnonzero(~taken)


def _scale(scene: Scene, factor: float) -> Scene:
    height, width = scene.image.shape[:2]
    new = max(round(width * factor), 1), max(round(height * factor), 1)
    smooth = cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR
    image = scene.image if new == (width, height) else cv2.resize(scene.image, new, interpolation=smooth)
    # Pixel i reaches from i - 0.5 to i + 0.5.
    factors = np.array([new[0] / width, new[1] / height])
    return _keep_inside(image, [(each + 0.5) * factors - 0.5 for each in scene.polygons], scene.texts)


def _pad(scene: Scene, height: int, width: int) -> Scene:
    below, right = height - scene.image.shape[0], width - scene.image.shape[1]
    beside = [(0, below), (0, right), (0, 0)][: scene.image.ndim]
    return Scene(np.pad(scene.image, beside), scene.polygons, scene.texts)


def _keep_inside(image: Numbers, polygons: list[Numbers], texts: list[str]) -> Scene:
    """Words that are outside are left out; those of which too little is inside, or that have no area, are ignored."""
    height, width = image.shape[:2]
    frame, scene = box(-0.5, -0.5, width - 0.5, height - 0.5), Scene(image)
    for polygon, text in zip(polygons, texts, strict=True):
        shape: Any = MultiPoint(polygon).convex_hull
        inside = shape.intersection(frame)
        if inside.is_empty:
            continue
        whole = shape.area > 0 and inside.area >= _ENOUGH * shape.area
        scene.polygons.append(polygon.astype(np.float32))
        scene.texts.append(text if whole else IGNORED)
    return scene
