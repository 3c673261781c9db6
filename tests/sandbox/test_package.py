"""The package stands alone, and its first page says what it does."""

import re
import subprocess
import sys
from pathlib import Path

import covey_sandbox
from covey_sandbox import boot

PACKAGE = Path(covey_sandbox.__file__).parent


def run(*words: str) -> str:
    """Run Python without site-packages: only the standard library and the package can be imported."""
    command = [sys.executable, "-I", "-S", "-c", "import sys; sys.path.append(sys.argv.pop(1)); exec(sys.argv.pop(1))"]
    found = subprocess.run([*command, str(PACKAGE.parent), *words], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_every_module_is_imported_with_the_standard_library_alone() -> None:
    files = [path.relative_to(PACKAGE.parent).with_suffix("") for path in sorted(PACKAGE.rglob("*.py"))]
    names = [".".join(path.parts).removesuffix(".__init__") for path in files]
    assert len(names) > 30
    lines = [f"import {name}" for name in names]
    said = run("\n".join([*lines, "print(*{'covey', 'torch', 'numpy'} & sys.modules.keys())"]))
    assert said == "\n"


def test_the_example_of_its_first_page_prints_what_the_page_says() -> None:
    page = (PACKAGE / "README.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert f"It prints `{run(example).strip()}`." in page


def test_the_sandboxes_processes_import_nothing_of_the_folder_they_start_in(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('imported')")
    told = "import json, sys; print(sys.flags.no_site, sys.flags.no_user_site, sys.flags.dont_write_bytecode)"
    run = subprocess.run([sys.executable, *boot.FLAGS, "-c", told], cwd=tmp_path, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("1 1 1\n", "")
