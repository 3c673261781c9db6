"""The example package, installed as a user installs it: an environment, a verb and a callback of somebody else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ..support.small import rows

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the package is installed into."""
    folder = tmp_path_factory.mktemp("example")
    shutil.copytree(ROOT / "examples/covey_example_package", folder / "source")  # a build writes beside it
    how = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "install", *how, "--target", str(folder / "site"), str(folder / "source")]
    subprocess.run(command, check=True)
    return folder / "site"


def covey(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(site)])
    command = [sys.executable, "-m", "covey", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})


def test_its_environment_is_listed_and_its_settings_are_checked(site: Path) -> None:
    listed = covey(site, "config", "--help")
    assert "settings of environment=backwards:" in listed.stdout
    assert "Digits of a number. [>= 1, <= 6]" in " ".join(listed.stdout.split())
    refused = covey(site, "config", "environment=backwards", "environment.digits=1", "environment.num_test=9")
    assert refused.returncode == 2
    assert "environment.num_test must be < 9 (numbers of that length), got 9" in refused.stderr
    unknown = covey(site, "config", "environment=backwards", "environment.digit=1")
    assert "unknown setting environment.digit; did you mean environment.digits?" in unknown.stderr


@pytest.mark.long
def test_two_steps_of_its_environment_are_trained_resumed_and_read(site: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    small = ("groups_per_step=2", "group_size=2", "sampling.max_tokens=4", "preflight.enabled=false")
    settings = ("environment=backwards", "environment.digits=2", "output.callbacks=[good_enough]")
    done = covey(site, "train", *settings, *small, "num_steps=2", f"hydra.run.dir={folder}")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load((folder / "config.yaml").read_text())["environment"]["digits"] == 2
    trained = rows(folder / "metrics.jsonl", "train")
    assert [row["step"] for row in trained] == [1, 2]
    assert all(row["example/short_of_enough"] >= 0 for row in trained)
    resumed = covey(site, "train", f"resume={folder}", "num_steps=3", "resume_changes=[num_steps]")
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in rows(folder / "metrics.jsonl", "train")] == [1, 2, 3]
    assert covey(site, "best", str(folder)).stdout.startswith("step ")
    assert "must be the folder of a run" in covey(site, "best", str(tmp_path)).stderr


def test_a_run_of_a_package_that_is_gone_says_what_to_install(site: Path, tmp_path: Path) -> None:
    saved = covey(site, "config", "environment=backwards")
    assert saved.returncode == 0, saved.stderr
    (tmp_path / "saved.yaml").write_text(saved.stdout)
    said = covey(tmp_path, "config", "--config", str(tmp_path / "saved.yaml")).stderr
    assert "there is no environment=backwards (pip install the package that has it)" in said
