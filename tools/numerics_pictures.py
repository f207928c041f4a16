"""Draw the pictures of docs/numerics.md: docs/pictures/spacing.svg and docs/pictures/updates.svg."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from floatline.formats import find_format
from floatline.numerics import join_master, round_nearest, round_stochastic, split_master

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 860, 420, 70, 50, 30, 60
INK, FAINT = "#24292f", "#8c959f"
COLOURS = {"fp32": "#57606a", "bf16": "#1a7f37", "fp16": "#8250df", "fp8_e4m3fn": "#bc4c00"}
STEPS, UPDATE = 400, 2.0**-11


def draw_spacing() -> str:
    """The distance to the next number over the number itself, for four formats, both in powers of two."""
    low, high, bottom, top = -30, 20, -56, 16
    to_x = _axis(low, high, LEFT, WIDTH - RIGHT)
    to_y = _axis(bottom, top, HEIGHT - BOTTOM, TOP)
    parts = [_text(LEFT, 28, "Distance between neighbours, by size of the number", "head")]
    parts += [_tick(to_x(e), HEIGHT - BOTTOM, f"2^{e}", down=True) for e in range(low, high + 1, 10)]
    parts += [_tick(LEFT, to_y(e), f"2^{e}", down=False) for e in range(-50, 11, 10)]
    for name, colour in COLOURS.items():
        form = find_format(name)
        points: list[str] = []
        for exponent in range(low, high + 1):
            if exponent > math.log2(form.max):
                break
            spacing = max(exponent, form.min_exponent) - form.mantissa_bits
            points.append(f"{to_x(exponent):.1f},{to_y(spacing):.1f}")
        line = f'fill="none" stroke="{colour}" stroke-width="2.5"/>'
        parts.append(f'<polyline points="{" ".join(points)}" {line}')
        x, y = map(float, points[0].split(","))
        parts.append(f'<text x="{x + 40:.1f}" y="{y - 22:.1f}" style="fill:{colour}">{name}</text>')
        if math.log2(form.max) < high:
            x, y = map(float, points[-1].split(","))
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
            ends = f"ends at {form.max:,.0f}"
            parts.append(f'<text x="{x - 8:.1f}" y="{y - 8:.1f}" style="fill:{colour};text-anchor:end">{ends}</text>')
    return _page(parts, "Spacing of four number formats")


def draw_updates() -> str:
    """A BF16 weight of 1 that gets 400 updates of 2^-11, by three ways to round; every point comes from the library."""
    curves = follow_updates()
    highest = curves["exact"][-1]
    to_x = _axis(0, STEPS, LEFT, WIDTH - RIGHT)
    to_y = _axis(0.99, highest + 0.01, HEIGHT - BOTTOM, TOP)
    parts = [_text(LEFT, 28, f"A BF16 weight of 1 and {STEPS} updates of 2^-11; its spacing is 2^-7", "head")]
    parts += [_tick(to_x(step), HEIGHT - BOTTOM, str(step), down=True) for step in range(0, STEPS + 1, 100)]
    parts += [_tick(LEFT, to_y(value), f"{value:.2f}", down=False) for value in (1.0, 1.05, 1.1, 1.15, 1.2)]
    colours = {"exact": "#1a7f37", "stochastic": "#8250df", "nearest": "#cf222e"}
    for name, curve in curves.items():
        points = " ".join(f"{to_x(step):.1f},{to_y(value):.1f}" for step, value in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
    words = {
        "exact": "16 + 16 bits, as FP32",
        "stochastic": "stochastic, one weight",
        "nearest": "nearest: stands still",
    }
    for number, (name, word) in enumerate(words.items()):
        parts.append(f'<text x="{LEFT + 20}" y="{TOP + 20 + 20 * number}" style="fill:{colours[name]}">{word}</text>')
    return _page(parts, "A small update by three ways to round")


def follow_updates() -> dict[str, list[float]]:
    """The weight after every step: kept exactly, rounded at random, rounded to nearest."""
    nearest = stochastic = torch.ones(1)
    weight, remainder = split_master(torch.ones(1), torch.bfloat16)
    found: dict[str, list[float]] = {"exact": [1.0], "stochastic": [1.0], "nearest": [1.0]}
    for step in range(STEPS):
        weight, remainder = split_master(join_master(weight, remainder) + UPDATE, torch.bfloat16)
        stochastic = round_stochastic(stochastic + UPDATE, "bf16", seed=0, step=step)
        nearest = round_nearest(nearest + UPDATE, "bf16")
        found["exact"].append(float(join_master(weight, remainder)))
        found["stochastic"].append(float(stochastic))
        found["nearest"].append(float(nearest))
    return found


def _axis(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _tick(x: float, y: float, words: str, *, down: bool) -> str:
    if down:
        return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{y}" class="grid"/>' + _text(x, y + 20, words, "mid")
    return f'<line x1="{x}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>' + _text(8, y + 4, words, "")


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def _page(parts: list[str], label: str) -> str:
    style = (
        f"text{{font-family:ui-sans-serif,system-ui,sans-serif;font-size:13px;fill:{INK}}}"
        f".mid{{text-anchor:middle}}.head{{font-size:15px;font-weight:600}}.grid{{stroke:{FAINT};stroke-opacity:.3}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">\n'
        f'<style>{style}</style>\n<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main() -> None:
    """Both pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in (("spacing", draw_spacing), ("updates", draw_updates)):
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
        print(f"{name}.svg: written")


if __name__ == "__main__":
    main()
