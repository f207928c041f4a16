"""`floatline status`: which plan is approved, and whether anything changed since."""

from __future__ import annotations

from typing import Annotated

import typer

from floatline.cli.output import FormatOption, OutputFormat, print_json, text_console


def status(
    target: Annotated[
        str | None, typer.Argument(help="The target to check. The default is every target that was ever approved.")
    ] = None,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Show which plan is approved for a target, and whether code, plan, report or environment changed since.

    Exit code 0 means that everything is as approved; 1 that something changed, or that nothing is approved.
    """
    from floatline.validation.signoff.status import check_all, check_target

    standings = check_all() if target is None else [check_target(target)]
    good = bool(standings) and all(standing.approved for standing in standings)
    if output is OutputFormat.json:
        print_json({"approved": good, "targets": [standing.as_json() for standing in standings]})
    else:
        from rich.text import Text

        nothing = "nothing is approved; floatline train takes a target's own precision"
        text = "\n".join(str(standing) for standing in standings) or nothing
        text_console().print(Text(text), soft_wrap=True)
    if not good:
        raise typer.Exit(1)
