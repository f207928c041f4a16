"""ICDAR folders: pictures with a label file each, `x1,y1,x2,y2,x3,y3,x4,y4,text` on every line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from floatline.errors import TargetError
from floatline.systems.dbnet.scenes import Scene

_PICTURES = (".jpg", ".jpeg", ".png", ".bmp")


def load_icdar(folder: str | Path, *, size: int) -> list[Scene]:
    """The scenes of a folder, scaled to `size` pixels in height and width, in the order of their names.

    A picture `img_1.jpg` has its words in `gt_img_1.txt` or `img_1.txt`, beside it or in the folder `labels`.

    Raises:
        TargetError: No pictures, a picture without labels, or a line that is none.
    """
    folder = Path(folder)
    pictures = sorted(path for path in folder.glob("*") if path.suffix.lower() in _PICTURES)
    if not pictures:
        raise TargetError(f"Folder '{folder}' has no pictures ({', '.join(_PICTURES)}). Give the one they are in.")
    return [_load_scene(path, size) for path in pictures]


def _load_scene(path: Path, size: int) -> Scene:
    image = cast("NDArray[Any] | None", cv2.imread(str(path), cv2.IMREAD_GRAYSCALE))
    if image is None:
        raise TargetError(f"Picture '{path}' cannot be read. Convert it, or take it out of the folder.")
    places = [parent / name for parent in (path.parent, path.parent / "labels") for name in _label_names(path)]
    labels = next((place for place in places if place.is_file()), None)
    if labels is None:
        raise TargetError(f"Picture '{path}' has no label file. Put 'gt_{path.stem}.txt' beside it.")
    factors = np.array([size / image.shape[1], size / image.shape[0]])
    # Pixel i reaches from i - 0.5 to i + 0.5.
    words = [((corners + 0.5) * factors - 0.5, text) for corners, text in read_labels(labels)]
    resized = cv2.resize(image, (size, size), interpolation=cv2.INTER_AREA).astype(np.float32)
    return Scene(resized, [corners.astype(np.float32) for corners, _ in words], [text for _, text in words])


def _label_names(path: Path) -> tuple[str, str]:
    return f"gt_{path.stem}.txt", f"{path.stem}.txt"


def read_labels(path: Path) -> list[tuple[NDArray[Any], str]]:
    """The words of a label file: four corners and the text; the text may hold commas."""
    found: list[tuple[NDArray[Any], str]] = []
    # Many of these files begin with a byte order mark.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        parts = line.split(",", 8)
        try:
            corners = np.array([float(part) for part in parts[:8]]).reshape(4, 2)
        except ValueError:
            corners = None
        if corners is None or len(parts) < 9 or not np.isfinite(corners).all():
            raise TargetError(f"{path}, line {number}: '{line[:60]}' is no x1,y1,x2,y2,x3,y3,x4,y4,text. Correct it.")
        found.append((corners, parts[8].strip()))
    return found
