"""Links of the repository's Markdown files, and the pages of the site they lead to. Standard library alone."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs/"
SHOWN = "repo/"
"""Folder of the site for files outside of docs/ that a page links to."""
IMAGES = (".svg", ".png", ".gif")
FENCE = re.compile(r"^(```+|~~~+).*?^\1\s*?$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
NAME = re.compile(r"^\| \[?`(covey\.[\w.]+)`\]?", re.MULTILINE)
LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".md": "markdown",
    ".json": "json",
    ".toml": "toml",
    ".c": "c",
    ".h": "c",
}
LANGUAGES |= {".sh": "bash", ".sbatch": "bash", ".ipynb": "json"}
LARGEST = 120_000
"""Characters of a file that a page shows."""


def linked(text: str) -> Iterator[str]:
    """Yield the targets of all links outside of code blocks."""
    for match in LINK.finditer(FENCE.sub("", text)):
        yield match[2]


def with_links(text: str, change: Callable[[str], str]) -> str:
    """Change the target of every link outside of code blocks."""

    def changed(part: str) -> str:
        return LINK.sub(lambda match: f"{match[1]}{change(match[2])}{match[3]}", part)

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [changed(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, changed(text[end:])])


def file_of(target: str, page: str) -> str | None:
    """Return the path in the repository that a link of a page leads to; None for other sites and places in the page.

    >>> file_of("../../src/covey/types.py#L3", "docs/develop/architecture.md")
    'src/covey/types.py'
    """
    path = target.partition("#")[0]
    if "://" in target or target.startswith("mailto:") or not path:
        return None
    return normpath(str(PurePosixPath(page).parent / path))


def place_of(path: str) -> str:
    """Return where the site shows a file or folder of the repository.

    >>> place_of("docs/use/rewards.md"), place_of("src/covey/types.py"), place_of("CONTRIBUTING.md")
    ('use/rewards.md', 'repo/src/covey/types.py.md', 'repo/CONTRIBUTING.md')
    """
    if path.startswith(DOCS) and (ROOT / path).is_file():
        return path.removeprefix(DOCS)
    shown = path.removeprefix(".")  # sites leave out hidden folders
    if (ROOT / path).is_dir():
        return f"{SHOWN}{shown}/{'README.md' if (ROOT / path / 'README.md').is_file() else 'index.md'}"
    return f"{SHOWN}{shown}" if path.endswith((".md", *IMAGES)) else f"{SHOWN}{shown}.md"


def source_of(place: str) -> str:
    """Return the path in the repository of a page of the site: the inverse of `place_of`."""
    if not place.startswith(SHOWN):
        return DOCS + place
    path = place.removeprefix(SHOWN)
    names = (path, path.removesuffix("/index.md").removesuffix(".md"))
    return next(name for start in ("", ".") for name in (start + each for each in names) if (ROOT / name).exists())


def on_the_site(target: str, page: str) -> str:
    """Return the link between pages of the site that a link between files of the repository becomes."""
    path = file_of(target, page)
    if path is None:
        return target
    anchor = target[target.index("#") :] if "#" in target else ""
    return relpath(place_of(path), str(PurePosixPath(place_of(page)).parent)) + anchor


def shown(path: str) -> str:
    """Return the Markdown of the page that shows a file or a folder outside of docs/."""
    file = ROOT / path
    if path.endswith(".md"):
        return file.read_text(encoding="utf-8")
    head = "---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n"
    if file.is_dir():
        names = sorted(f"{each.name}{'/' * each.is_dir()}" for each in file.iterdir() if each.name[0] not in "._")
        return f"{head}# {path}/\n\n" + "".join(f"- `{name}`\n" for name in names)
    text = file.read_text(encoding="utf-8")
    cut = "" if len(text) <= LARGEST else f"\nThe first {LARGEST:,} characters of {len(text):,}.\n"
    language = LANGUAGES.get(file.suffix, "text")
    return f'{head}# {path}\n{cut}\n``````{{.{language} linenums="1"}}\n{text[:LARGEST]}\n``````\n'


def homes(file: str) -> dict[str, str]:
    """Return the names that a module imports for its users, with the module and name that each comes from."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.asname or name.name: f"{node.module}.{name.name}" for node in imports for name in node.names}


PUBLIC = {
    "covey": "src/covey/__init__.pyi",
    "covey.rewards": "src/covey/rewards.py",
    "covey.trl": "src/covey_trl/__init__.py",
}
"""Public modules, and the files whose imports say where their names come from."""


def described(page: str) -> list[tuple[str, str]]:
    """Return the public names that the tables of a reference page list, with the place of each one's docstring."""
    found = []
    for name in NAME.findall(page):
        module, _, last = name.rpartition(".")
        if module in PUBLIC:
            home = homes(PUBLIC[module]).get(last, name)
            found.append((name, name if home.startswith("covey.") and home.count(".") < 2 else home))
    return found
