"""ICDAR folders: pictures and their words as they are downloaded; a picture is read when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from floatline.errors import TargetError
from floatline.systems.dbnet.scenes import Scene
from floatline.workload import OnDemand

Part = Literal["train", "test"]
_PICTURES = (".jpg", ".jpeg", ".png", ".bmp")
# Where pictures and labels lie: as the archives of ICDAR 2015 unpack, as the authors of DBNet have it, and plainly.
_PLACES: dict[Part, tuple[tuple[str, str], ...]] = {
    "train": (
        ("ch4_training_images", "ch4_training_localization_transcription_gt"),
        ("train_images", "train_gts"),
        ("train", "train/labels"),
    ),
    "test": (
        ("ch4_test_images", "Challenge4_Test_Task1_GT"),
        ("test_images", "test_gts"),
        ("test", "test/labels"),
    ),
}


class Labelled(NamedTuple):
    """A picture that was not read yet, and its words."""

    path: Path
    words: list[tuple[NDArray[Any], str]]


def load_icdar(
    folder: str | Path, part: Part, *, colour: bool = False, fit: Callable[[Scene], Scene]
) -> OnDemand[Scene]:
    """The scenes of one part of a data set, in the order of their names; labels are read now, pictures when asked for.

    A picture `img_1.jpg` has its words in `gt_img_1.txt`, `img_1.txt` or `img_1.jpg.txt`, in the folder of the labels
    or beside it.

    Args:
        folder: Has `ch4_training_images` and its neighbours, or `train` and `test`.
        part: Which of them.
        colour: Red, green and blue, or grey.
        fit: Brings a scene to the size that it is used in.

    Raises:
        TargetError: No pictures, a picture without labels, or a line that is none.
    """
    found = find_labelled(Path(folder), part)

    def make(number: int) -> Scene:
        return fit(read_scene(found[number], colour=colour))

    return OnDemand(make, len(found))


def find_labelled(folder: Path, part: Part) -> list[Labelled]:
    """The pictures of one part with their words."""
    there = next((place for place in _PLACES[part] if (folder / place[0]).is_dir()), None)
    if there is None:
        packed = next((images for images, _ in _PLACES[part] if (folder / f"{images}.zip").is_file()), None)
        if packed is not None:
            raise TargetError(f"'{folder / packed}.zip' is still packed. Unpack it into '{folder / packed}'.")
        names = ", ".join(f"'{images}'" for images, _ in _PLACES[part])
        raise TargetError(f"Folder '{folder}' has none of {names} in it. Give the one that ICDAR 2015 was unpacked in.")
    pictures, labels = (folder / name for name in there)
    paths = sorted((p for p in pictures.iterdir() if p.suffix.lower() in _PICTURES), key=_by_number)
    if not paths:
        raise TargetError(f"Folder '{pictures}' has no pictures ({', '.join(_PICTURES)}). Give the one they are in.")
    return [Labelled(path, read_labels(_find_labels(path, labels))) for path in paths]


def _by_number(path: Path) -> tuple[int, str]:
    """img_2 before img_10."""
    return len(path.stem), path.name


def _find_labels(path: Path, labels: Path) -> Path:
    names = (f"gt_{path.stem}.txt", f"{path.stem}.txt", f"gt_{path.name}.txt", f"{path.name}.txt")
    places = [parent / name for parent in (labels, path.parent) for name in names]
    for place in places:
        if place.is_file():
            return place
    raise TargetError(f"Picture '{path}' has no label file. Put 'gt_{path.stem}.txt' beside it or into '{labels}'.")


def read_scene(labelled: Labelled, *, colour: bool) -> Scene:
    """A picture in its own size. Labels are in the pixels of the file: a note of a camera to turn it is not heeded."""
    how = cv2.IMREAD_IGNORE_ORIENTATION | (cv2.IMREAD_COLOR if colour else cv2.IMREAD_GRAYSCALE)
    image = cast("NDArray[Any] | None", cv2.imread(str(labelled.path), how))
    if image is None:
        raise TargetError(f"Picture '{labelled.path}' cannot be read. Convert it, or take it out of the folder.")
    # OpenCV has blue first.
    image = np.ascontiguousarray(image[..., ::-1]) if colour else image
    return Scene(image, [corners for corners, _ in labelled.words], [text for _, text in labelled.words])


def read_labels(path: Path) -> list[tuple[NDArray[Any], str]]:
    """The words of a label file: four corners and the text, which may hold commas and stand in double quotes."""
    try:
        # Many of these files begin with a byte order mark.
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(f"Labels '{path}' cannot be read: {error}. Give a text file in UTF-8.") from None
    found: list[tuple[NDArray[Any], str]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        parts = line.split(",", 8)
        try:
            corners = np.array([float(part) for part in parts[:8]], np.float32).reshape(4, 2)
        except ValueError:
            corners = None
        if corners is None or len(parts) < 9 or not np.isfinite(corners).all():
            raise TargetError(f"{path}, line {number}: '{line[:60]}' is not x1,y1,x2,y2,x3,y3,x4,y4,text. Correct it.")
        found.append((corners, _unquote(parts[8].strip())))
    return found


def _unquote(text: str) -> str:
    quoted = len(text) >= 2 and text[0] == text[-1] == '"'
    return text[1:-1].replace('\\"', '"') if quoted else text
