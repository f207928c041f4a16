"""The report of a validation: which facts in which order, and report.html, report.md and report.json made of them."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from floatline.report.document.detail import FULL, Detail, fit
from floatline.report.document.document import Block, Chapter, Code, Curves, Document, Drawing, Part, Table, Tile, Words
from floatline.report.document.html import page_of, put_in_place
from floatline.report.document.markdown import markdown_of
from floatline.report.validation.costs import cost_part
from floatline.report.validation.evidence import curve_part, gate_part, interval_part
from floatline.report.validation.layers import layer_part
from floatline.report.validation.texts import (
    TONES,
    UNKNOWN,
    is_emulated,
    meaning_of,
    memory_of,
    memory_texts,
    sentence,
    show_count,
    show_ends,
    show_excess,
    speed_of,
    speed_texts,
)
from floatline.validation.verdict.comparison import describe_several

if TYPE_CHECKING:
    from floatline.validation.result import Validation
    from floatline.validation.verdict.comparison import Comparison


_SCALES = {
    "log": "relative, ln(candidate / reference)",
    "log-error": "relative, of what is missing to 1",
    "difference": "in the metric's own unit",
}


def document_of(validation: Validation, detail: Detail = FULL) -> Document:
    """Everything that a report says, in its order.

    Args:
        validation: What was found out.
        detail: How much of what is long.
    """
    best = validation.best
    terms = best.terms
    better = "higher is better" if terms.higher_is_better else "lower is better"
    return Document(
        title=f"{best.candidate} against {best.reference}",
        subtitle=f"{validation.target}, by {terms.metric} ({better})",
        verdict=best.verdict,
        meaning=meaning_of(best),
        reason=sentence(best.reason),
        tiles=_tiles(validation, best),
        flags=tuple(sentence(flag) for flag in best.flags),
        before=_ranking(validation),
        chapters=tuple(_chapter(validation, comparison, detail) for comparison in validation.comparisons),
        after=(_terms_part(best), _plans_part(validation), _environment_part(validation), _again_part(validation)),
        footer=_footer(validation),
        todo=_todo(validation),
    )


def _todo(validation: Validation) -> tuple[str, ...]:
    """What to do about the verdict on the best candidate."""
    best = validation.best
    advice = tuple(gate.advice for gate in best.failed_gates if gate.advice)
    if best.verdict == "REFUSED" and advice:
        return advice
    folder = validation.folder or "FOLDER"
    return {
        "PASS": (f"Sign it off: `floatline approve {folder} --by NAME`.",),
        "MARGINAL": (f"Weigh it; to take it nevertheless: `floatline approve {folder} --by NAME --override REASON`.",),
        "FAIL": (f"Find out why: `floatline diagnose {validation.target}`.",),
        "INCONCLUSIVE": (
            "Go on with more seeds: `--resume --max-seeds 40`; or say what loss is acceptable: `--margin`.",
        ),
        "REFUSED": ("The gates below say what is missing.",),
    }[best.verdict]


def _tiles(validation: Validation, comparison: Comparison) -> tuple[Tile, ...]:
    terms = comparison.terms
    ends = "no look was taken"
    if comparison.interval is not None:
        ends = f"{show_ends(*comparison.interval, terms)}; PASS to {terms.size(terms.margins[0])} worse"
    pairing = "paired" if comparison.paired else "unpaired"
    tiles = [
        Tile("Difference", show_excess(comparison.difference, terms), ends),
        Tile("Seeds", show_count(len(comparison.seeds)), f"{pairing}, of at most {terms.looks[-1]:,}"),
    ]
    speed = speed_of(validation, comparison.candidate)
    value, detail = speed_texts(speed) if speed else (UNKNOWN, "not measured")
    emulated = speed is not None and is_emulated(validation)
    tiles.append(Tile("Speed on a CPU, emulated" if emulated else "Speed", value, detail))
    ours, theirs = (memory_of(validation, arm) for arm in (comparison.candidate, comparison.reference))
    value, detail = memory_texts(ours, theirs) if ours and theirs else (UNKNOWN, "not measured")
    tiles.append(Tile("Peak memory", value, detail))
    return tuple(tiles)


def _ranking(validation: Validation) -> tuple[Part, ...]:
    if len(validation.comparisons) < 2:
        return ()
    rows: list[tuple[str, ...]] = []
    for place, comparison in enumerate(validation.comparisons, start=1):
        difference, _, speed, memory = (tile.value for tile in _tiles(validation, comparison))
        ends = show_ends(*comparison.interval, comparison.terms) if comparison.interval else UNKNOWN
        seeds = show_count(len(comparison.seeds))
        rows.append((f"{place}", comparison.candidate, comparison.verdict, difference, ends, seeds, speed, memory))
    table = Table(
        "The candidates, the one to take first",
        ("rank", "candidate", "verdict", "difference", "interval", "seeds", "speed", "peak memory"),
        tuple(rows),
        named=(1,),
        numeric=(3, 4, 5, 6, 7),
        tones=tuple(TONES[comparison.verdict] for comparison in validation.comparisons),
        cards=True,
    )
    note = describe_several(len(rows), alpha=validation.best.terms.error(paired=validation.best.paired))
    return (Part("Candidates", (table, Words(sentence(note), "note"))),)


def _chapter(validation: Validation, comparison: Comparison, detail: Detail) -> Chapter:
    folded = comparison is not validation.best
    curves = curve_part(comparison, validation.runs, detail=detail, brief=folded)
    parts = [interval_part(comparison, validation.runs, brief=folded), curves]
    layers = validation.layers.get(comparison.candidate, ())
    parts += [
        layer_part(layers, detail=detail, brief=folded),
        cost_part(validation, comparison),
        gate_part(comparison, brief=folded),
    ]
    flags = tuple(Words(sentence(flag), "flag") for flag in comparison.flags)
    notes = tuple(Words(sentence(note), "note") for note in comparison.notes)
    if notes or (folded and flags):
        parts.append(Part("Worth knowing", (*(flags if folded else ()), *notes)))
    several = len(validation.comparisons) > 1
    heading = f"{comparison.candidate} against {comparison.reference}" if several else "The evidence"
    return Chapter(heading, comparison.verdict, sentence(comparison.reason), tuple(parts), folded=folded)


def _terms_part(comparison: Comparison) -> Part:
    terms = comparison.terms
    first, second = (terms.size(margin) for margin in terms.margins)
    error = terms.error(paired=comparison.paired)
    rows = [
        ("metric", terms.metric),
        ("better is", "higher" if terms.higher_is_better else "lower"),
        ("differences are", _SCALES[terms.scale]),
        ("PASS up to", f"{first} worse"),
        ("FAIL from", f"{second} worse"),
        ("looks at", f"{', '.join(str(look) for look in terms.looks)} seeds"),
        ("chance of each one-sided error", f"at most {100 * error:.3g} % over all looks"),
    ]
    if comparison.plan is not None:
        rows.append(("order of runs", "seed by seed, the arms of each in random order"))
    if terms.rare is not None:
        rows.append(("a PASS rules out", f"{100 * terms.rare:g} % of failing seeds"))
    if terms.resolution is not None:
        rows.append(("the metric moves in steps of", f"{terms.resolution:g}"))
    if terms.horizon is not None:
        rows.append(("planned steps", show_count(terms.horizon)))
    blocks: list[Block] = [Table("Settled before the first run", ("what", "value"), tuple(rows))]
    plan = comparison.plan
    if plan is not None:
        spread = terms.size(plan.sd)
        blocks.append(
            Words(
                f"Expected before the start, for pairs that spread by {spread}: about {plan.expected_seeds:.0f} of at "
                f"most {plan.most_seeds:,} seeds, and {100 * plan.pass_rate:.0f} % of equal candidates pass."
            )
        )
    return Part("What was asked", tuple(blocks))


def _plans_part(validation: Validation) -> Part:
    judged = [comparison.candidate for comparison in validation.comparisons]
    plans = {arm: validation.plans[arm] for arm in judged if arm in validation.plans}
    plans |= {arm: plan for arm, plan in validation.plans.items() if arm not in plans}
    blocks = tuple(
        plan_code(plan, arm) if plan else Words(f"`{arm}` has no plan: it is the script as it is.")
        for arm, plan in plans.items()
    )
    heading = "The plan" if len(blocks) < 2 else "The plans"
    return Part(heading, blocks or (Words("The plan was not recorded.", "missing"),))


def plan_code(plan: dict[str, Any], caption: str) -> Code:
    """A plan as YAML."""
    import yaml

    return Code(yaml.safe_dump(plan, sort_keys=False, allow_unicode=True).rstrip(), "yaml", caption)


def _environment_part(validation: Validation) -> Part:
    if not validation.environment:
        return Part("Environment", (Words("The environment was not recorded.", "missing"),))
    rows = tuple(validation.environment.items())
    return Part("Environment", (Table("Where it ran", ("what", "value"), rows),))


def _again_part(validation: Validation) -> Part:
    if not validation.reproduce:
        return Part("How to reproduce", (Words("The command was not recorded.", "missing"),))
    command = Code(validation.reproduce, "console")
    if not any(f"--plan {name}.yaml" in validation.reproduce for name in validation.plans):
        return Part("How to reproduce", (command,))
    return Part("How to reproduce", (Words("Save the plan, which is above, in the file that is named."), command))


def _footer(validation: Validation) -> str:
    from floatline import __version__
    from floatline.validation.verdict.power import show_seconds

    took = f" The study took {show_seconds(validation.seconds)}." if validation.seconds else ""
    num = len(validation.runs)
    return f"Made by floatline {__version__} from {num:,} {'run' if num == 1 else 'runs'}.{took}"


def write_report(validation: Validation, folder: Path) -> Path:
    """Write report.json, report.md and report.html into a folder, each in one step.

    Args:
        validation: What was found out.
        folder: Made where it is not there.

    Returns:
        The path of report.html.
    """
    document, text = fit(lambda detail: _shown_in(validation, detail))
    put_in_place(folder / "report.json", json_of(validation, document))
    put_in_place(folder / "report.md", markdown_of(document))
    page = folder / "report.html"
    put_in_place(page, text)
    return page


def _shown_in(validation: Validation, detail: Detail) -> tuple[Document, str]:
    document = document_of(validation, detail)
    return document, page_of(document, tones=TONES)


def json_of(validation: Validation, document: Document) -> str:
    """The contract's fields, under 'shown' every text of the page, under 'validation' every number in full."""
    data = {**validation.contract("report.html"), "shown": _shown(document), "validation": validation.as_json()}
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _shown(value: Any) -> Any:
    """The document's texts, without pictures."""
    if isinstance(value, Drawing | Curves):
        return {"summary": value.summary}
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _shown(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, tuple):
        return [_shown(entry) for entry in cast("tuple[Any, ...]", value)]
    return value
