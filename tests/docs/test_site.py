"""The documentation site: links between files become links between pages, and public names have their reference."""

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import covey
import covey.rewards
import covey.trl

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"
REFERENCE = {"covey": covey, "rewards": covey.rewards, "trl": covey.trl}


def loaded(name: str) -> ModuleType:
    """A file of docs/site, which is no package."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


links = loaded("links")
check = loaded("check")


@pytest.mark.parametrize("page", REFERENCE)
def test_the_reference_describes_every_public_name_once(page: str) -> None:
    found = links.described((ROOT / "docs" / "reference" / f"{page}.md").read_text())
    names = [name.rpartition(".")[2] for name, _ in found]
    assert sorted(names) == sorted(set(REFERENCE[page].__all__) - {"__version__", "rewards"})


@pytest.mark.parametrize("page", REFERENCE)
def test_the_place_of_each_docstring_is_where_the_name_is_defined(page: str) -> None:
    for name, home in links.described((ROOT / "docs" / "reference" / f"{page}.md").read_text()):
        module, _, last = home.rpartition(".")
        found, public = vars(importlib.import_module(module))[last], getattr(REFERENCE[page], name.rpartition(".")[2])
        assert found is public or (callable(found) and inspect.ismodule(public))  # covey.train is both


def test_every_page_is_in_the_navigation() -> None:
    navigation = (SITE / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= named
    assert {links.source_of(page) for page in named - pages} == {
        *("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "tests/README.md")
    }


@pytest.mark.parametrize(
    ("target", "page", "link"),
    [
        ("../../src/covey/types.py", "docs/use/python.md", "../repo/src/covey/types.py.md"),
        ("rewards.md#rows", "docs/use/python.md", "rewards.md#rows"),
        ("../../CONTRIBUTING.md#tests", "docs/use/python.md", "../repo/CONTRIBUTING.md#tests"),
        ("docs/use/python.md", "CONTRIBUTING.md", "../use/python.md"),
        ("../figures/use/trl.svg", "docs/use/trl.md", "../figures/use/trl.svg"),
        ("../docs/figures/front/speed.svg", "benchmarks/README.md", "../../figures/front/speed.svg"),
        ("../../tests/guarantees/", "docs/trust/guarantees.md", "../repo/tests/guarantees/index.md"),
        ("https://arxiv.org", "docs/use/trl.md", "https://arxiv.org"),
        ("#rows", "docs/use/rewards.md", "#rows"),
    ],
)
def test_a_link_between_files_becomes_one_between_pages(target: str, page: str, link: str) -> None:
    assert links.on_the_site(target, page) == link


@pytest.mark.parametrize(
    "path", ["src/covey/types.py", "tests/guarantees", "benchmarks/README.md", "docs/use/trl.md", ".github/SECURITY.md"]
)
def test_a_page_leads_back_to_its_file(path: str) -> None:
    assert links.source_of(links.place_of(path)) == path


def test_links_in_code_blocks_stay_as_they_are() -> None:
    page = "[a](x.md)\n```bash\necho [b](y.md)\n```\n[c](z.md)\n"
    assert links.with_links(page, str.upper) == "[a](X.MD)\n```bash\necho [b](y.md)\n```\n[c](Z.MD)\n"
    assert list(links.linked(page)) == ["x.md", "z.md"]


def test_dead_links_missing_anchors_and_foreign_scripts_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<h1 id="top">x</h1>')
    body = '<a href="other.html#top">1</a><a href="other.html#no">2</a><a href="gone.html">3</a><a href="https://a.b">4</a>'
    (tmp_path / "index.html").write_text(f'{body}<script src="https://cdn.example/x.js"></script>')
    assert check.faults(tmp_path) == [
        "index.html loads https://cdn.example/x.js",
        "index.html links to other.html#no, which has no such anchor",
        "index.html links to gone.html, which is not there",
    ]


def test_the_hooks_are_python_that_parses_and_the_site_takes_nothing_from_elsewhere() -> None:
    for file in SITE.glob("*.py"):
        ast.parse(file.read_text())
    settings = (SITE / "mkdocs.yml").read_text()
    assert "font: false" in settings
    assert "://" not in settings
