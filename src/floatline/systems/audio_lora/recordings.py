"""Recordings with their texts: a folder or a JSONL file, read when they are asked for, brought to 16 kHz."""

from __future__ import annotations

import importlib
import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from floatline.errors import TargetError
from floatline.systems.audio_lora.batches import HOP, log_mel
from floatline.systems.audio_lora.speech import SAMPLE_RATE
from floatline.systems.audio_lora.tokens import Tokens
from floatline.workload import OnDemand

_SOUNDS = (".wav", ".flac", ".ogg", ".mp3")
# Names that the fields of a line have; those of Hugging Face's audio folders among them.
_AUDIO = ("audio", "file_name", "path")
_TEXT = ("text", "transcription", "sentence")
# Below this share of the highest frequency nothing is changed; from there on it falls, to 0 at the highest one.
_KEPT = 0.9


class Recording(NamedTuple):
    """A file that was not read yet, what is said in it, and whether it is held out; None: not said."""

    path: Path
    text: str
    held_out: bool | None


def load_examples(
    place: str, *, bins: int, positions: int, tokens: Tokens, holdout: float, seed: int, cut: bool
) -> tuple[OnDemand[dict[str, Any]], OnDemand[dict[str, Any]]]:
    """Examples to train on, and held-out ones; texts and headers are looked at now, samples are read when asked for.

    Args:
        place: A folder, or a JSONL file.
        bins: Mel bins.
        positions: Of the encoder, 20 ms each.
        tokens: They must be able to write the texts.
        holdout: Share that is held out where nothing says what is.
        seed: Of that choice.
        cut: Cut off what is longer than the encoder takes; else it is refused.

    Raises:
        TargetError: A place or a file that cannot be used; the line says which, and why.
    """
    found = _find(Path(place))
    for recording in found:
        _check(recording, tokens, longest=None if cut else positions * 2 * HOP / SAMPLE_RATE)
    train, held = _split(found, holdout, seed)
    for part, what in ((train, "train on"), (held, "hold out")):
        if not part:
            raise TargetError(f"audio '{place}' has no recording to {what}. Give more, or another split.")

    def examples(part: list[Recording]) -> OnDemand[dict[str, Any]]:
        def make(number: int) -> dict[str, Any]:
            samples = read_samples(part[number].path)
            return {"features": log_mel(samples, bins=bins), "word": part[number].text}

        return OnDemand(make, len(part))

    return examples(train), examples(held)


def read_samples(path: Path) -> Tensor:
    """A file's samples at 16 kHz, from -1 to 1, the mean of its channels."""
    sound = _sound()
    try:
        samples, rate = sound.read(str(path), dtype="float32", always_2d=True)
    except (OSError, RuntimeError) as error:  # libsndfile's own is a RuntimeError
        raise TargetError(f"Recording '{path}' cannot be read: {_said(error)}. Convert it to wav or flac.") from None
    return resample_recording(torch.from_numpy(samples).mean(1), rate)


