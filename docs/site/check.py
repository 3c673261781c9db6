"""Check a built site: every local link and anchor leads somewhere, and nothing is loaded from another host.

python docs/site/check.py build/site
"""

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""Elements that a browser loads by itself, and the attribute that says what."""


class Page(HTMLParser):
    """Collect the anchors of a page, its links, and what it loads."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors = {"", "__top"}
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in LOADED and found.get(LOADED[tag]) and found.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(found[LOADED[tag]])


@cache
def page(file: Path) -> Page:
    return Page(file)


def faults(site: Path) -> list[str]:
    """Return a line for each dead link, missing anchor and foreign resource."""
    found = []
    for file in sorted(site.rglob("*.html")):
        name = file.relative_to(site)
        if name.name == "404.html":
            continue  # its links are absolute
        here = page(file)
        found += [f"{name} loads {target}" for target in here.loads if urlsplit(target).netloc]
        for target in dict.fromkeys([*here.links, *here.loads]):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            goal = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            goal = goal / "index.html" if goal.is_dir() else goal
            if not goal.is_file():
                found.append(f"{name} links to {target}, which is not there")
            elif goal.suffix == ".html" and unquote(parts.fragment) not in page(goal).anchors:
                found.append(f"{name} links to {target}, which has no such anchor")
    return found


def main() -> int:
    site = Path(sys.argv[1])
    found = faults(site)
    print(*found, sep="\n")
    print(f"{len(list(site.rglob('*.html')))} pages, {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
