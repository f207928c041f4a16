"""Boxes: polygons of words from a probability map, and how well they match (H-mean)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from shapely.geometry import Polygon

from floatline.systems.dbnet.targets import offset

Numbers = NDArray[Any]
# As in the paper: unclip by A r / L with r = 1.5; a match is an IoU of one half.
_UNCLIP = 1.5
_MATCH = 0.5
_SMALLEST = 2.0
# Text begins at the first; a region is a word where the mean probability inside of it is at least the second.
_TEXT = 0.5
_SCORE = 0.6


def find_words(probability: Numbers) -> list[Numbers]:
    """Polygons of the words in a probability map.

    Args:
        probability: From 0 to 1, of shape (height, width).
    """
    bitmap = (probability > _TEXT).astype(np.uint8)
    contours, _ = cv2.findContours(bitmap, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    found: list[Numbers] = []
    for contour in contours:
        if _mean_inside(probability, contour) < _SCORE:
            continue
        rectangle = cv2.minAreaRect(contour.reshape(-1, 2).astype(np.float32))
        # A contour runs through the centres of its pixels; a pixel is as wide as 1.
        (x, y), (width, height), angle = rectangle
        width, height = width + 1, height + 1
        if min(width, height) < _SMALLEST:
            continue
        corners = cv2.boxPoints(((x, y), (width, height), angle))
        grown = offset(corners, width * height * _UNCLIP / (2 * (width + height)))
        if grown:
            outline = max(grown, key=len).astype(np.float32)
            found.append(cv2.boxPoints(cv2.minAreaRect(outline)))
    return found


def _mean_inside(values: Numbers, contour: Numbers) -> float:
    left, top, width, height = cv2.boundingRect(contour)
    inside = np.zeros((height, width), np.uint8)
    cv2.fillPoly(inside, [contour.reshape(-1, 2) - np.array([left, top])], 1)
    return float(values[top : top + height, left : left + width][inside > 0].mean())


@dataclass(frozen=True)
class Matches:
    """How many words were found; sums of several pictures are added.

    Args:
        matched: Words that a box fits.
        words: Words that are there.
        boxes: Boxes that were drawn, but for those on ignored words.
    """

    matched: int = 0
    words: int = 0
    boxes: int = 0

    def __add__(self, other: Matches) -> Matches:
        return Matches(self.matched + other.matched, self.words + other.words, self.boxes + other.boxes)

    @property
    def precision(self) -> float:
        """Share of the boxes that fit a word."""
        return self.matched / self.boxes if self.boxes else 0.0

    @property
    def recall(self) -> float:
        """Share of the words that were found."""
        return self.matched / self.words if self.words else 0.0

    @property
    def hmean(self) -> float:
        """Harmonic mean of precision and recall; 0 where nothing matched."""
        total = self.words + self.boxes
        return 2 * self.matched / total if total else 0.0


def match_words(boxes: Sequence[Numbers], words: Sequence[Numbers], ignored: Sequence[bool]) -> Matches:
    """Match boxes and words one to one, the largest overlaps first.

    Boxes of which more than half lies on an ignored word do not count, as in the ICDAR protocol.
    """
    drawn = [_shape(box) for box in boxes]
    shapes = [_shape(word) for word in words]
    left_out = [shape for shape, skip in zip(shapes, ignored, strict=True) if skip]
    wanted = [shape for shape, skip in zip(shapes, ignored, strict=True) if not skip]
    counted = [box for box in drawn if not any(_share(box, word) > _MATCH for word in left_out)]
    pairs = [(_iou(box, word), i, j) for i, box in enumerate(counted) for j, word in enumerate(wanted)]
    free_boxes, free_words, matched = set(range(len(counted))), set(range(len(wanted))), 0
    for iou, i, j in sorted(pairs, reverse=True):
        if iou < _MATCH:
            break
        if i in free_boxes and j in free_words:
            free_boxes.discard(i)
            free_words.discard(j)
            matched += 1
    return Matches(matched, len(wanted), len(counted))


def _shape(polygon: Numbers) -> Any:
    shape: Any = Polygon(polygon)
    return shape if shape.is_valid else shape.buffer(0)


def _share(box: Any, word: Any) -> float:
    return box.intersection(word).area / max(box.area, 1e-9)


def _iou(box: Any, word: Any) -> float:
    shared = box.intersection(word).area
    return shared / max(box.area + word.area - shared, 1e-9)


def find_by_brightness(image: Numbers) -> list[Numbers]:
    """The detector to beat: what stands out of its surroundings, joined to blobs; no training.

    Args:
        image: Grey values from 0 to 255, or colours, whose mean is taken.
    """
    grey = (image if image.ndim == 2 else image.mean(-1)).clip(0, 255).astype(np.uint8)
    contrast = cv2.morphologyEx(grey, cv2.MORPH_GRADIENT, np.ones((3, 3), np.uint8))
    _, bitmap = cv2.threshold(contrast, 0, 255, cv2.THRESH_BINARY + cv2.THRESH_OTSU)
    joined = cv2.morphologyEx(bitmap, cv2.MORPH_CLOSE, np.ones((3, 7), np.uint8))
    contours, _ = cv2.findContours(joined, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    rectangles = [cv2.minAreaRect(contour.reshape(-1, 2).astype(np.float32)) for contour in contours]
    return [cv2.boxPoints(each) for each in rectangles if min(each[1]) >= 4]
