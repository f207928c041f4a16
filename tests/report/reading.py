"""Reads reports back: what a browser or GitHub would show."""

from html.parser import HTMLParser

from markdown_it import MarkdownIt

# What a browser is asked: the contrast of each text with what is behind it.
CONTRAST = """selector => {
  const channel = c => { c /= 255; return c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4; };
  const light = c => .2126 * channel(c[0]) + .7152 * channel(c[1]) + .0722 * channel(c[2]);
  const read = text => text.match(/[\\d.]+/g).map(Number);
  return [...document.querySelectorAll(selector)].map(element => {
    let ground = element, back = [0, 0, 0, 0];
    for (; ground && (back.length === 4 && back[3] === 0); ground = ground.parentElement)
      back = read(getComputedStyle(ground).backgroundColor);
    const style = getComputedStyle(element);
    const ink = read(element instanceof SVGElement && element.tagName === "text" ? style.fill : style.color);
    const [a, b] = [light(ink), light(back)].sort((x, y) => y - x);
    return (a + .05) / (b + .05);
  });
}"""
TEXTS = "p, h1, h2, h3, td, th, caption, dt, dd, summary, li, .badge, .chip, .readout, pre, footer, svg text:not(.sign)"


class Page(HTMLParser):
    """Tables, elements and visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tables, self.elements, self.words = [], [], []
        self._cell, self._hidden = None, 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self._cell = ""
        self._hidden += tag in ("script", "style", "noscript")

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.tables[-1][-1].append(_flat(self._cell))
            self._cell = None
        self._hidden -= tag in ("script", "style", "noscript")

    def handle_data(self, data):
        if self._hidden:
            return
        self.words.append(data)
        if self._cell is not None:
            self._cell += data

    @property
    def text(self) -> str:
        return _flat(" ".join(self.words))


def read_markdown(text: str) -> Page:
    """What a Markdown reader that allows HTML, as GitHub does, makes of it."""
    return Page(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))


def _flat(text: str) -> str:
    return " ".join(text.split())


def shown_tables(shown: dict) -> list[list[list[str]]]:
    """Every table of report.json, in the order of the page."""
    parts = [*shown["before"], *(part for chapter in shown["chapters"] for part in chapter["parts"]), *shown["after"]]
    blocks = [block for part in parts for block in part["blocks"] if "rows" in block]
    return [[[_flat(cell) for cell in row] for row in (block["head"], *block["rows"])] for block in blocks]


def shown_words(shown: dict) -> list[str]:
    """Every sentence, heading and number outside of tables."""
    parts = [*shown["before"], *(part for chapter in shown["chapters"] for part in chapter["parts"]), *shown["after"]]
    words = [shown[key] for key in ("title", "subtitle", "verdict", "meaning", "reason", "footer")] + shown["flags"]
    words += [tile[key] for tile in shown["tiles"] for key in ("label", "value", "detail")]
    words += [part["heading"] for part in parts]
    words += [block["text"] for part in parts for block in part["blocks"] if "kind" in block]
    return [_flat(word) for word in words]
