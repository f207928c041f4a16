"""Pages made of hostile texts: every text is a text, in the mark-up and in a real browser."""

from pathlib import Path

import pytest
from tests.report.reading import Page
from tests.report.rescues import make_rescue
from tests.report.run.runs import make_run
from tests.report.validation.validations import make_validation

from floatline.formats import find_format
from floatline.report.chart import Chart, Column
from floatline.report.document.html import page_of
from floatline.report.rescue import _TONES, document_of_rescue
from floatline.report.run.folders import open_runs
from floatline.report.run.page import write_run_page
from floatline.report.validation.report import write_report

ATTACKS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</script><!--",
    "'onmouseover='alert(3)",
    "</title></style></svg></textarea><svg onload=alert(4)>",
    "]]><script>alert(5)</script>",
    "javascript:alert(6)",
    "{{7*7}}{% raw %}${7*7}",
    "\u2028\u2029\x1b[2J\x07<iframe srcdoc='<script>alert(7)</script>'>",
    "&lt;script&gt;&#60;img&#62;",
)
DANGEROUS = {"img", "iframe", "object", "embed", "form", "base", "audio", "video", "textarea"}


def find_faults(text: str) -> list[str]:
    """Elements and attributes of a page that no page of floatline has."""
    found = []
    page = Page(text)
    for tag, attributes in page.elements:
        if tag in DANGEROUS or (tag == "link" and attributes.get("href") != "data:,"):
            found.append(tag)
        found += [f"{tag} {name}" for name in attributes if name.startswith("on")]
        address = (attributes.get("href") or attributes.get("src") or "").strip().lower()
        found += [f"{tag} {address}"] if address.startswith(("javascript:", "data:text", "http:")) else []
        if tag == "script" and attributes.get("type") not in (None, "application/json"):
            found.append(f"script {attributes}")
    own = [attributes for tag, attributes in page.elements if tag == "script" and "type" not in attributes]
    return [*found, *(["two scripts"] if len(own) > 1 else [])]


def pages_of(attack: str, folder: Path) -> dict[str, str]:
    """Every kind of page with the attack wherever a text of someone else's stands."""
    make_run(folder / "run", steps=60, plan=attack, layers=(attack, f"b.{attack}"), stop=attack)
    write_run_page([run.look() for run in open_runs([folder / "run"])], folder / "run.html")
    validation = make_validation({attack: 0.0002}, num_seeds=3, target=attack, evil=True)
    write_report(validation, folder / "validation")
    return {
        "run": (folder / "run.html").read_text(encoding="utf-8"),
        "validation": (folder / "validation" / "report.html").read_text(encoding="utf-8"),
        "rescue": page_of(document_of_rescue(make_rescue(attack, attack)), tones=_TONES),
    }


@pytest.mark.parametrize("number", range(len(ATTACKS)))
def test_every_text_of_every_page_is_text(tmp_path, number):
    for kind, text in pages_of(ATTACKS[number], tmp_path).items():
        assert find_faults(text) == [], kind
        assert "Content-Security-Policy" in text and "default-src 'none'" in text.replace("&#39;", "'"), kind
        assert "49${" not in text, kind  # the template is not rendered twice


@pytest.mark.parametrize("attack", [ATTACKS[0], ATTACKS[1], ATTACKS[4], ATTACKS[8]])
def test_an_attack_that_is_not_escaped_would_be_found(tmp_path, attack):
    text = "<html><body><script>own()</script>" + attack + "</body></html>"
    assert find_faults(text)


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_title_of_a_chart_is_a_text(attack):
    shares = {"zero": 0.0, "subnormal": 0.0, "normal": 1.0, "overflow": 0.0}
    chart = Chart(attack, find_format("fp16"), (Column(-3, -3, 1.0, "normal"),), shares)
    assert find_faults(chart.svg()) == []
