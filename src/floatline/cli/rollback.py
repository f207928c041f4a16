"""`floatline rollback`: make FP32 current again, and write down why."""

from __future__ import annotations

from typing import Annotated

import typer

from floatline.cli.output import FormatOption, OutputFormat, print_json, text_console


def rollback(
    target: Annotated[str, typer.Argument(help="The target, as it was approved.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="What went wrong.")],
    by: Annotated[
        str | None,
        typer.Option(
            "--by", metavar="NAME", help="Who rolls the target back. The default is the user who is logged in."
        ),
    ] = None,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Make the FP32 plan current for a target again, and add the reason to floatline-issues.md."""
    from floatline.base.files import find_root
    from floatline.validation.signoff.approval import roll_back
    from floatline.validation.signoff.records import ISSUES, on_one_line

    record = roll_back(target, reason=reason, by=by)
    if output is OutputFormat.json:
        print_json({name: value for name, value in vars(record).items() if value})
        return
    from rich.text import Text

    lines = [f"{record.target}: fp32 is current again", f"  the reason is kept in {find_root() / ISSUES}"]
    text_console().print(Text("\n".join(map(on_one_line, lines))), soft_wrap=True)
