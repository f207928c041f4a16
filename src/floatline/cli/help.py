"""Help and complaints in our own words: groups of commands and options, whole sentences, no types of Python."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, cast, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from floatline.cli.endings import saying_how_to_go_on

_WIDEST = 96  # longer lines are hard to read, however wide the terminal is
_AGAIN = "The same command begins again, or goes on where something is kept."
_NAMES = 24  # columns at most; a longer name has a line of its own


class PlainCommand(TyperCommand):
    """One command: `--json` is short for `--format json`, and a number that is none is told in our words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words behind the command's name."""
        if any("--format" in param.opts for param in self.params):
            own = args.index("--") if "--" in args else len(args)
            args = [part for at, word in enumerate(args) for part in _long(word, is_own=at < own)]
        try:
            return super().parse_args(ctx, list(args))
        except Exception as error:
            wrong: Any = error
            words = _say_wrong(self, getattr(wrong, "param", None), args)
            if words is None:
                if hasattr(wrong, "ctx"):
                    wrong.ctx = wrong.ctx or ctx  # whose help to read
                raise
            raise typer.BadParameter(words, ctx=ctx) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, what the command does, and its options by what they are about."""
        formatter.write(_page(ctx, self, _options(self)))


class AllCommands(TyperGroup):
    """All commands, by what one wants."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command's name; without one, print the help and leave as after a wrong use."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Carry a command out; Ctrl-C and SIGTERM leave a word where it has none of its own, as while torch loads."""
        with saying_how_to_go_on(_AGAIN):
            return super().invoke(ctx)

    def make_context(self, *given: Any, **options: Any) -> Any:
        """Read the words; typer would leave at Ctrl-C without one."""
        with saying_how_to_go_on(_AGAIN):
            return super().make_context(*given, **options)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage and a line for each command, group by group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            lead = inspect.cleandoc(command.help or "").partition("\n\n")[0]
            groups.setdefault(str(getattr(command, "rich_help_panel", "")), []).append((name, _flow(lead)))
        formatter.write(_page(ctx, self, groups | _options(self)))


def _long(word: str, *, is_own: bool) -> tuple[str, ...]:
    return ("--format", "json") if word == "--json" and is_own else (word,)


def _page(ctx: Any, command: Any, groups: dict[str, list[tuple[str, str]]]) -> str:
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    usage = " ".join(("Usage:", ctx.command_path, *_usage(command)))
    lines = [usage, "", *_paragraphs(command.help or "", width)]
    for title, rows in groups.items():
        lines += [typer.style(title, bold=True), *_rows(rows, width), ""]
    return "\n".join(lines)


def _usage(command: Any) -> Iterable[str]:
    if isinstance(command, TyperGroup):
        return ("COMMAND [OPTIONS]",)
    arguments = [_argument(param) for param in command.params if param.param_type_name == "argument"]
    return ("[OPTIONS]", *arguments)


def _paragraphs(text: str, width: int) -> list[str]:
    """Each paragraph wrapped once, a line without a letter between two."""
    return [line for part in inspect.cleandoc(text).split("\n\n") for line in (*_wrap(_flow(part), width), "")]


def _flow(text: str) -> str:
    return " ".join(text.split())


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    room = max(width - len(indent), 20)
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return [indent + line for line in lines] or [""]


def _rows(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Names to the left, sentences to the right; below each other where a name is long."""
    lines: list[str] = []
    column = 2 + max((len(name) for name, _ in rows if len(name) < _NAMES), default=_NAMES)
    for name, words in rows:
        first, *rest = _wrap(words, width, " " * (column + 2))
        styled = typer.style(name, fg="cyan")
        if len(name) < _NAMES:
            lines += [f"  {styled}{first[len(name) + 2 :]}", *rest]
        else:
            lines += [f"  {styled}", first, *rest]
    return lines


