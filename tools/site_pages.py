"""The pages of the documentation site: its navigation, its links, and what of the project outside docs/ it shows.

The tests check pages with these functions, and mkdocs calls the `on_…` ones while it builds. A link that leaves docs/,
such as one to a script of benchmarks/, leads to a page under source/ that holds the file.
"""

from __future__ import annotations

import fnmatch
import functools
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
_FENCE = r"^(?P<fence>```+)[^\n]*\n.*?^(?P=fence)[ \t]*$"
# Code comes in two forms and is passed over; a link may have code in its text.
_LINK = re.compile(
    _FENCE + r"|(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()(?P<target>[^)\s]+)\)|`[^`\n]+`", re.MULTILINE | re.DOTALL
)
_HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t]*#*$", re.MULTILINE)
_API = re.compile(r"^::: floatline\.([\w.]+)$", re.MULTILINE)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}


def read_nav(root: Path = ROOT) -> list[Any]:
    """The navigation as mkdocs.yml has it."""
    return yaml.safe_load((root / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]


def list_pages(docs: Path) -> list[str]:
    """All pages of a folder, as paths within it."""
    return sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))


def expand_nav(nav: list[Any], pages: list[str]) -> list[Any]:
    """The navigation with each pattern (`lint/*.md`) filled in: the pages that match it and that nothing else names."""
    named = set(flatten_nav(nav))

    def expand(entry: Any) -> list[Any]:
        if isinstance(entry, dict):
            ((title, value),) = entry.items()
            if not isinstance(value, list):
                return [entry]
            below = [one for part in value for one in expand(part)]
            return [{title: below}] if below else []
        if "*" not in entry:
            return [entry]
        return [page for page in pages if fnmatch.fnmatch(page, entry) and page not in named]

    return [one for entry in nav for one in expand(entry)]


def flatten_nav(nav: Any) -> Iterator[str]:
    """Every path of a navigation, in order."""
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from flatten_nav(part)


def slugify(heading: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub makes it, so that a link works on both."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def find_anchors(text: str) -> set[str]:
    """The anchors of a page's headings, and those written by hand."""
    fenced = re.sub(_FENCE, "", text, flags=re.MULTILINE | re.DOTALL)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in _HEADING.findall(fenced))
    return {slugify(heading.replace("*", "")) for heading in plain} | set(re.findall(r'\bid="([^"]+)"', fenced))


def find_links(text: str) -> list[str]:
    """The targets of all links and pictures outside of code."""
    return [match["target"] for match in _LINK.finditer(text) if match["target"]]


def find_api_names(text: str) -> set[str]:
    """The names of floatline that a page has an entry for."""
    return set(_API.findall(text))


def find_faults(root: Path = ROOT) -> list[str]:
    """What is wrong with navigation and links, a line each; mkdocs is not needed for it."""
    docs = root / "docs"
    pages = list_pages(docs)
    shown = list(flatten_nav(expand_nav(read_nav(root), pages)))
    faults = [f"{page} is not in the navigation" for page in pages if page not in shown]
    faults += [f"{page} is in the navigation {shown.count(page)} times" for page in set(shown) if shown.count(page) > 1]
    faults += [f"{page} is in the navigation and does not exist" for page in set(shown) if page not in pages]
    anchors = functools.cache(lambda path: find_anchors(path.read_text(encoding="utf-8")))
    for page in pages:
        faults += _broken_links(docs / page, root, anchors)
    return sorted(faults)


def _broken_links(page: Path, root: Path, anchors: Callable[[Path], set[str]]) -> Iterator[str]:
    for link in find_links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        name = page.relative_to(root).as_posix()
        if not target.exists() or not target.is_relative_to(root.resolve()):
            yield f"{name}: {link} leads nowhere"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{name}: {link} names no heading"


def place(path: str) -> str:
    """Where the site shows a file of the project, given by its path within the project."""
    if path.startswith("docs/"):  # a report beside a page of the same name needs another one
        return re.sub(r"\.html$", ".report.html", path.removeprefix("docs/"))
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def rewrite_links(text: str, path: str) -> str:
    """The text of a file, with its links to files of the project leading to where the site shows them.

    Args:
        text: Its Markdown.
        path: Its path within the project.
    """
    here, there = posixpath.dirname(path), posixpath.dirname(place(path))

    def rewrite(match: re.Match[str]) -> str:
        target, hash_, anchor = (match["target"] or "").partition("#")
        if not target or ":" in target:
            return match.group(0)
        wanted = posixpath.normpath(posixpath.join(here, target))
        return f"{match['text']}{posixpath.relpath(place(wanted), there or '.')}{hash_}{anchor})"

    return _LINK.sub(rewrite, text)


def find_outside(root: Path = ROOT) -> list[str]:
    """Every file and folder outside docs/ that a page links to, and what those link to in turn."""
    found: set[str] = set()
    left = [f"docs/{page}" for page in list_pages(root / "docs")]
    while left:
        path = left.pop()
        for link in find_links((root / path).read_text(encoding="utf-8")):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link.partition("#")[0] or "."))
            if ":" in link or link.startswith("#") or target.startswith(("docs/", "..")) or target in found:
                continue
            if (root / target).exists():
                found.add(target)
                left += [target] if target.endswith(".md") else []
    return sorted(found)


def source_page(path: str, root: Path = ROOT) -> str:
    """The page that shows a file, or the list of a folder's files."""
    place_ = root / path
    if place_.is_dir():
        return f"# {path}\n\n" + "".join(f"- `{one.name}`\n" for one in sorted(place_.iterdir()))
    text = place_.read_text(encoding="utf-8")
    if path.endswith(".md"):
        return rewrite_links(text, path)
    return f"# {path}\n\n````{_LANGUAGES.get(place_.suffix, 'text')}\n{text}````\n"


def on_config(config: Any) -> Any:
    """mkdocs: fill in the navigation, and make anchors as GitHub does."""
    config.nav = expand_nav(config.nav, list_pages(Path(config.docs_dir)))
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify
    return config


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: add the pages under source/, and the reports."""
    from mkdocs.structure.files import File, InclusionLevel

    for report in sorted(Path(config.docs_dir).rglob("*.html")):
        uri = place(f"docs/{report.relative_to(config.docs_dir).as_posix()}")
        # Said outright: exclude_docs keeps reports from taking the place of pages, and would leave out these as well.
        files.append(File.generated(config, uri, abs_src_path=str(report), inclusion=InclusionLevel.INCLUDED))
    for path in find_outside():
        files.append(File.generated(config, place(path), content=source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs: lead links that leave docs/ to the pages under source/."""
    uri = page.file.src_uri
    return markdown if uri.startswith("source/") else rewrite_links(markdown, f"docs/{uri}")
