"""The public names: each is there, explained, and light to import."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import covey

from ..support.processes import in_a_fork

ROOT = Path(__file__).resolve().parents[2]

NAMES = [
    *("AlgorithmConfig", "Batch", "Callback", "ColdStartConfig", "Completion", "Config", "CurriculumConfig"),
    *("DataConfig", "EngineConfig", "Environment", "Estimate", "Evaluation", "EvaluationConfig", "Failure", "Group"),
    *("Message", "ModelConfig", "OptimizerConfig", "OutputConfig", "Parts", "Policy", "Prompt", "Result", "Reward"),
    *("Rollout", "RunStopped", "Sampling", "SamplingConfig", "StopTraining"),
    *("__version__", "build", "load_policy", "rewards", "train"),
]


def test_the_public_names_are_these_and_each_is_there() -> None:
    assert sorted(covey.__all__) == NAMES
    typed = (ROOT / "src" / "covey" / "__init__.pyi").read_text()
    assert all(name in dir(covey) and getattr(covey, name) is not None for name in NAMES)
    assert all(f" as {name}\n" in typed or f"{name}: " in typed for name in NAMES)
    with pytest.raises(AttributeError, match="has no attribute 'tran'"):
        covey.tran  # noqa: B018


def test_names_of_packages_beside_covey_are_found_under_covey() -> None:
    import covey.sandbox
    import covey.trl
    import covey_sandbox
    from covey_trl.config import GRPOConfig

    assert covey.trl.GRPOConfig is GRPOConfig
    assert all(vars(covey.sandbox)[name] is vars(covey_sandbox)[name] for name in covey_sandbox.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'GRPOTrainr'"):
        covey.trl.GRPOTrainr  # noqa: B018


def test_the_page_explains_every_public_name() -> None:
    page = (ROOT / "docs" / "use" / "python.md").read_text()
    assert [name for name in NAMES if f"`{name}`" not in page and f"covey.{name}" not in page] == []


def fresh(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


def test_importing_covey_loads_nothing() -> None:
    heavy = fresh(
        "import sys, covey; print([m for m in ('torch', 'transformers', 'numpy', 'hydra') if m in sys.modules])"
    )
    assert heavy == "[]\n"
    seconds = fresh("import time; s = time.process_time(); import covey; print(time.process_time() - s)")
    assert float(seconds) < 0.2


@pytest.mark.long
@pytest.mark.parametrize(
    "imports",
    [
        "import covey",
        "import covey.loop",
        "from covey.loop import train_step; import covey",
        "from covey import train; import covey",
        "import covey; covey.train; import covey.loop",
    ],
)
def test_covey_train_is_one_function_however_covey_was_imported(imports: str) -> None:
    program = f"{imports}\nimport inspect\nfrom covey.loop import is_due\n"
    checks = "assert callable(covey.train)\nassert 'rewards' in inspect.signature(covey.train).parameters\n"

    def imported_anew() -> tuple[bool, bool]:
        for name in [name for name in sys.modules if name.partition(".")[0] == "covey"]:
            del sys.modules[name]
        scope: dict[str, Any] = {}
        exec(program + checks, scope)
        return scope["is_due"](1, 2, 6), scope["covey"].train is scope["covey"].api.training.train

    assert in_a_fork(imported_anew) == (True, True)


TYPED = """
import covey
from covey.loop import train_step

result = covey.train("nano", recipe="arithmetic", num_steps=3)
reveal_type(result)
reveal_type(result.sample("41+7="))
reveal_type(train_step)
"""


@pytest.mark.slow
def test_mypy_knows_what_covey_train_returns(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", str(tmp_path / "program.py")]  # with settings and cache of `make types`
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    notes = [line.partition("note: ")[2] for line in done.stdout.splitlines() if "note: Revealed" in line]
    assert notes[0] == 'Revealed type is "covey.api.result.Result"', done.stdout
    assert notes[1] == 'Revealed type is "list[str]"'
    assert "def (run: covey.run.build.Run" in notes[2]