def _options(command: Any) -> dict[str, list[tuple[str, str]]]:
    """The rows of each group: arguments first, then options in their order, those without a group last."""
    groups: dict[str, list[tuple[str, str]]] = {}
    rest: list[tuple[str, str]] = []
    for param in command.params:
        if getattr(param, "hidden", False) or not getattr(param, "help", ""):
            continue
        if param.param_type_name == "argument":
            groups.setdefault("Arguments", []).append((_argument(param), _flow(param.help)))
        elif panel := getattr(param, "rich_help_panel", None):
            groups.setdefault(panel, []).append(_option(command, param))
        else:
            rest.append(_option(command, param))
    return groups | {"Options": [*rest, ("-h, --help", "Print this help.")]}


def _argument(param: Any) -> str:
    if param.metavar is not None:
        return str(param.metavar)
    name = param.name.upper() + ("..." if param.nargs != 1 else "")
    return name if param.required else f"[{name}]"


def _option(command: Any, param: Any) -> tuple[str, str]:
    name = "/".join((*param.opts, *param.secondary_opts))
    words, default = _flow(param.help), param.default
    if getattr(param, "is_flag", False):
        chosen = (*(param.opts if default else param.secondary_opts), "")[0] if default is not None else ""
    else:
        name += f" {param.metavar or _value_name(command, param)}"
        default = default.value if isinstance(default, Enum) else default
        chosen = " ".join(map(str, cast("Sequence[Any]", default))) if isinstance(default, tuple | list) else default
    if param.required:
        return name, f"{words} Required."
    return name, words if chosen in (None, "") else f"{words} The default is {chosen}."


def _value_name(command: Any, param: Any) -> str:
    """What stands for the value: its words, N for a number, else the option's own name."""
    kinds = _kinds(command, param)
    if (choices := _choices(kinds)) is not None:
        return "|".join(choices)
    return " ".join(["N"] * param.nargs) if int in kinds or float in kinds else param.name.upper()


def _say_wrong(command: Any, param: Any, args: Sequence[str]) -> str | None:
    """What the option takes and what it was given, where it takes a number or one of a few words; else None."""
    if param is None or not (given := _given(param, args)):
        return None
    kinds = _kinds(command, param)
    info = next((kind for kind in kinds if hasattr(kind, "min")), None)
    least, most = getattr(info, "min", None), getattr(info, "max", None)
    if (choices := _choices(kinds)) is not None:
        takes = " or ".join(choices)
    elif int in kinds or float in kinds:
        takes = "a whole number" if int in kinds else "a number" if param.nargs == 1 else f"{param.nargs} numbers"
        takes += f" of at least {least:g}" if least is not None else ""
        takes += f" and at most {most:g}" if most is not None else ""
    else:
        return None
    shares = [re.fullmatch(r"([\d.]+)\s*%", word) for word in given[1:]]
    plain = " ".join(f"{float(share[1]) / 100:g}" for share in shares if share)
    meant = f": write {plain}" if plain and all(shares) else ""
    return f"{given[0]} takes {takes}, not '{' '.join(given[1:])}'{meant}."


def _kinds(command: Any, param: Any) -> list[Any]:
    """The annotation of the option in the command's function, and everything inside of it."""
    if command.callback is None:
        return []
    return _flat(get_type_hints(command.callback, include_extras=True).get(param.name))


def _choices(kinds: list[Any]) -> list[str] | None:
    found = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)), None)
    return None if found is None else [str(choice.value) for choice in found]


def _flat(hint: Any) -> list[Any]:
    return [hint, *(inner for part in get_args(hint) for inner in _flat(part))]


def _given(param: Any, args: Sequence[str]) -> list[str]:
    """The option as it was written, and its values."""
    for at, word in enumerate(args):
        name, sign, value = word.partition("=")
        if name in param.opts:
            return [name, value] if sign else [name, *args[at + 1 : at + 1 + param.nargs]]
    return []
