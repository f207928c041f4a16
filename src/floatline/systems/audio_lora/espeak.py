"""Speaks with eSpeak NG, in a process of its own: run as a script, with the standard library alone.

The library keeps noise and phases from one word to the next, so a word sounds the same again only after the same words.
A fresh process that speaks a whole list makes each list the same bits each time.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

_SYNCHRONOUS, _DO_NOT_EXIT = 2, 0x8000
_RATE, _PITCH = 1, 3
_UTF8, _FROM_CHARACTER = 1, 1


def speak_all(library: str, data: str, utterances: list[tuple[str, str, int, int]]) -> tuple[int, list[bytes]]:
    """The sample rate, and 16-bit samples of each utterance: text, voice, words a minute, pitch from 0 to 99."""
    lib: Any = ctypes.CDLL(library)
    heard: list[bytes] = []

    def hear(samples: Any, count: int, _events: Any) -> int:
        if count > 0:
            heard.append(ctypes.string_at(samples, 2 * count))
        return 0

    kept = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(hear)
    sample_rate = lib.espeak_Initialize(_SYNCHRONOUS, 0, data.encode(), _DO_NOT_EXIT)
    if sample_rate <= 0:
        raise SystemExit(f"eSpeak NG does not start with the data in {data}")
    lib.espeak_SetSynthCallback(kept)
    spoken: list[bytes] = []
    for text, voice, rate, pitch in utterances:
        heard.clear()
        lib.espeak_ng_SetRandSeed(1)  # else the clock is the seed
        if lib.espeak_SetVoiceByName(voice.encode()):
            raise SystemExit(f"eSpeak NG has no voice '{voice}'")
        lib.espeak_SetParameter(_RATE, rate, 0)
        lib.espeak_SetParameter(_PITCH, pitch, 0)
        raw = text.encode() + b"\0"
        lib.espeak_Synth(raw, len(raw), 0, _FROM_CHARACTER, 0, _UTF8, None, None)
        lib.espeak_Synchronize()
        spoken.append(b"".join(heard))
    return sample_rate, spoken


def main() -> None:
    """Read what to say as JSON; write the sample rate and lengths as one line of JSON, and then the samples."""
    asked = json.load(sys.stdin)
    sample_rate, spoken = speak_all(asked["library"], asked["data"], asked["utterances"])
    header = {"sample_rate": sample_rate, "bytes": [len(samples) for samples in spoken]}
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + b"".join(spoken))


if __name__ == "__main__":
    main()
