"""Writes docs/causes.md and docs/causes/, a page for every cause, from the catalogue: python tools/causes_page.py."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console

from floatline.causes import CAUSES, FAMILIES, SYMPTOMS, Cause, Symptom, find_cause
from floatline.cli.explain import write_cause
from floatline.lint import RULES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "causes.md"
FOLDER = ROOT / "docs" / "causes"

EXAMPLE = "KeyError: 'scaler'"
_NOTE = "<!-- Made by tools/causes_page.py from src/floatline/causes/. Do not edit by hand. -->\n\n"

INTRO = """\
# The causes

Every way of failing that floatline knows, as one catalogue. The same entries are printed by
`floatline explain`, which takes an id, an error message, or a log (`python train.py 2>&1 | floatline explain -`):

```console
$ floatline explain "{example}"
{output}
```

In Python:

```python
from floatline.causes import CAUSES, match_message

causes = match_message("ValueError: Attempting to unscale FP16 gradients.")
print(causes[0].id)  # fp16-params-with-scaler
print(CAUSES["eps-underflow"].mechanism)
```

## The order of tests

1. An exception, a scaler call or an optimizer call may name the cause: see *Scaler, loop and dtype*.
2. Replay the same batches and seed in FP32. If it fails too, it is not precision.
3. Replay in BF16. If it trains, it is range. If it fails, it is rounding.
4. Find the first operation with finite inputs and a non-finite output, forward and backward, at loss scale 1.
   Ignore an `inf` that the code wrote itself, and one that reaches neither the loss nor a gradient.
5. If nothing is non-finite, compare one step with FP32: zeros, relative error, motion of the weights.

A few skipped steps at the start, a plateau that FP32 shows too, and large values that fit are healthy.
"""


def pages(causes: Iterable[Cause] = CAUSES.values(), symptoms: Iterable[Symptom] = SYMPTOMS) -> dict[Path, str]:
    """Every page by its path."""
    causes, cases = list(causes), dict(_cases())
    made = {FOLDER / f"{cause.id}.md": _NOTE + "\n".join(_page(cause, cases)) for cause in causes}
    return {PAGE: _NOTE + _catalogue(causes, symptoms), **made}


def _catalogue(causes: list[Cause], symptoms: Iterable[Symptom]) -> str:
    blocks = [INTRO.format(example=EXAMPLE, output=_example())]
    for family, title in FAMILIES.items():
        members = [cause for cause in causes if cause.family == family]
        blocks.append(f"## {title}\n")
        blocks.append("".join(f"- [{cause.id}](causes/{cause.id}.md): {_plain(cause.title)}\n" for cause in members))
    blocks.append("## Messages that several causes share\n")
    blocks += ["\n".join(_shared(symptom)) for symptom in symptoms]
    return "\n".join(blocks)


def _example() -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    write_cause(console, find_cause("scaler-state-lost"))
    return console.file.getvalue().rstrip()


def _page(cause: Cause, cases: dict[Path, str]) -> Iterator[str]:
    yield f"# {cause.id}\n"
    yield f"{_plain(cause.title)}. *{FAMILIES[cause.family]}*\n"
    yield f"## What happens\n\n{_plain(cause.mechanism)}\n"
    yield f"## How to tell\n\n{_linked(cause.told_apart)}\n"
    yield "## What to do\n"
    for remedy in cause.remedies:
        code, _, why = remedy.partition("  # ")
        yield f"- `{code}`: {_plain(why)}" if why else f"- {_plain(code)}"
    yield f"\n## What does not help\n\n{_linked(cause.wrong_fix)}\n"
    seen = [path for path, name in cases.items() if name == cause.id]
    if seen:
        yield "## Failures that are this\n"
        yield "Each trains once fixed; `floatline diagnose` is [scored](../diagnose_scores.md) on them.\n"
        yield "".join(f"- [{path.stem}](../../tests/cases/{path.name}): {_plain(_symptom(path))}\n" for path in seen)
    rules = [rule for rule in RULES.values() if rule.cause is not None and rule.cause.id == cause.id]
    if rules:
        named = ", ".join(f"[{rule.code} {rule.name}](../lint/{rule.code}.md)" for rule in rules)
        yield f"## Seen in source\n\n`floatline lint`: {named}.\n"
    yield f"## Source\n\n{_sources(cause)}\n"


def _cases() -> Iterator[tuple[Path, str]]:
    """Every case and the cause that it expects, read without running it."""
    for path in sorted((ROOT / "tests" / "cases").glob("[0-9]*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "cause" and isinstance(node.value, ast.Constant):
                yield path, str(node.value.value)


def _symptom(path: Path) -> str:
    """What its docstring says that one sees."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    found = re.search(r"^Symptom:\s+(.*?)^\w[\w ]*:\s", text, re.MULTILINE | re.DOTALL)
    return " ".join((found.group(1) if found else text.splitlines()[0]).split())


def _shared(symptom: Symptom) -> Iterator[str]:
    yield f"### {_plain(symptom.title)}\n"
    yield f"{_linked(symptom.check, folder='causes/')}\n"
    named = ", ".join(f"[{name}](causes/{name}.md)" for name in symptom.causes)
    yield f"In the order worth checking: {named}.\n"


def _plain(text: str) -> str:
    return re.sub(r"([*_<`\[\]])", r"\\\1", text)


def _linked(text: str, folder: str = "") -> str:
    """Plain text in which the ids of causes are links."""
    names = "|".join(sorted(CAUSES, key=len, reverse=True))
    return re.sub(rf"(?<![\w-])({names})(?![\w-])", rf"[\1]({folder}\1.md)", _plain(text))


def _sources(cause: Cause) -> str:
    text = cause.reference
    for source, url in cause.links.items():
        text = text.replace(source, f"[{source.removeprefix('https://')}]({url})")
    return text


if __name__ == "__main__":
    made = pages()
    FOLDER.mkdir(exist_ok=True)
    for old in set(FOLDER.glob("*.md")) - set(made):
        old.unlink()
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.name} and {len(made) - 1} causes, {len(SYMPTOMS)} shared messages")
