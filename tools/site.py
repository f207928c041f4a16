"""Builds the documentation site into site/, in an environment of its own, and checks what was built: `make site`.

Only the first call needs a package index. The build itself reads nothing from the network, and neither do the pages.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv" / "site"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
NEEDS = ROOT / "constraints-site.txt"
SITE = ROOT / "site"


class Page(HTMLParser):
    """The anchors, the links and the assets of one built page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag names."""
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ("script", "img", "iframe") and "src" in found:
            self.assets.append(found["src"])
        if tag == "link" and found.get("rel") != "canonical" and "href" in found:
            self.assets.append(found["href"])


def prepare() -> None:
    """Make the environment, once for each list of packages."""
    stamp = VENV / "ready"
    if stamp.exists() and stamp.read_text() == NEEDS.read_text() + sys.version:
        return
    venv.create(VENV, with_pip=True, clear=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(NEEDS)]
    subprocess.run(pip, cwd=ROOT, check=True)
    stamp.write_text(NEEDS.read_text() + sys.version)


def find_faults(site: Path) -> list[str]:
    """Links and anchors that lead nowhere in what was built, and whatever a page would load from elsewhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    faults: list[str] = []
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        faults += [f"{name} loads {asset}" for asset in page.assets if asset.startswith(("http:", "https:", "//"))]
        for link in page.links:
            target, _, anchor = link.partition("#")
            if ":" in target or target.startswith("//") or name == "404.html":
                continue
            file = (path.parent / unquote(target)).resolve() if target else path
            file = file / "index.html" if file.is_dir() else file
            if not file.exists():
                faults.append(f"{name}: {link} leads nowhere")
            elif anchor and file in pages and unquote(anchor) not in pages[file].anchors:
                faults.append(f"{name}: {link} names no place")
    return faults


def main() -> int:
    """Build, check, and say where it is."""
    try:
        prepare()
    except subprocess.CalledProcessError as failure:
        print(f"site: the installation failed (exit {failure.returncode}), see above", file=sys.stderr)
        return 1
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # what the theme has to say about its successor
    build = [str(PYTHON), "-m", "mkdocs", "build", "--strict"]  # with --quiet, strict counts no warnings
    built = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True)
    if built.returncode:
        print(built.stdout + built.stderr, file=sys.stderr)
        return 1
    faults = find_faults(SITE)
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        return 1
    print(f"{len(list(SITE.rglob('*.html')))} pages: open {SITE / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
