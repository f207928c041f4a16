"""`floatline version`: what a bug report needs."""

from __future__ import annotations

import platform

import typer

from floatline import __version__
from floatline.cli.output import FormatOption, OutputFormat, print_json


def version(output: FormatOption = OutputFormat.text) -> None:
    """Print the versions of floatline, Python and torch."""
    found = {"floatline": __version__, "python": platform.python_version(), "torch": _find("torch")}
    if output is OutputFormat.json:
        print_json(found)
        return
    typer.echo("\n".join(f"{name} {number or 'is not installed'}" for name, number in found.items()))


def _find(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError  # with the parser of e-mails, which every command would pay for
    from importlib.metadata import version as version_of

    try:
        return version_of(package)
    except PackageNotFoundError:
        return None
