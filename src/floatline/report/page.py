"""One self-contained HTML page: headings, text, tables and charts. Every text is escaped, nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from floatline.report.chart import Chart
from floatline.report.document.html import put_in_place, read_text, security_policy

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<link rel="icon" href="data:,">
<title>{{ title }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for section in sections %}
<h2>{{ section.heading }}</h2>
{% for line in section.text %}<p>{{ line }}</p>
{% endfor %}
{% if section.rows %}<div class="wide"><table>
<thead><tr>{% for cell in section.rows[0] %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
{% for row in section.rows[1:] %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
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

    style = read_text("templates/look.css")
    template = Environment(autoescape=True).from_string(_TEMPLATE)
    policy = security_policy(styles=style)
    put_in_place(path, template.render(title=title, sections=sections, style=style, policy=policy))
