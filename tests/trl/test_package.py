"""The package's first page says what it does, and the core does not need it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import covey_trl

PAGE = Path(covey_trl.__file__).with_name("README.md").read_text()


def run(program: str) -> str:
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_the_example_of_its_first_page_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(example, {})
    assert f"It prints `{capsys.readouterr().out.strip()}`." in PAGE


def test_the_core_loads_it_only_where_a_setting_is_unknown() -> None:
    imports = "import sys, covey.trl, covey.cli.main, covey.cli.command_line as line, covey.api.settings"
    loaded = 'print(sorted(name for name in sys.modules if name.startswith("covey_trl")) != [])'
    assert run(f'{imports}; line.arrange("config", ["num_steps=3"]); {loaded}') == "False"
    refused = 'try: line.arrange("config", ["cast_lm_head_to_fp32=1"])\nexcept ValueError as error: print(error)'
    assert "cast_lm_head_to_fp32 of TRL is no setting here" in run(f"{imports}\n{refused}")
