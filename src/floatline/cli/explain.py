"""`floatline explain`: the catalogue of causes, one entry of it, a lint rule, or the entry behind an error message."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from floatline.cli.output import FormatOption, OutputFormat, print_json, text_console

if TYPE_CHECKING:
    from rich.console import Console

    from floatline.causes import Cause, Symptom
    from floatline.lint.rule import Rule

# The end of a log holds the error; more would only take longer.
_MOST_CHARACTERS = 200_000
# What to run next, where a command answers what the catalogue can only ask.
_NEXT = {
    "out-of-memory": "floatline doctor FILE.py counts these parts of your model under every plan, without a GPU. "
    "FP16 weights with an exact master are a plan of fp16-true with floatline.optim.AdamW."
}
# Longer lines are hard to read, however wide the terminal is.
_WIDTH = 88


def explain(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID | FLxxx | MESSAGE | -]",
            help="A cause, a lint rule, an error message in quotes, or - to read a log from standard input.",
        ),
    ] = None,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Say what a cause or an error message means, and what to change.

    Without an argument, list all causes. Of a log, the last 200,000 characters are read:

    python train.py 2>&1 | floatline explain -
    """
    from floatline.causes import CAUSES

    if words is not None and len(words) == 1 and (rule := _find_rule(words[0])) is not None:
        _explain_rule(rule, output)
        return
    if words is None:
        causes, named, symptom = list(CAUSES.values()), [], None
    else:
        causes, named, symptom = _answer(_read(words))
    if output is OutputFormat.json:
        print_json(
            {
                "query": " ".join(words) if words else None,
                "decided": bool(named),
                "symptom": {"title": symptom.title, "check": symptom.check} if symptom else None,
                "causes": [cause.as_json() for cause in causes],
            }
        )
        return
    console = text_console()
    if words is None:
        write_list(console, causes)
    elif named:
        write_cause(console, causes[0])
        _write_rest(console, causes[1:])
    elif symptom:
        write_symptom(console, symptom, causes)


def _find_rule(word: str) -> type[Rule] | None:
    """The lint rule of that code or name; a code that does not exist is an error, a name may be a cause's."""
    from floatline.errors import LintError

    is_code = re.fullmatch(r"FL\d+", word.strip(), re.IGNORECASE) is not None
    if not is_code and not re.fullmatch(r"[a-z0-9-]+", word):
        return None
    from floatline.lint.rules import find_rule

    try:
        return find_rule(word)
    except LintError:
        if is_code:
            raise
        return None


def _explain_rule(rule: type[Rule], output: OutputFormat) -> None:
    from floatline.report.lint import print_rule, rule_as_json

    if output is OutputFormat.json:
        print_json(rule_as_json(rule))
    else:
        print_rule(text_console(), rule)


def _read(words: list[str]) -> str:
    from floatline.errors import CauseError

    if words != ["-"]:
        text = " ".join(words)
    elif sys.stdin.isatty():
        raise CauseError("No log on standard input. Pipe one in: python train.py 2>&1 | floatline explain -")
    else:
        text = _read_end(sys.stdin.buffer)
    if text.strip():
        return text
    raise CauseError("The message is empty. Give an id or a message; 'floatline explain' lists the ids.")


def _read_end(stream: BinaryIO) -> str:
    """The end of a log, however long it is; no more than that is held."""
    kept = b""
    while block := stream.read(1 << 20):
        kept = (kept + block)[-4 * _MOST_CHARACTERS :]  # a character has at most four bytes
    return kept.decode(errors="replace")[-_MOST_CHARACTERS:]


def _answer(text: str) -> tuple[list[Cause], list[Cause], Symptom | None]:
    """The causes that fit, those of them that the text names for certain, and the symptom it shows."""
    from floatline.causes import CAUSES, find_cause, find_named_causes, find_symptom
    from floatline.errors import CauseError

    try:
        cause = find_cause(text)
    except CauseError:
        named, symptom = find_named_causes(text), find_symptom(text)
        if not (named or symptom) and len(text.split()) == 1:
            raise
    else:
        return [cause], [cause], None
    if named or symptom:
        shared = [CAUSES[name] for name in symptom.causes] if symptom else []
        return list(dict.fromkeys((*named, *shared))), named, symptom
    shown = " ".join(text.split())
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    raise CauseError(
        f"No cause matches the message {shown!r}. Paste the whole traceback; 'floatline explain' lists all causes."
    )


def write_list(console: Console, causes: list[Cause]) -> None:
    """Print one line for each cause, by family."""
    from rich.text import Text

    from floatline.causes import FAMILIES

    for family, title in FAMILIES.items():
        console.print(Text(title, style="bold"))
        for cause in causes:
            if cause.family == family:
                console.print(Text.assemble("  ", (f"{cause.id:<26}", "cyan"), " ", cause.title), soft_wrap=True)
        console.print()
    console.print(Text("floatline explain ID prints one; an error message in quotes finds its cause."))


def write_cause(console: Console, cause: Cause) -> None:
    """Print one entry: what happens, how it is told apart, what to do, what not to do."""
    from rich.text import Text

    console.print(Text.assemble((cause.id, "bold cyan"), "  ", (cause.title, "bold")))
    _write_section(console, "What happens", cause.mechanism)
    _write_section(console, "How to tell", cause.told_apart)
    console.print(Text("\nWhat to do", style="bold"))
    for remedy in cause.remedies:
        code, _, why = remedy.partition("  # ")
        if not why:
            _write_indented(console, code)
            continue
        console.print(Text.assemble("  ", (code, "green")), soft_wrap=True)
        console.print(Text.assemble("    ", (f"# {why}", "dim")), soft_wrap=True)
    _write_section(console, "What does not help", cause.wrong_fix)
    if cause.id in _NEXT:
        _write_section(console, "What to run", _NEXT[cause.id])
    _write_section(console, "Source", cause.reference)
    for source, url in cause.links.items():
        if source != url:
            console.print(Text(f"  {url}"), soft_wrap=True)


def write_symptom(console: Console, symptom: Symptom, causes: list[Cause]) -> None:
    """Print what decides between the causes that share a message."""
    from rich.text import Text

    console.print(Text(symptom.title, style="bold"))
    fit = f"{len(causes)} causes fit it" if len(causes) > 1 else "one cause of the catalogue fits it"
    _write_indented(console, f"The message alone does not decide the cause; {fit}.")
    _write_section(console, "What to check", symptom.check)
    console.print(Text("\nThe causes, in the order worth checking", style="bold"))
    for cause in causes:
        console.print(Text.assemble("  ", (cause.id, "cyan"), "  ", cause.title), soft_wrap=True)
        _write_indented(console, cause.told_apart, by=4)
    console.print(Text("\nfloatline explain ID says what to do about one of them."))


def _write_rest(console: Console, causes: list[Cause]) -> None:
    from rich.text import Text

    if not causes:
        return
    console.print(Text("\nThe text also fits", style="bold"))
    for cause in causes:
        console.print(Text.assemble("  ", (f"{cause.id:<26}", "cyan"), " ", cause.title), soft_wrap=True)


def _write_section(console: Console, title: str, text: str) -> None:
    from rich.text import Text

    console.print(Text(f"\n{title}", style="bold"))
    _write_indented(console, text)


def _write_indented(console: Console, text: str, *, by: int = 2) -> None:
    import textwrap

    from rich.text import Text

    width = min(console.width, _WIDTH) - by
    for line in textwrap.wrap(text, max(width, 20), break_on_hyphens=False, break_long_words=False):
        console.print(Text(" " * by + line), soft_wrap=True)
