"""`floatline watch`: runs as their ledgers tell them, live or once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from floatline.cli.output import FormatOption, OutputFormat, RunStepsOption, print_json, text_console

if TYPE_CHECKING:
    from rich.console import Console

    from floatline.report.run.facts import RunFacts
    from floatline.report.run.folders import Watched

_CHUNK = 20_000  # records between two pictures while a long ledger is read for the first time
_SECONDS = 0.5


def watch(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders of them, such as runs.")],
    once: Annotated[bool, typer.Option("--once", help="Show the state of the runs once, and exit.")] = False,
    steps: RunStepsOption = None,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Watch runs: loss, scale, norm, skips by reason, layers against the format's limits, time to go.

    Runs that are over are shown and left; so is everything where stdout is no terminal. Exit code 1 means that the
    guard stopped a run, or that one died.
    """
    from floatline.report.run.folders import find_run_folders, open_runs

    watched = open_runs(find_run_folders(runs), steps=steps)
    console = text_console()
    if output is OutputFormat.json or once or not console.is_terminal:
        facts = [run.look() for run in watched]
        if output is OutputFormat.json:
            print_json({"runs": [run.as_json() for run in facts]})
        else:
            _print(facts, console)
    else:
        facts = _follow(watched, console)
    if any(run.state in ("stopped", "died") for run in facts):
        raise typer.Exit(1)


def _print(facts: list[RunFacts], console: Console) -> None:
    from floatline.report.run.terminal import draw_runs

    # A pipe has no width of its own: rich takes COLUMNS, or 80.
    console.print(draw_runs(facts, width=console.width, plain=not _is_unicode(console)), soft_wrap=True)


def _follow(watched: list[Watched], console: Console) -> list[RunFacts]:
    """Draw until every run is over, or Ctrl-C."""
    import time

    from rich.live import Live
    from rich.text import Text

    from floatline.report.run.facts import OVER
    from floatline.report.run.terminal import draw_runs

    plain = not _is_unicode(console)
    facts: list[RunFacts] = []
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                facts = [run.look(most=_CHUNK) for run in watched]
                if any(run.is_behind for run in watched):
                    read = sum(run.account.attempted for run in facts)
                    live.update(Text(f"reading: {read:,} steps so far"), refresh=True)
                    continue
                picture = draw_runs(facts, width=console.width, height=console.height - 1, plain=plain)
                live.update(picture, refresh=True)
                if all(run.state in OVER for run in facts):
                    return facts
                time.sleep(_SECONDS)
        except KeyboardInterrupt:
            return facts  # the way to leave


def _is_unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")
