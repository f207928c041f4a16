"""`floatline diagnose`: why training in 16 bits went wrong, where, and what to change."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from floatline.cli.compiled_beside import CompiledAsked, print_compiled
from floatline.cli.endings import say_ended, saying_how_to_go_on
from floatline.cli.output import (
    COMMAND,
    DiagnoseAs,
    FormatOption,
    OutputFormat,
    SeedOption,
    Stages,
    check_writable,
    print_json,
    show_progress,
    text_console,
)

if TYPE_CHECKING:
    from floatline.agreement.compiled.compiled_report import CompiledReport
    from floatline.diagnosis.result import Diagnosis

_ENDED = "Nothing is kept: the same command begins again."


def diagnose(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET [KEY=VALUE]... | -- COMMAND",
            help="What is trained: FILE.py, package.module or package.module:name; NAME[:VARIANT] of a reference "
            "workload, with its settings; or -- python train.py ARGUMENTS.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="How many steps of training to look at.")] = 40,
    seed: SeedOption = 0,
    output: FormatOption = OutputFormat.text,
    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="FILE", help="Write the trace of the step that was examined to this file."),
    ] = None,
    bundle: Annotated[
        str | None,
        typer.Option(
            "--bundle", metavar="FOLDER", help="Write that step to a folder, from which floatline replay runs it again."
        ),
    ] = None,
    with_data: Annotated[bool, typer.Option("--with-data", help="Put the step's batch into the bundle.")] = False,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--would-fit", metavar="FORMAT", help="Instead, say what of an FP32 or BF16 run does not fit FORMAT."
        ),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Change the line in the source, if the change was tried and holds.")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Print the change as a diff that git apply takes, and nothing else.")
    ] = False,
    tries: Annotated[
        bool,
        typer.Option(
            "--try/--no-try",
            help="Run the target or script again with the changed line, to see whether the change holds.",
        ),
    ] = True,
    once: Annotated[
        bool,
        typer.Option("--once", help="Do not run a script again in FP32. It is then not called healthy. Only with --."),
    ] = False,
    fp32_steps: Annotated[
        int | None,
        typer.Option(
            "--fp32-steps",
            min=1,
            help="How many steps of a script are run in FP32: by default 100, or all of a light script. Only with --.",
        ),
    ] = None,
    as_device: Annotated[
        DiagnoseAs | None,
        typer.Option(
            "--as",
            help="cuda: run a script written for a GPU on a CPU, computing as the GPU would. "
            "cpu: let a target on a CPU follow the CPU's autocast instead of a GPU's.",
        ),
    ] = None,
    forward: Annotated[
        bool,
        typer.Option(
            "--forward", help="Nothing is trained: say whether a forward pass may run in FP16, judged by its outputs."
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="FOLDER", help="With --forward, a transformers model instead of a target."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", metavar="FILE", help="With --model, token ids as JSON, or a text for its tokenizer."),
    ] = None,
    compiled: Annotated[
        bool,
        typer.Option("--compiled", help="Also compare a step with what torch.compile makes of it, and with FP32."),
    ] = False,
    backend: Annotated[
        str | None,
        typer.Option("--backend", help="With --compiled, what to compile with. The default is the run's own."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FOLDER", help="With --compiled, where a script goes that shows what is wrong."),
    ] = None,
) -> None:
    """Say why training goes wrong, where, and what to change; or that precision is not to blame.

    The target is trained as it is, replayed in FP32 and BF16, and one step is traced operation by operation.
    A command after -- runs as it is, and is observed. Where nothing is found, it runs again in FP32 from the same seed,
    and what both show is compared. Where a change of the source is known, it runs again with that change. What it
    prints then is not shown, and what it writes is kept apart.
    Exit code 0 means that training is healthy, 1 that something is wrong, 2 that nothing can be said, such as of a
    script that ended before its first step. A script that fails for a cause that was found keeps its own.
    With --compiled, one step more is run eager, compiled and in FP32; compiled code that is wrong, or farther from FP32
    than rounding explains, is exit code 1, too.
    """
    import sys

    beside = CompiledAsked(compiled, backend, out)
    beside.check(forward=forward, would_fit=bool(formats), as_device=as_device)
    if trace is not None:
        check_writable(trace)
    if with_data and bundle is None:
        raise typer.BadParameter("--with-data says what goes into a bundle. Give --bundle FOLDER, too.")
    if COMMAND in context.meta and formats:
        raise typer.BadParameter("--would-fit looks at a target, and a script is none. Give it a build() file.")
    if COMMAND in context.meta and bundle is not None:
        raise typer.BadParameter("--bundle holds a step of a target, and a script is none. Give it a build() file.")
    if (fix or diff) and not tries:
        raise typer.BadParameter("--fix and --diff give changes that were tried. Leave out --no-try.")
    if fix and diff:
        raise typer.BadParameter("--diff writes nothing. Give --fix or --diff.")
    if forward:
        from floatline.cli.forward_only import ForwardOptions, diagnose_forward_any

        if formats or bundle is not None or once or fp32_steps is not None:
            raise typer.BadParameter(
                "--forward looks at outputs. Leave out --bundle, --would-fit, --once and --fp32-steps."
            )
        words = context.meta.get(COMMAND)
        if (fix or diff) and (words is not None or target is None):
            raise typer.BadParameter(
                "With --forward, --fix and --diff are for a target. Give a file with forward(seed)."
            )
        options = ForwardOptions(seed=seed, tries=tries, trace=trace, output=output, as_device=as_device)
        with saying_how_to_go_on(_ENDED):
            judged = diagnose_forward_any(target, words, model, tokens, options)
        _finish(judged, output, fix=fix, diff=diff)
        return
    if model is not None or tokens is not None:
        raise typer.BadParameter("--model and --tokens are for a model that is not trained. Give --forward, too.")
    if target is None:
        raise typer.BadParameter("Missing argument 'TARGET'.")
    if COMMAND in context.meta:
        steps_beside = 0 if once else fp32_steps
        with saying_how_to_go_on(_ENDED):
            found = _diagnose_command(
                context, output, trace, as_device, tries=tries, quiet=diff, fp32_steps=steps_beside
            )
            also = beside.compare(target, context.meta[COMMAND], seed)
        _finish(found, output, fix=fix, diff=diff, compiled=also)
        return
    if once or fp32_steps is not None:
        raise typer.BadParameter("--once and --fp32-steps are for a script: give its command after --.")
    if as_device is DiagnoseAs.cuda:
        raise typer.BadParameter(
            "--as cuda is for a script: give its command after --. A target on a CPU computes as a GPU already."
        )
    if formats and as_device is not None:
        raise typer.BadParameter("--would-fit computes as a GPU. Leave out --as.")
    if formats:
        _foresee(target, tuple(formats), steps, seed, output)
        return
    # What the target prints is not the report.
    with saying_how_to_go_on(_ENDED), contextlib.redirect_stdout(sys.stderr), show_progress() as show:
        from floatline.diagnosis.target_diagnosis import diagnose as find_out  # with torch, which takes seconds

        diagnosis = find_out(
            target,
            steps=steps,
            seed=seed,
            on_progress=show,
            trace_path=trace,
            bundle=bundle,
            with_data=with_data,
            tries_fixes=tries,
            as_device="cuda" if as_device is None else "cpu",
        )
    with saying_how_to_go_on(_ENDED):
        also = beside.compare(target, None, seed)
    _finish(diagnosis, output, fix=fix, diff=diff, compiled=also)


def _foresee(target: str, formats: tuple[str, ...], steps: int, seed: int, output: OutputFormat) -> None:
    """Say what would not fit a format, before anyone trains in it."""
    import sys

    with saying_how_to_go_on(_ENDED), contextlib.redirect_stdout(sys.stderr), show_progress() as show:
        from floatline.diagnosis.headroom.would_fit import would_fit
        from floatline.report.fit import as_json, print_fit
        from floatline.workload import load_target

        loaded = load_target(target)
        show("recording steps from several points of training")
        fits = would_fit(loaded, formats=formats, steps=steps, seed=seed)
    if output is OutputFormat.json:
        print_json(as_json(target, fits))
    else:
        print_fit(fits, text_console())
    if any(fit.unfit for fit in fits):
        raise typer.Exit(1)


def _diagnose_command(
    context: typer.Context,
    output: OutputFormat,
    trace: str | None,
    as_device: DiagnoseAs | None,
    *,
    tries: bool,
    quiet: bool,
    fp32_steps: int | None,
) -> Diagnosis:
    """Observe the script that a command runs."""
    from floatline.diagnosis.scripts.script import diagnose_script

    for name in ("steps", "seed"):
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
            raise typer.BadParameter(f"--{name} does not reach into a script. Give the script's own options after it.")
    with Stages(keeps=True) as stages:
        return diagnose_script(
            context.meta[COMMAND],
            trace_path=trace,
            keep_stdout=quiet or output is OutputFormat.json,
            as_device="cuda" if as_device is DiagnoseAs.cuda else None,
            tries_fixes=tries,
            fp32_steps=fp32_steps,
            on_progress=stages,
            on_start=stages.aloud,
        )


def _finish(
    diagnosis: Diagnosis,
    output: OutputFormat,
    *,
    fix: bool,
    diff: bool,
    compiled: CompiledReport | None = None,
) -> None:
    """Print, change the source where that is asked for, and end with the exit code."""
    patch = "" if diagnosis.primary is None else diagnosis.primary.patch
    if diagnosis.no_verdict and diagnosis.primary is None:
        say_ended(getattr(diagnosis, "exit_code", 0), _ENDED)  # the script heard it, and was ended
    if diff:
        typer.echo(patch, nl=False)
        if not patch:
            typer.echo("floatline: no change of the source is known that holds.", err=True)
    elif output is OutputFormat.json:
        print_json(diagnosis.as_json() | ({} if compiled is None else {"compiled": compiled.fields}))
    else:
        _print(diagnosis)
        if compiled is not None:
            print_compiled(compiled)
    if fix:
        from floatline.diagnosis.fix_trials import write_fix

        typer.echo(f"floatline: {write_fix(diagnosis)}", err=True)
    if diagnosis.status:
        raise typer.Exit(diagnosis.status)
    if compiled is not None and compiled.status == 1:
        raise typer.Exit(1)


def _print(diagnosis: Diagnosis) -> None:
    from floatline.diagnosis.forward.result import ForwardDiagnosis
    from floatline.report.diagnosis import print_diagnosis
    from floatline.report.forward import print_forward

    if isinstance(diagnosis, ForwardDiagnosis):
        print_forward(diagnosis, text_console())
    else:
        print_diagnosis(diagnosis, text_console())
