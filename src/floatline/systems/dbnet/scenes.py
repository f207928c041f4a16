"""Scenes: pictures with words, drawn from real fonts among clutter."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import cv2
import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

IGNORED = "###"
_FONTS = (
    "DejaVuSans.ttf",
    "DejaVuSans-Bold.ttf",
    "DejaVuSansMono.ttf",
    "DejaVuSerif.ttf",
    "DejaVuSerif-BoldItalic.ttf",
    "STIXGeneral.ttf",
    "STIXGeneralBol.ttf",
    "STIXGeneralItalic.ttf",
    "cmr10.ttf",
    "cmss10.ttf",
    "cmtt10.ttf",
)
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
# Words with a lower height are ignored in training and in the score: nobody reads them.
_LOWEST = 5.0
Numbers = NDArray[Any]


@dataclass(frozen=True)
class Scene:
    """A picture and the words in it.

    Args:
        image: Grey values from 0 to 255, of shape (height, width); or red, green and blue in a last dimension.
        polygons: Corners (x, y) of each word, clockwise.
        texts: The words; `###` is to be ignored.
    """

    image: Numbers
    polygons: list[Numbers] = field(default_factory=list[Numbers])
    texts: list[str] = field(default_factory=list[str])

    @property
    def ignored(self) -> list[bool]:
        """Of each word, whether it is to be ignored."""
        return [text == IGNORED for text in self.texts]


def draw_scenes(num: int, *, size: int, words: int, text_height: tuple[int, int], seed: int) -> list[Scene]:
    """Scenes that follow from the seed.

    Args:
        num: Scenes.
        size: Height and width of each.
        words: The most words in one; where there is no room they are fewer.
        text_height: Of the smallest and of the largest font, in pixels.
        seed: Of everything that is drawn.
    """
    # One generator for each: a scene stays the same when there are more of them.
    return [draw_scene(np.random.default_rng([seed, i]), size, words, text_height) for i in range(num)]


def draw_scene(rng: np.random.Generator, size: int, words: int, text_height: tuple[int, int]) -> Scene:
    """One scene."""
    canvas = _draw_background(rng, size)
    _draw_clutter(rng, canvas)
    scene = Scene(canvas)
    taken = np.zeros((size, size), np.uint8)
    for _ in range(words):
        _place_word(rng, scene, taken, text_height)
    noisy = canvas + rng.normal(0.0, rng.uniform(1.0, 6.0), canvas.shape)
    canvas[...] = noisy.clip(0, 255)
    return scene


def _draw_background(rng: np.random.Generator, size: int) -> Numbers:
    low, high = np.sort(rng.uniform(40, 215, 2))
    angle = rng.uniform(0, 2 * np.pi)
    y, x = np.mgrid[0:size, 0:size] / size
    ramp = (np.cos(angle) * x + np.sin(angle) * y + 1.5) / 3
    stains = cv2.resize(rng.normal(0, 8, (8, 8)).astype(np.float32), (size, size), interpolation=cv2.INTER_CUBIC)
    return (low + (high - low) * ramp + stains).astype(np.float32)


def _draw_clutter(rng: np.random.Generator, canvas: Numbers) -> None:
    """Lines, boxes and discs: as bright and as sharp as words are."""
    size = len(canvas)
    for _ in range(rng.integers(2, 7)):
        ends = rng.integers(0, size, 4)
        first, second = (int(ends[0]), int(ends[1])), (int(ends[2]), int(ends[3]))
        grey, thick = float(rng.uniform(0, 255)), int(rng.integers(1, 4))
        kind = rng.integers(3)
        if kind == 0:
            cv2.line(canvas, first, second, grey, thick)
        elif kind == 1:
            cv2.rectangle(canvas, first, second, grey, thick)
        else:
            cv2.circle(canvas, first, int(rng.integers(2, size // 6)), grey, int(rng.choice([-1, thick])))


def _place_word(
    rng: np.random.Generator, scene: Scene, taken: Numbers, text_height: tuple[int, int], tries: int = 12
) -> None:
    """Put a word where none is yet; give up after some tries."""
    size = len(taken)
    height = int(rng.integers(text_height[0], text_height[1] + 1))
    text = "".join(rng.choice(list(_LETTERS), int(rng.integers(2, 8))))
    patch = _render(text, str(rng.choice(_FONTS)), height)
    rows, columns = patch.shape
    corners = np.array([[0, 0], [columns, 0], [columns, rows], [0, rows]], np.float32) - 0.5
    for _ in range(tries):
        polygon = _look_at(rng, corners, size)
        if polygon.min() < 1 or polygon.max() > size - 2:
            continue
        area = np.zeros_like(taken)
        cv2.fillPoly(area, [np.round(polygon).astype(np.int32)], 1)
        if (taken & area).any():
            continue
        taken |= cv2.dilate(area, np.ones((5, 5), np.uint8))
        shape = cv2.getPerspectiveTransform(corners, polygon)
        ink = cv2.warpPerspective(patch, shape, (size, size), flags=cv2.INTER_AREA)
        behind = float(scene.image[area > 0].mean())
        distance = rng.uniform(60, 140)
        grey = behind + distance if behind + distance < 255 and (rng.random() < 0.5 or behind < distance) else None
        grey = behind - distance if grey is None else grey
        scene.image[...] = scene.image * (1 - ink) + np.clip(grey, 0, 255) * ink
        lowest = min(np.linalg.norm(polygon[0] - polygon[3]), np.linalg.norm(polygon[1] - polygon[2]))
        scene.polygons.append(polygon)
        scene.texts.append(text if lowest >= _LOWEST else IGNORED)
        return


def _look_at(rng: np.random.Generator, corners: Numbers, size: int) -> Numbers:
    """The corners turned, seen from the side, and moved to a place."""
    angle = rng.normal(0, 0.25)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    seen = (corners - corners.mean(0)) @ turn
    height = float(corners[2, 1] - corners[0, 1])
    seen = seen + rng.uniform(-0.12, 0.12, (4, 2)) * height
    return (seen + rng.uniform(0, size, 2)).astype(np.float32)


def _render(text: str, font: str, height: int) -> Numbers:
    """A word from 0 to 1, cut to its ink with a margin of one pixel."""
    face = _load_font(font, height)
    left, top, right, bottom = face.getbbox(text)
    image = Image.new("L", (int(right - left) + 2, int(bottom - top) + 2))
    ImageDraw.Draw(image).text((1 - left, 1 - top), text, fill=255, font=face)
    return np.asarray(image, np.float32) / 255


@cache
def _load_font(name: str, height: int) -> ImageFont.FreeTypeFont:
    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(str(folder / name), height)
