"""`floatline parity`: two computations that must agree, and which of them is nearer to FP32."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from floatline.cli.endings import saying_how_to_go_on
from floatline.cli.output import FormatOption, OutputFormat, SeedOption, print_json, show_progress, text_console

if TYPE_CHECKING:
    from floatline.report.parity import AnyParity

_LOGPROBS = (".jsonl", ".safetensors")


def parity(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="FILE.py, package.module:name or a reference workload; or FILE.py:function beside inputs().",
        ),
    ],
    b: Annotated[
        str | None,
        typer.Argument(metavar="B", help="Another one; or log-probs that another engine made: .jsonl, .safetensors."),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Compare A with what torch.compile makes of it, and with FP32.")
    ] = False,
    backend: Annotated[str, typer.Option("--backend", help="Backend of torch.compile, with --compiled.")] = "inductor",
    plan_a: Annotated[str | None, typer.Option("--plan-a", metavar="PLAN", help="Run A in this plan.")] = None,
    plan_b: Annotated[str | None, typer.Option("--plan-b", metavar="PLAN", help="Run B in this plan.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=0, help="Which batch of A both get.")] = 0,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Compare no gradients.")] = False,
    band: Annotated[
        tuple[float, float], typer.Option("--band", metavar="LOW HIGH", help="Ratios of probabilities that are fine.")
    ] = (0.9, 1.1),
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FOLDER", help="Write report.html, report.md, parity.json and a reproducer."),
    ] = None,
    seed: SeedOption = 0,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Say whether two computations are the same numbers, where they part, and which is nearer to FP32.

    A and B are models with weights of the same names: B gets A's. Each runs in the plan of its target. Or they are
    functions, and inputs(seed) in A's file gives what both are called with. Exit code 0
    means that both are within rounding, 1 that one is wrong, farther, or another function; 2 that they cannot be
    compared.
    """
    if compiled == (b is not None):
        raise typer.BadParameter("Give B, or --compiled for what torch.compile makes of A: one of both.")
    with saying_how_to_go_on("Nothing is kept: the same command begins again."), show_progress() as tell:
        found = _compare(
            a,
            b,
            backend,
            (plan_a, plan_b),
            batch=batch,
            backward=not forward_only,
            band=band,
            out=out,
            seed=seed,
            tell=tell,
        )
    from floatline.report.parity import print_parity, write_parity  # with torch, which takes seconds

    files = {} if out is None else write_parity(found, Path(out))
    command = say_validation(found, a, out)
    if output is OutputFormat.json:
        print_json({**found.as_json(), "files": files, **({"validate": command} if command else {})})
    else:
        print_parity(found, files, text_console())
        if command:
            typer.echo(f"  whether it matters: {command}")
    if found.verdict != "agree":
        raise typer.Exit(1)


def say_validation(found: AnyParity, target: str, out: str | None) -> str:
    """The command that compares the best remedy with FP32 over seeds; '' where no plan trains like that.

    Args:
        found: What was compared.
        target: A.
        out: Folder that a plan is written to which has no name of its own; None writes none.
    """
    best = getattr(found, "best", None)
    plan = None if best is None else best.plan
    if plan is None:
        return ""
    name = plan.name
    if plan.fp32_modules:
        if out is None:
            return ""
        path = Path(out) / "plan.yaml"
        plan.save(path)
        name = str(path)
    return f"floatline validate {shlex.quote(target)} --plan {shlex.quote(name)}"


def _compare(
    a: str,
    b: str | None,
    backend: str,
    plans: tuple[str | None, str | None],
    *,
    batch: int,
    backward: bool,
    band: tuple[float, float],
    out: str | None,
    seed: int,
    tell: Callable[[str], None],
) -> AnyParity:
    from floatline.agreement.comparing import compare_sides
    from floatline.agreement.compiled.arms import compare_compiled
    from floatline.agreement.logprobs.comparing import compare_logprobs
    from floatline.agreement.targets import give_weights, open_callables, open_target
    from floatline.numerics.half_on_cpu import HalfOnCPU

    functions = None if b is not None and b.endswith(_LOGPROBS) else open_callables(a, b, seed=seed)
    if functions is not None:
        if plans != (None, None) or batch:
            raise typer.BadParameter(
                "Functions run as they are, on inputs(). Leave out --plan-a, --plan-b and --batch."
            )
        tell("running in their formats and in FP32")
        if functions.b is None:
            folder = None if out is None else Path(out) / "reproducer"
            plain = functions.a.function
            return compare_compiled(plain, functions.given, backend=backend, backward=backward, folder=folder)
        with HalfOnCPU():
            return compare_sides(functions.a, functions.b, functions.given, backward=backward)
    tell(f"building {a}")
    ours = open_target(a, seed=seed, batch=batch, plan=plans[0])
    if b is None:
        tell("running it eager, compiled and in FP32")
        folder = None if out is None else Path(out) / "reproducer"
        return compare_compiled(
            ours.model, ours.given, backend=backend, backward=backward, folder=folder, around=ours.around
        )
    with HalfOnCPU(), contextlib.ExitStack() as stack:
        if b.endswith(_LOGPROBS):
            tell(f"scoring the tokens of {b}")
            stack.enter_context(ours.around())
            return compare_logprobs(ours.model, b, band=band)
        tell(f"building {b}")
        theirs = open_target(b, seed=seed, batch=batch, plan=plans[1])
        give_weights(ours, theirs)
        tell("running both, in their formats and in FP32")
        return compare_sides(ours.side, theirs.side, ours.given, backward=backward)
