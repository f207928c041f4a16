"""`floatline approve`: sign a validation report off."""

from __future__ import annotations

from typing import Annotated

import typer

from floatline.cli.output import FormatOption, OutputFormat, print_json, text_console


def approve(
    report: Annotated[str, typer.Argument(help="report.json or rescue.json, or the folder that it is in.")],
    by: Annotated[str, typer.Option("--by", metavar="NAME", help="Who signs.")],
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="A remark that is kept with the signature.")] = "",
    override: Annotated[
        str, typer.Option("--override", metavar="REASON", help="Sign a report that is no PASS; the reason is kept.")
    ] = "",
    candidate: Annotated[
        str | None,
        typer.Option(
            "--candidate",
            metavar="NAME",
            help="The candidate to sign off. The default is the one that is ranked first.",
        ),
    ] = None,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Sign a report off: its plan is current for its target, until something changes or it is rolled back.

    The record is added to floatline-approvals.yaml in the root of the repository, or in the current folder outside of
    one. Only a PASS is signed without --override.
    """
    from floatline.base.files import find_root
    from floatline.validation.signoff.approval import approve as sign
    from floatline.validation.signoff.records import APPROVALS, on_one_line

    record = sign(report, by=by, note=note, override=override, candidate=candidate)
    if output is OutputFormat.json:
        print_json({name: value for name, value in vars(record).items() if value})
        return
    from rich.text import Text

    name = record.plan.get("name", "plan")
    lines = [f"{record.target}: {name} is approved by {record.by}", f"  {record.verdict} {record.result}"]
    lines += [f"  override: {record.override}"] if record.override else []
    lines.append(f"  written to {find_root() / APPROVALS}; commit it with the code")
    text_console().print(Text("\n".join(map(on_one_line, lines))), soft_wrap=True)
