"""What mkdocs does besides: pages for linked files outside of docs/, and the API reference."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import links

REFERENCE = "reference/"
ENTRY = """

::: {home}
    options:
      heading: "{name}"
      toc_label: "{short}"
"""


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file outside of docs/ that a page links to, and for those that these link to."""
    todo = [links.DOCS + file.src_uri for file in files.documentation_pages()]
    todo += ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    done = {place for file in files for place in [file.src_uri]}
    while todo:
        page = todo.pop()
        place = links.place_of(page)
        if place not in done:
            done.add(place)
            files.append(_added(page, place, config))
        if page.endswith(".md"):
            text = (links.ROOT / page).read_text(encoding="utf-8")
            found = {links.file_of(target, page) for target in links.linked(text)} - {None}
            readme = [f"{path}/README.md" if (links.ROOT / path / "README.md").is_file() else path for path in found]
            todo += [path for path in readme if links.place_of(path) not in done and (links.ROOT / path).exists()]
    return files


def _added(page: str, place: str, config: Any) -> File:
    if page.endswith(links.IMAGES):
        return File.generated(config, place, abs_src_path=str(links.ROOT / page))
    return File.generated(config, place, content=links.shown(page))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links between files into links between pages, and describe the names of a reference page."""
    place = page.file.src_uri
    if place == f"{links.SHOWN}README.md":
        page.meta["title"] = "README"  # it begins with a picture
    if place.startswith(links.SHOWN) and not links.source_of(place).endswith(".md"):
        return markdown
    if place.startswith(REFERENCE):
        markdown = _with_entries(markdown)
    return links.with_links(markdown, lambda target: links.on_the_site(target, links.source_of(place)))


def _with_entries(markdown: str) -> str:
    """Add signature and docstring of each name that the tables list, and lead from the tables to them."""
    names = links.described(markdown)
    entries = [ENTRY.format(name=name, short=name.rpartition(".")[2], home=home) for name, home in names]
    for name, home in names:
        markdown = markdown.replace(f"| `{name}` |", f"| [`{name}`](#{home}) |")
    body, rule, end = markdown.rpartition("\n---\n")
    return f"{body}\n## Each name\n{''.join(entries)}\n{rule}{end}"
