"""The doctor's package serves without covey: what its README shows runs where there is nothing else."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "src" / "covey_doctor" / "README.md"


def test_the_example_of_the_readme_runs_without_covey_and_torch(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "covey_doctor").symlink_to(ROOT / "src" / "covey_doctor")
    check = "import sys; sys.exit(bool({'covey', 'torch', 'numpy', 'rich'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{example}\n{check}"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert first == re.findall(r"# (sick: .*)", example)[0]
    assert others[0].startswith("sick D34 never stops from the first step on: no answer of the first 3 steps ended")
