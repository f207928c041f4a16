"""One self-contained HTML page: headings, text, tables and charts. Every text is escaped, nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from floatline.report.chart import Chart

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 48rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b; }
h1, h2 { line-height: 1.2; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #dddddd; }
figure { margin: 1rem 0; }
svg { width: 100%; height: auto; border: 1px solid #dddddd; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for section in sections %}
<h2>{{ section.heading }}</h2>
{% for line in section.text %}<p>{{ line }}</p>
{% endfor %}
{% if section.rows %}<table>
<tr>{% for cell in section.rows[0] %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in section.rows[1:] %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% endif %}
{% for chart in section.charts %}<figure>{{ chart.svg() | safe }}</figure>
{% endfor %}
{% if section.code %}<pre>{{ section.code }}</pre>
{% endif %}
{% endfor %}
</body>
</html>
"""


@dataclass(frozen=True)
class Section:
    """One part of a page; the first row of a table is its head."""

    heading: str
    text: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    charts: Sequence[Chart] = ()
    code: str = ""


def write_page(path: Path, *, title: str, sections: Sequence[Section]) -> None:
    """Render the page and put it in place in one step: a reader never sees half of it."""
    from jinja2 import Environment

    page = Environment(autoescape=True).from_string(_TEMPLATE).render(title=title, sections=sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(path)
