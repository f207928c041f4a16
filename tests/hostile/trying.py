"""One input tried: put into a folder, read, and judged. And what may not happen meanwhile, by Python's audit events."""

import contextlib
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from random import Random

from tests.hostile.artefacts import Parts, Reader
from tests.hostile.mutations import mutate_bytes, mutate_json, mutate_lines

from floatline.errors import FloatlineError

SECONDS = 120  # for one input; they take milliseconds, also on a machine that does much else


class TooSlow(BaseException):
    """Raised by the alarm: no reader can take it for an error of its own."""


def change(parts: Parts, random: Random, tokens: tuple[bytes, ...]) -> Parts:
    """A copy with one part, seldom two, mutated."""
    parts = dict(parts)
    for _ in range(random.choice((1, 1, 1, 2))):
        name = random.choice(sorted(parts))
        data, kind = parts[name], random.randrange(8)
        if kind < 4:
            changed = mutate_json(data, random)
            parts[name] = mutate_lines(data, random, tokens) if changed is None else changed
        elif kind < 6:
            parts[name] = mutate_lines(data, random, tokens)
        else:
            parts[name] = mutate_bytes(data, random, tokens)
    return parts


def lay_out(reader: Reader, parts: Parts, folder: Path, random: Random | None = None) -> None:
    """Put parts into an empty folder; with `random`, a packed file is seldom mutated once more, as it lies there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    reader.pack(parts, folder)
    if random is not None and random.randrange(8) == 0:
        path = random.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        path.write_bytes(mutate_bytes(path.read_bytes(), random))


def complaint(reader: Reader, folder: Path) -> str:
    """What is wrong with how the folder is read; '' where it is a result, or one clear line."""
    try:
        with _alarm():
            reader.read(folder)
    except FloatlineError as error:
        text = str(error)
        if len(text.split("\n")) > 1 or not text.strip():
            return f"the message is not one line: {text[:200]!r}"
        if len(text) > 3000:
            return f"the message has {len(text):,} characters: {text[:200]!r}"
        return ""
    except (TooSlow, Exception) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/floatline/" in f.filename]
        place = f"{frames[-1].filename.rpartition('/floatline/')[2]}:{frames[-1].lineno}" if frames else "?"
        return f"{type(error).__name__} at {place}: {str(error)[:160]!r}"
    return ""


@contextlib.contextmanager
def _alarm():
    def ring(*_):
        raise TooSlow(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Watch:
    """Notes what the process does that a reader must not do: run code, start programs, leave its folder.

    Built on `sys.addaudithook`: the interpreter itself reports, whatever library makes the call.

    Attributes:
        seen: What was noted.
    """

    _STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn", "ctypes.dlopen")
    _CALLS = ("pickle.find_class", "marshal.load", "marshal.loads", "socket.connect", "socket.bind", "webbrowser.open")
    _CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.chmod", "os.truncate")

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._folder: str | None = None
        # What Python itself and libraries open to be imported; nothing untrusted lies there.
        found = (sys.prefix, sys.base_prefix, *filter(os.path.isdir, sys.path))
        self._own = tuple({*map(os.path.realpath, found), str(Path(__file__).parents[2])})
        sys.addaudithook(self._hear)

    @contextlib.contextmanager
    def over(self, folder: Path):
        """Note what happens from here on; only this folder may be touched."""
        self.seen, self._folder = [], os.path.realpath(folder)
        try:
            yield
        finally:
            self._folder = None

    def _hear(self, event: str, args: tuple) -> None:
        if self._folder is None:
            return
        if event in self._STARTS or event in self._CALLS:
            if event != "marshal.loads" or not self._importing():  # compiled modules are marshalled
                self.seen.append(f"{event} {args!r:.80}")
        elif event == "exec":
            name = getattr(args[0], "co_filename", "?")
            # A page is made by a template of floatline's own, which jinja compiles under that name.
            own = name.startswith(("<frozen", "<template>")) or self._importing()
            if (name.startswith("<") and not own) or self._folder in name:
                self.seen.append(f"exec of {name}")
        elif event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            self._check(args[0], "opened", writing=bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)))
        elif event in self._CHANGES:
            for path in args[:2] if event in ("os.rename", "os.symlink", "os.link") else args[:1]:
                if isinstance(path, str | bytes | os.PathLike):
                    self._check(path, event, writing=True)

    def _check(self, path: object, what: str, *, writing: bool) -> None:
        folder, self._folder = self._folder, None  # realpath may be heard, too
        place = os.path.realpath(os.fsdecode(path))
        inside = place == folder or place.startswith(f"{folder}/")
        allowed = place.startswith(self._own) if not writing else place.endswith((".pyc", "__pycache__"))
        allowed = allowed or place.startswith(("/dev/null", "/proc/", "/sys/", "/usr/share/zoneinfo"))
        if not inside and not allowed and "__pycache__" not in place:
            self.seen.append(f"{what} {place}")
        self._folder = folder

    @staticmethod
    def _importing() -> bool:
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back
        return False
