"""`floatline report`: runs as one HTML page that opens anywhere."""

from __future__ import annotations

from typing import Annotated

import typer

from floatline.cli.output import FormatOption, OutputFormat, RunStepsOption, print_json, text_console


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders of them; several are overlaid.")
    ],
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="FILE", help="Where the page is written. The default is run.html in the first RUN."
        ),
    ] = None,
    steps: RunStepsOption = None,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Write runs as an HTML page: curves, skips by reason, layers against the format's limits, events.

    The page is one file, opens without a network, and fits a phone. A run that goes on is shown as it stands.
    """
    from pathlib import Path

    from rich.text import Text

    from floatline.report.run.folders import find_run_folders, open_runs
    from floatline.report.run.page import write_run_page

    facts = [run.look() for run in open_runs(find_run_folders(runs), steps=steps)]
    path = Path(runs[0]) / "run.html" if out is None else Path(out)
    write_run_page(facts, path)
    if output is OutputFormat.json:
        print_json({"page": str(path), "runs": [run.as_json() for run in facts]})
    else:
        text_console().print(Text(f"{path} ({path.stat().st_size / 1000:,.0f} kB)"), soft_wrap=True)
