"""What is wrong with a page in a browser, by its computed styles and its boxes: a line for each fault."""

from pathlib import Path

_HERE = Path(__file__).parent
_AUDIT = (_HERE / "audit.js").read_text(encoding="utf-8")
PAINTED = (_HERE / "painted.js").read_text(encoding="utf-8")
"""Runs before the page does: it notes the texts of canvases."""
UNFOLD = "document.querySelectorAll('details').forEach(folded => { folded.open = true; })"


def find_faults(page) -> list[str]:
    """Faults of the page as it is shown now: contrast, what is cut off, words, headings, names for those who listen."""
    return sorted({*page.evaluate(_AUDIT), *page.evaluate("window.findPaintedFaults()")})


def find_focus_faults(page) -> list[str]:
    """What the tab key does not reach, reaches in another order, or reaches without a sign of it."""
    page.evaluate("document.activeElement && document.activeElement.blur()")
    page.evaluate(_FOCUSABLE)
    wanted = page.evaluate("window.focusable.length")
    faults, seen = [], []
    for _ in range(wanted):
        page.keyboard.press("Tab")
        at, name, outlined, inside = page.evaluate(_FOCUSED)
        seen.append(at)
        faults += [] if outlined else [f"no sign of the focus on {name}"]
        faults += [] if inside else [f"the focus is out of sight on {name}"]
    if seen != list(range(wanted)):
        faults.append(f"the tab key goes {seen[:12]} through {wanted}")
    return sorted(set(faults))


_FOCUSABLE = """() => {
  window.focusable = [...document.querySelectorAll("a[href], button, summary, [tabindex='0'], input")]
    .filter(element => element.checkVisibility());
  window.getSelection().removeAllRanges();
}"""
_FOCUSED = """() => {
  const element = document.activeElement, style = getComputedStyle(element), box = element.getBoundingClientRect();
  const name = element.tagName.toLowerCase() + " " + (element.textContent || "").trim().slice(0, 30);
  return [window.focusable.indexOf(element), name, style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
    box.bottom > 0 && box.top < innerHeight];
}"""
