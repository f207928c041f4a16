"""Writes docs/causes.md from the catalogue of causes: python tools/causes_page.py."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console

from floatline.causes import CAUSES, FAMILIES, SYMPTOMS, Cause, Symptom, find_cause
from floatline.cli.explain import write_cause

PAGE = Path(__file__).parent.parent / "docs" / "causes.md"

EXAMPLE = "KeyError: 'scaler'"

INTRO = """\
<!-- Made by tools/causes_page.py from src/floatline/causes/. Do not edit by hand. -->

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


def page(causes: Iterable[Cause] = CAUSES.values(), symptoms: Iterable[Symptom] = SYMPTOMS) -> str:
    """The whole page as Markdown."""
    blocks = [INTRO.format(example=EXAMPLE, output=_example())]
    causes = list(causes)
    for family, title in FAMILIES.items():
        members = [cause for cause in causes if cause.family == family]
        blocks.append(f"## {title}\n")
        blocks.append("".join(f"- [{cause.id}](#{cause.id}): {_plain(cause.title)}\n" for cause in members))
        blocks += ["\n".join(_entry(cause)) for cause in members]
    blocks.append("## Messages that several causes share\n")
    blocks += ["\n".join(_shared(symptom)) for symptom in symptoms]
    return "\n".join(blocks)


def _example() -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    write_cause(console, find_cause("scaler-state-lost"))
    return console.file.getvalue().rstrip()


def _entry(cause: Cause) -> Iterator[str]:
    yield f"### {cause.id}\n"
    yield f"**{_plain(cause.title)}.** {_plain(cause.mechanism)}\n"
    yield f"*How to tell.* {_linked(cause.told_apart)}\n"
    yield "*What to do.*\n"
    for remedy in cause.remedies:
        code, _, why = remedy.partition("  # ")
        yield f"- `{code}`: {_plain(why)}" if why else f"- {_plain(code)}"
    yield f"\n*What does not help.* {_linked(cause.wrong_fix)}\n"
    yield f"*Source.* {_sources(cause)}\n"


def _shared(symptom: Symptom) -> Iterator[str]:
    yield f"### {_plain(symptom.title)}\n"
    yield f"{_linked(symptom.check)}\n"
    yield f"In the order worth checking: {', '.join(f'[{name}](#{name})' for name in symptom.causes)}.\n"


def _plain(text: str) -> str:
    return re.sub(r"([*_<`\[\]])", r"\\\1", text)


def _linked(text: str) -> str:
    """Plain text in which the ids of causes are links."""
    names = "|".join(sorted(CAUSES, key=len, reverse=True))
    return re.sub(rf"(?<![\w-])({names})(?![\w-])", r"[\1](#\1)", _plain(text))


def _sources(cause: Cause) -> str:
    text = cause.reference
    for source, url in cause.links.items():
        text = text.replace(source, f"[{source.removeprefix('https://')}]({url})")
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.name}: {len(CAUSES)} causes, {len(SYMPTOMS)} shared messages")
