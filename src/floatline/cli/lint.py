"""`floatline lint`: code and configurations that break in 16 bits, found and fixed before they run."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from floatline.cli.output import print_json, show_share, text_console

if TYPE_CHECKING:
    from floatline.lint import LintFinding, LintResult
    from floatline.lint.settings import Settings


class LintFormat(str, Enum):
    """How `lint` reports."""

    text = "text"
    json = "json"
    sarif = "sarif"
    github = "github"


def lint(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PATH]...", help="Files and folders to read. The default is the current folder."),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Rewrite what can be rewritten as the same function, never less accurate.")
    ] = False,
    unsafe_fixes: Annotated[
        bool,
        typer.Option(
            "--unsafe-fixes", help="With --fix or --diff, also make the rewrites that a person should look at."
        ),
    ] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Show the rewrites as a diff, and write nothing.")] = False,
    select: Annotated[
        list[str] | None,
        typer.Option("--select", metavar="RULE", help="Use only these rules, such as FL101, FL1 or log-of-softmax."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", metavar="RULE", help="Use all rules but these.")
    ] = None,
    half: Annotated[
        bool,
        typer.Option(
            "--half",
            help="Also report what breaks in pure half, for an input of 16 bits, or in a project of 16 bits, where "
            "nothing shows them. Without it, only what the files show is reported.",
        ),
    ] = False,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="DEVICE", help="The hardware that the code is for, such as sm_75, T4 or v100."),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="FILE", help="File of known findings, which are not reported again."),
    ] = None,
    write_baseline: Annotated[
        bool, typer.Option("--write-baseline", help="Write today's findings to the baseline file.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, metavar="N", help="How many processes read files. The default is one per core."),
    ] = None,
    output: Annotated[
        LintFormat,
        typer.Option(
            "--format",
            help="Format of the output: text for people, json for programs (--json does it), sarif and github for CI.",
        ),
    ] = LintFormat.text,
) -> None:
    """Find code and configurations that break in 16 bits, and fix them.

    Settings come from [tool.floatline.lint] in pyproject.toml; options are added to them.
    A line with "# floatline: allow[rule-name]" is left alone. Exit code 1 means findings.
    """
    import time
    from dataclasses import replace

    from floatline.lint import lint_paths
    from floatline.lint.baseline import drop_known, read_baseline
    from floatline.lint.baseline import write_baseline as save_baseline

    given = paths or [Path()]
    if unsafe_fixes and not (fix or diff):
        typer.echo("floatline: --unsafe-fixes does nothing without --fix or --diff.", err=True)
    settings = _settings(given[0], select or [], ignore or [], on, baseline)
    settings = replace(settings, half=settings.half or half)
    started = time.perf_counter()
    with show_share(f"reading {', '.join(map(str, given))}") as show:
        result = lint_paths(given, settings=settings, fix=fix or diff, unsafe=unsafe_fixes, jobs=jobs, on_progress=show)
    seconds = time.perf_counter() - started
    known = settings.root / settings.baseline if settings.baseline else None
    findings = list(result.findings)
    if write_baseline:
        if known is None:
            known = settings.root / "floatline-baseline.json"
        save_baseline(known, findings, root=settings.root)
        typer.echo(f"{len(findings)} findings are known from now on: {known}", err=True)
        return
    if known is not None:
        findings = drop_known(findings, read_baseline(known), root=settings.root)
    if fix and not diff:
        _write(result)
    _print(result, findings, output=output, seconds=seconds, diff=diff, fix=fix, unsafe=unsafe_fixes)
    for file, why in result.unread:
        typer.echo(f"floatline: {file} was not read: {why}", err=True)
    if findings or (diff and result.changes):
        raise typer.Exit(1)


def _settings(start: Path, select: list[str], ignore: list[str], on: str | None, baseline: Path | None) -> Settings:
    from dataclasses import replace

    from floatline.lint.settings import read_settings

    settings = read_settings(start if start.is_dir() else start.parent)
    settings = replace(settings, ignore=(*settings.ignore, *ignore), on=settings.on if on is None else on)
    if select:
        settings = replace(settings, select=tuple(select))
    return settings if baseline is None else replace(settings, baseline=str(baseline.resolve()))


def _write(result: LintResult) -> None:
    """Put the changes on the disk: each file whole, or as it was."""
    from floatline.base.files import write_whole
    from floatline.errors import LintError

    for file, before, after in result.changes:
        path = Path(file)
        mark = "\ufeff" if path.read_bytes().startswith(b"\xef\xbb\xbf") else ""
        del before
        try:
            write_whole(path, mark + after)
        except OSError as error:
            raise LintError(f"'{file}' cannot be written: {error.strerror}. It is as it was.") from None


def _print(
    result: LintResult,
    findings: list[LintFinding],
    *,
    output: LintFormat,
    seconds: float,
    diff: bool,
    fix: bool,
    unsafe: bool,
) -> None:
    from floatline.report import lint as report

    if output is LintFormat.json:
        print_json(report.as_json(result, findings, seconds=seconds))
    elif output is LintFormat.sarif:
        print_json(report.as_sarif(findings))
    elif output is LintFormat.github:
        typer.echo(report.as_github(findings), nl=bool(findings))
    elif diff:
        typer.echo(report.as_diff(result), nl=False)
    else:
        report.print_findings(text_console(), result, findings, fixed=fix, unsafe=unsafe)