def resample_recording(samples: Tensor, rate: int) -> Tensor:
    """From any sample rate to 16 kHz.

    Numerics:
        FP32, by the spectrum of the whole. A sine below 0.88 of half the lower rate comes out as the same sine within
        1e-4 of its size, 20 ms away from both ends; one above 8 kHz is below 1e-4 there. The time of a sample is exact
        at any whole rate. Checked by tests/systems/test_audio_lora_data.py.
    """
    if rate == SAMPLE_RATE:
        return samples
    # A length for which the ratio of the rates is one of whole numbers, with silence at the end: the ends do not meet.
    step = rate // math.gcd(rate, SAMPLE_RATE)
    length = -(-(len(samples) + rate // 10) // step) * step
    wanted = length * SAMPLE_RATE // rate
    spectrum = cast("Tensor", torch.fft.rfft(samples, n=length))
    kept = min(length, wanted) // 2 + 1
    place = torch.arange(kept) / (kept - 1)
    fall = ((place - _KEPT) / (1 - _KEPT)).clamp(0, 1)
    spectrum = spectrum[:kept] * torch.cos(fall * torch.pi / 2).square()
    whole = cast("Tensor", torch.fft.irfft(spectrum, n=wanted)) * (wanted / length)
    return whole[: round(len(samples) * SAMPLE_RATE / rate)]


def _sound() -> Any:
    try:
        soundfile = importlib.import_module("soundfile")
    except (ModuleNotFoundError, OSError) as error:  # the second where it finds no libsndfile
        raise TargetError(
            f"Recordings need soundfile: {_said(error)}. Install it with: pip install 'floatline[workloads]'."
        ) from None
    return soundfile


def _said(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _find(place: Path) -> list[Recording]:
    if place.is_file():
        return list(_read_lines(place))
    if not place.is_dir():
        raise TargetError(f"audio '{place}' is no folder and no file. Give a folder of recordings, or a JSONL file.")
    if (place / "metadata.jsonl").is_file():
        return list(_read_lines(place / "metadata.jsonl"))
    found: list[Recording] = []
    for path in sorted(path for path in place.rglob("*") if path.suffix.lower() in _SOUNDS):
        text = path.with_suffix(".txt")
        if not text.is_file():
            raise TargetError(
                f"Recording '{path}' has no text. Put '{text.name}' beside it, or write a metadata.jsonl."
            )
        first = path.relative_to(place).parts[0]
        held_out = {"train": False, "test": True}.get(first)
        found.append(Recording(path, _read_text(text).strip(), held_out))
    if not found:
        raise TargetError(f"audio '{place}' has no recordings ({', '.join(_SOUNDS)}). Give the folder they are in.")
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(f"'{path}' cannot be read: {_said(error)}. Give text in UTF-8.") from None


def _read_lines(path: Path) -> Iterable[Recording]:
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except ValueError:
            row = None
        fields = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
        audio, text = (next((fields[key] for key in names if key in fields), None) for names in (_AUDIO, _TEXT))
        if not isinstance(audio, str) or not isinstance(text, str):
            raise TargetError(
                f'{path}, line {number}: \'{line[:60]}\' is not {{"audio": PATH, "text": TEXT}}. Correct it.'
            )
        held_out = None if "split" not in fields else fields["split"] != "train"
        yield Recording(path.parent / audio, text.strip(), held_out)


def _check(recording: Recording, tokens: Tokens, *, longest: float | None) -> None:
    path, text = recording.path, recording.text
    if not text:
        raise TargetError(f"Recording '{path}' has an empty text. Write what is said, or take it out.")
    tokens.encode(text)
    if not path.is_file():
        raise TargetError(f"Recording '{path}' does not exist. Paths are relative to the file that names them.")
    sound = _sound()
    try:
        seconds = float(sound.info(str(path)).duration)
    except (OSError, RuntimeError) as error:
        raise TargetError(f"Recording '{path}' cannot be read: {_said(error)}. Convert it to wav or flac.") from None
    if seconds == 0:
        raise TargetError(f"Recording '{path}' is empty. Take it out.")
    if longest is not None and seconds > longest:
        raise TargetError(
            f"Recording '{path}' lasts {seconds:.2f} s, and the base hears {longest:.2f} s. "
            "Set cut_audio=true, or give a base_path that hears more."
        )


def _split(found: list[Recording], holdout: float, seed: int) -> tuple[list[Recording], list[Recording]]:
    """Those to train on and those held out: as they say, or by chance where none says it."""
    if all(recording.held_out is None for recording in found):
        out = set(random.Random(f"held out {seed}").sample(range(len(found)), round(holdout * len(found))))  # noqa: S311
        return [r for i, r in enumerate(found) if i not in out], [found[i] for i in sorted(out)]
    return [r for r in found if not r.held_out], [r for r in found if r.held_out]
