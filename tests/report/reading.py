"""Reads reports back: what a browser or GitHub would show."""

from html.parser import HTMLParser

from markdown_it import MarkdownIt


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
