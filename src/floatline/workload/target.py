"""Target: a workload or a training function, loaded from FILE.py, package.module:name, or a reference workload."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import shlex
import sys
import traceback
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from floatline.errors import TargetError, suggest
from floatline.workload.config import WorkloadConfig, merge, parse_pairs, read_config
from floatline.workload.reading import find_source, may_define, needs
from floatline.workload.workload import FIELDS, Workload, describe, is_row

# A name, not an import: the workloads stand on top of the house, and nothing below may need them.
_ROOM = "floatline.systems"


@dataclass(frozen=True)
class Reference:
    """A reference workload with its settings.

    Args:
        name: As in `floatline train NAME`.
        module: Has `Config`, `VARIANTS` and `build(config, seed)`; and `read_settings(settings, path)` where it knows
            files of another project.
        config: The settings.
    """

    name: str
    module: ModuleType
    config: WorkloadConfig

    def build(self, seed: int = 0) -> Workload:
        """The workload; it keeps its settings, so that a run can be resumed with the same."""
        made: Workload = self.module.build(self.config, seed=seed)
        return replace(made, settings={"workload": self.name, **self.config.model_dump(mode="json")})


def find_reference(
    text: str, *, preset: str | None = None, config: str | Path | None = None, pairs: Iterable[str] = ()
) -> Reference | None:
    """The reference workload that a target names; None where it names none.

    Later settings win: the variant, the preset, the file, the pairs.

    Args:
        text: NAME or NAME:VARIANT, and settings after it as `split_settings` takes them.
        preset: A second variant, such as a size.
        config: A YAML file with settings.
        pairs: Settings as key=value.

    Raises:
        TargetError: A variant or a setting that is not there, or a package that is missing.
    """
    word, own = split_settings(text)
    name, _, variant = word.partition(":")
    if name not in reference_names():
        return None
    module = _import(name)
    layers: list[Mapping[str, Any]] = [_variant(module, name, each) for each in (variant, preset) if each]
    if config is not None:
        layers.append(_read_file(module, name, config))
    settings = merge(*layers, parse_pairs([*own, *pairs]))
    try:
        return Reference(name, module, module.Config(**settings))
    except TargetError as error:
        raise TargetError(f"Workload '{word}': {error}") from None


def split_settings(text: str) -> tuple[str, list[str]]:
    """The target, and the settings behind it: 'mmgcn:broken learning_rate=0.1'; quoted as in a shell."""
    try:
        word, *pairs = shlex.split(text) if " " in text and not Path(text).exists() else [text]
    except ValueError:  # an apostrophe, in a name of a folder
        return text, []
    return (word, pairs) if all("=" in pair for pair in pairs) else (text, [])


@cache
def reference_names() -> tuple[str, ...]:
    """Names of the reference workloads; nothing is imported for it but the folder they lie in."""
    spec = importlib.util.find_spec(_ROOM)
    places = (spec.submodule_search_locations or []) if spec is not None else []
    return tuple(sorted(found.name for found in pkgutil.iter_modules(places) if not found.name.startswith("_")))


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"{_ROOM}.{name}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing == "floatline":
            raise
        raise TargetError(
            f"Workload '{name}' needs {missing}. Install it with: pip install 'floatline[workloads]'."
        ) from None


def _variant(module: ModuleType, name: str, variant: str) -> Mapping[str, Any]:
    known: Mapping[str, Mapping[str, Any]] = module.VARIANTS
    if variant not in known:
        raise TargetError(f"Workload '{name}' has no variant '{variant}'. {suggest(variant, known)}")
    return known[variant]


def _read_file(module: ModuleType, name: str, path: str | Path) -> Mapping[str, Any]:
    """The settings of a file; a workload may know files of another project as well."""
    own = _of(name, read_config(path), path)
    translate: Callable[[Mapping[str, Any], Path], dict[str, Any]] | None = getattr(module, "read_settings", None)
    return own if translate is None else translate(own, Path(path))


def _of(name: str, settings: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """The settings of a file; one that a run kept names its workload."""
    own = settings.pop("workload", name)
    if own != name:
        raise TargetError(f"Config '{path}' is of workload '{own}', not '{name}'. Name that one, or another file.")
    return settings


_FUNCTIONS, _GIVEN = ("build", "train"), ("seed", "steps")
_KINDS = "Use FILE.py, package.module or package.module:name, or a reference workload by name."


@dataclass(frozen=True)
class Target:
    """A loaded target: something that builds a workload, or a training function.

    Args:
        text: As the user wrote it.
        builder: Its `build`; None where it has only `train`.
        trainer: Its `train`; None where it has none.
        folder: What is on sys.path while its code runs.
    """

    text: str
    builder: Callable[..., object] | None
    trainer: Callable[..., object] | None
    folder: Path

    def build(self, seed: int = 0) -> Workload:
        """Seed torch and build the workload."""
        if self.builder is None:
            raise TargetError(
                f"Target '{self.text}' has only train(). Add build(), which returns ({', '.join(FIELDS)})."
            )
        return _as_workload(self.call(seed), self.text)

    def call(self, seed: int = 0) -> object:
        """Seed torch and call the function that builds; gives what it returns."""
        import torch

        if self.builder is None:
            raise TargetError(f"Target '{self.text}' trains by itself. Name a function that takes a seed and no steps.")
        arguments = _seed_arguments(self.builder, seed, self.text)
        torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        with _on_path(self.folder), _blame(self.text, f"{getattr(self.builder, '__name__', 'build')}() failed"):
            return self.builder(**arguments)


def load_target(
    text: str, *, preset: str | None = None, config: str | Path | None = None, pairs: Sequence[str] = ()
) -> Target:
    """Load a target: FILE.py, package.module, either with :name, or a reference workload, NAME or NAME:VARIANT.

    A reference workload's name comes first: write `./distill.py` for a file of your own with such a name.

    Args:
        text: The target; settings may stand behind it, as `split_settings` takes them.
        preset: A variant of a reference workload, on top of the one in the name.
        config: A YAML file with settings for it.
        pairs: Settings for it as key=value; they win.
    """
    if importlib.util.find_spec("torch") is None:
        raise TargetError(f"Target '{text}' needs torch. Install it with: pip install 'floatline[torch]'.")
    reference = find_reference(text, preset=preset, config=config, pairs=pairs)
    if reference is not None:
        return Target(text, reference.build, None, Path.cwd())
    text, own = split_settings(text)
    given = [
        *own,
        *pairs,
        *([f"--config {config}"] if config is not None else []),
        *([f"--preset {preset}"] * bool(preset)),
    ]
    if given:
        names = ", ".join(reference_names())
        raise TargetError(f"Target '{text}' takes no settings, but {given[0]} was given. Only {names} do.")
    place, name = _split_name(text)
    looks_like_file = place.endswith(".py") or "/" in place or "\\" in place or Path(place).is_file()
    if looks_like_file:
        module, folder = _load_file(Path(place), name, text), Path(place).resolve().parent
    else:
        module, folder = _load_module(place, name, text), Path.cwd()
    return _find_functions(module, name, text, folder)


def _split_name(text: str) -> tuple[str, str]:
    """'a.b:name' is ('a.b', 'name'); a Windows drive is not a name."""
    place, _, name = text.rpartition(":")
    return (place, name) if place and name.isidentifier() else (text, "")


def _load_file(path: Path, wanted: str, text: str) -> ModuleType:
    if path.is_dir():
        raise TargetError(f"Target '{text}' is a folder. {_KINDS}")
    if not path.is_file():
        raise TargetError(f"Target '{text}' does not exist. Check the path. {_KINDS}")
    if path.suffix != ".py":
        raise TargetError(f"Target '{text}' is not a Python file. {_KINDS}")
    full = path.resolve()
    _check_source(full, wanted, text)
    name = _module_name(full)
    spec = importlib.util.spec_from_file_location(name, full)
    if spec is None or spec.loader is None:
        raise TargetError(f"Target '{text}' cannot be imported. {_KINDS}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    with _on_path(full.parent), _blame(text, "importing it failed"):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


def _module_name(full: Path) -> str:
    """The file's own name where it is free, so that processes which the target starts find it again.

    Else a name of its own: 'types.py' must not hide a module, nor one target another of the same name.
    """
    if _is_free(full):
        return full.stem
    stem = re.sub(r"\W", "_", full.stem)
    return f"floatline_target_{stem}_{zlib.crc32(str(full).encode()):08x}"


def _is_free(full: Path) -> bool:
    if not re.fullmatch(r"\w+", full.stem):
        return False
    if full.stem in sys.modules:
        return getattr(sys.modules[full.stem], "__file__", None) == str(full)
    spec = importlib.util.find_spec(full.stem)
    return spec is None or spec.origin == str(full)


def _load_module(place: str, wanted: str, text: str) -> ModuleType:
    if not all(part.isidentifier() for part in place.split(".")):
        raise TargetError(f"Target '{text}' is not a file or a module. {_KINDS}")
    with _on_path(Path.cwd()):
        source = find_source(place)
    if source is not None:
        _check_source(source, wanted, text)
    with _on_path(Path.cwd()), _blame(text, "importing it failed"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            # Only the target itself may be what is missing; a module that it imports is its own failure.
            if error.name and (place == error.name or place.startswith(error.name + ".")):
                raise TargetError(f"Target '{text}' is not a file or a module. {_KINDS}") from None
            raise


def _check_source(path: Path, wanted: str, text: str) -> None:
    """Refuse what is no target before it is imported: importing a script runs it."""
    try:
        source = path.read_bytes()
        # What needs its model handed over is a function of a script, which importing would run.
        found = may_define(source, [wanted]) if wanted else may_define(source, _FUNCTIONS, given=_GIVEN)
        if not found:
            known = "" if wanted else next((name for name in _FUNCTIONS if needs(source, name)), "")
            raise TargetError(_say_missing(wanted, text, ", so it was not run", known, needs(source, known)))
    except SyntaxError as error:
        raise TargetError(
            f"Target '{text}' is not Python: {type(error).__name__}: {error.msg} at {path.name}:{error.lineno or 1}. "
            "Fix that line."
        ) from None
    except OSError as error:
        raise TargetError(f"Target '{text}' cannot be read: {error.strerror}. {_KINDS}") from None


def _say_missing(wanted: str, text: str, done: str = "", known: str = "", required: Sequence[str] = ()) -> str:
    if wanted == "forward":
        return (
            f"Target '{text}': there is no function 'forward'{done}. Add forward(seed), which returns (model, inputs)."
        )
    if wanted:
        return f"Target '{text}': there is no function '{wanted}'. Name one that builds a workload."
    lacks = f"has a {known}() that needs {', '.join(required)}" if known else "has neither build() nor train()"
    script = shlex.quote(text) if text.endswith(".py") else f"-m {text}"
    return (
        f"Target '{text}' {lacks}{done}. Add build(), which returns ({', '.join(FIELDS)}). "
        f"A script needs no change: floatline diagnose -- python {script}"
    )


def _find_functions(module: ModuleType, name: str, text: str, folder: Path) -> Target:
    if name:
        found = getattr(module, name, None)
        if not callable(found):
            raise TargetError(_say_missing(name, text))
        trains = name == "train" or _takes_steps(found)
        return Target(text, None, found, folder) if trains else Target(text, found, None, folder)
    build, train = getattr(module, "build", None), getattr(module, "train", None)
    if not callable(build) and not callable(train):
        raise TargetError(_say_missing("", text))
    return Target(text, build if callable(build) else None, train if callable(train) else None, folder)


def _takes_steps(function: Callable[..., object]) -> bool:
    """Whether it is a training function under another name: what builds a workload takes a seed, and no more."""
    try:
        return "steps" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False


def _seed_arguments(builder: Callable[..., object], seed: int, text: str) -> dict[str, int]:
    parameters = inspect.signature(builder).parameters.values()
    if any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in parameters):
        return {"seed": seed}
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    if required:
        name = getattr(builder, "__name__", "build")
        raise TargetError(f"Target '{text}': {name} needs {', '.join(required)}. It may take a seed, and no more.")
    return {}


def _as_workload(made: object, text: str) -> Workload:
    if isinstance(made, Workload):
        return made
    if not is_row(made) or len(made) != len(FIELDS):
        raise TargetError(
            f"Target '{text}': build() returned {describe(made)}. "
            f"It must return a Workload or the tuple ({', '.join(FIELDS)})."
        )
    try:
        return Workload(*cast("tuple[Any, Any, Any, Any, Any]", made))
    except TargetError as error:
        raise TargetError(f"Target '{text}': {error}") from None


@contextlib.contextmanager
def _on_path(folder: Path) -> Generator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


@contextlib.contextmanager
def _blame(text: str, what: str) -> Generator[None]:
    """Turn whatever the user's code raises into one line with its place."""
    try:
        yield
    except TargetError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if f.filename != __file__ and not f.filename.startswith("<frozen")]
        # Where the user's code is, and not the library that it called last.
        own = [f for f in own if "site-packages" not in Path(f.filename).parts] or own
        place = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
        first_line = next(iter(str(error).splitlines()), "")
        raise TargetError(
            f"Target '{text}': {what}: {type(error).__name__}: {first_line}{place}. "
            "Run it alone to see the whole error."
        ) from error
