"""The documentation site holds together: navigation, links, anchors, and an entry for every public name."""

import importlib
from pathlib import Path

import pytest
from tests.slow import slow
from tools import site, site_pages

import floatline

ROOT = Path(__file__).parents[2]


def make_project(root: Path, nav: str, **pages: str) -> Path:
    (root / "docs").mkdir()
    (root / "mkdocs.yml").write_text(f"nav:\n{nav}", encoding="utf-8")
    for name, text in pages.items():
        (root / "docs" / f"{name}.md").write_text(text, encoding="utf-8")
    return root


def test_every_page_is_in_the_navigation_once_and_every_link_and_anchor_leads_somewhere():
    assert site_pages.find_faults() == []


def test_every_public_name_has_an_entry_in_the_api_page():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = site_pages.find_api_names(text)
    assert {name for name in names if "." not in name} == set(floatline.__all__)


def test_every_other_entry_of_the_api_page_is_a_name_that_a_room_offers():
    names = site_pages.find_api_names((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    for name in sorted(name for name in names if "." in name):
        room, _, own = name.rpartition(".")
        assert hasattr(importlib.import_module(f"floatline.{room}"), own), name


def test_a_name_without_an_entry_would_be_found():
    page = "::: floatline.Guard\n::: floatline.plans.Clip\n    options: {}\n"
    assert site_pages.find_api_names(page) == {"Guard", "plans.Clip"}


@pytest.mark.parametrize(
    ("nav", "text", "fault"),
    [
        ("- a.md\n- b.md\n", "# A\n[b](b.md#the-second)", None),
        ("- a.md\n", "# A", "b.md is not in the navigation"),
        ("- a.md\n- b.md\n- X: [b.md]\n", "# A", "b.md is in the navigation 2 times"),
        ("- a.md\n- b.md\n- c.md\n", "# A", "c.md is in the navigation and does not exist"),
        ("- a.md\n- b.md\n", "# A\n[`code`](c.md)", "docs/a.md: c.md leads nowhere"),
        ("- a.md\n- b.md\n", "# A\n`one` ([b](b.md#first), `two`)", "docs/a.md: b.md#first names no heading"),
        ("- a.md\n- b.md\n", "# A\n[here](#there)", "docs/a.md: #there names no heading"),
        ("- a.md\n- b.md\n", "# A\n[out](../../outside.md)", "docs/a.md: ../../outside.md leads nowhere"),
        ("- a.md\n- b.md\n", "# A\n```text\n[b](c.md)\n```\n`[b](c.md)` [w](https://example.org/c.md)", None),
    ],
)
def test_a_fault_is_found(tmp_path, nav, text, fault):
    (tmp_path / "outside.md").touch()
    root = tmp_path / "project"
    root.mkdir()
    make_project(root, nav, a=text, b="# B\n## The *second*\n")
    assert site_pages.find_faults(root) == ([] if fault is None else [fault])


def test_a_pattern_stands_for_the_pages_that_nothing_else_names():
    pages = ["a.md", "lint/one.md", "lint/rules.md", "lint/two.md"]
    nav = [{"Lint": ["lint/rules.md", "lint/*.md"]}, {"Empty": ["none/*.md"]}, {"A": "a.md"}]
    assert site_pages.expand_nav(nav, pages) == [
        {"Lint": ["lint/rules.md", "lint/one.md", "lint/two.md"]},
        {"A": "a.md"},
    ]


def test_a_link_that_leaves_docs_leads_to_the_page_that_shows_the_file():
    text = "[a](b.md#c) [`x`](../examples/x.py) ![p](p.svg) `[n](../n.py)` [r](sub/r.html)\n```\n[n](../n.py)\n```\n"
    assert site_pages.rewrite_links(text, "docs/a.md") == (
        "[a](b.md#c) [`x`](source/examples/x.py.md) ![p](p.svg) `[n](../n.py)` [r](sub/r.report.html)\n"
        "```\n[n](../n.py)\n```\n"
    )
    assert site_pages.rewrite_links("[d](../docs/a.md)", "benchmarks/r.md") == "[d](../../a.md)"


def test_files_outside_docs_are_found_through_other_files_and_shown_whole(tmp_path):
    root = make_project(tmp_path, "- a.md\n", a="[r](../results/r.md) [web](https://example.org)")
    (root / "results").mkdir()
    (root / "results" / "r.md").write_text("# R\n[s](../s.py) [all](../results)\n")
    (root / "s.py").write_text("print('```')\n")
    assert site_pages.find_outside(root) == ["results", "results/r.md", "s.py"]
    assert "print('```')" in site_pages.source_page("s.py", root)
    assert "`r.md`" in site_pages.source_page("results", root)


def test_what_a_built_page_loads_from_elsewhere_and_its_dead_links_are_found(tmp_path):
    (tmp_path / "index.html").write_text(
        '<a href="b.html#here">b</a><img src="p.png"><a href="https://example.org">w</a>'
    )
    (tmp_path / "b.html").write_text('<h1 id="here">B</h1>')
    assert site.find_faults(tmp_path) == []
    (tmp_path / "b.html").write_text('<script src="https://example.org/x.js"></script><a href="c.html">c</a>')
    assert site.find_faults(tmp_path) == [
        "b.html loads https://example.org/x.js",
        "b.html: c.html leads nowhere",
        "index.html: b.html#here names no place",
    ]


@slow
def test_the_pictures_of_the_numerics_are_what_the_library_computes():
    from tools import numerics_pictures

    for name, draw in (("spacing", numerics_pictures.draw_spacing), ("updates", numerics_pictures.draw_updates)):
        assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8") == draw()
    assert numerics_pictures.follow_updates()["nearest"][-1] == 1.0
