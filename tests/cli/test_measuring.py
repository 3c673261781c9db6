"""`covey evaluate`: whose settings a saved policy is measured with, what is said first, and what is refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.cli.main import main

from ..support.small import logging_as_it_was, words

RUN = Path("run")
POLICY = "run/checkpoints/step-000002/policy"
TASK = {"environment__levels": [2], "environment__num_train": 40, "preflight__enabled": False}


@pytest.fixture(scope="module", name="trained")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one short run of adapters on nano."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patched, logging_as_it_was():
        patched.chdir(folder)
        assert main(["train", *words(**TASK, model__lora_rank=2), "hydra.run.dir=run"]) == 0
    return folder


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "run", "run")
    with logging_as_it_was():
        yield


def before(folder: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(Path(folder, "summary.json").read_text())["before"]
    return found


@pytest.mark.long
def test_adapters_on_nano_are_measured_as_at_the_end_of_their_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", f"model.name={POLICY}", "hydra.run.dir=look"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines()[0] == "settings of run: environment=arithmetic"
    assert printed.out.splitlines()[1].startswith("step 2 evaluated: ")
    assert before("look") == json.loads((RUN / "summary.json").read_text())["after"]


@pytest.mark.long
def test_adapters_on_nano_are_trained_further_and_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [word for word in words(**TASK, model__lora_rank=2) if "nano" not in word]
    assert main(["train", *settings, f"model.name={POLICY}", "hydra.run.dir=further"]) == 0
    assert main(["evaluate", "model.name=further/checkpoints/step-000002/policy", "hydra.run.dir=look"]) == 0
    assert before("look") == json.loads(Path("further/summary.json").read_text())["after"]
    assert main(["train", "resume=further", "num_steps=3", "resume_changes=[num_steps]"]) == 0
    assert "resumed after step 2" in capsys.readouterr().out
    assert Path("further/checkpoints/step-000003/policy/adapter_config.json").is_file()


@pytest.mark.long
def test_what_is_typed_is_laid_over_the_settings_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", f"model.name={POLICY}", "evaluation.num_samples=3", "hydra.run.dir=look"]) == 0
    printed = capsys.readouterr()
    first = "settings of run: environment=arithmetic; over them: evaluation.num_samples=3"
    assert printed.out.splitlines()[0] == first
    assert printed.err == ""
    assert before("look")["num_samples"] == 3
    settings = Path("look/config.yaml").read_text()
    assert "num_train: 40" in settings
    assert "lora_rank: 2" in settings


@pytest.mark.long
def test_settings_of_the_environment_of_the_run_can_be_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"prompt": f"{index}+1="}) for index in range(12)]
    Path("rows.jsonl").write_text("\n".join(lines))
    Path("own_reward.py").write_text("def reward(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    own = words(data__path="rows.jsonl", data__test_fraction=0.2, rewards=["own_reward:reward"])
    assert main(["train", "environment=reward_functions", *own, "hydra.run.dir=other"]) == 0
    capsys.readouterr()
    name = "model.name=other/checkpoints/step-000002/policy"
    typed = "environment.in_process=true"
    assert main(["evaluate", typed, name, "hydra.run.dir=look"]) == 0
    first = f"settings of other: environment=reward_functions; over them: {typed}"
    assert capsys.readouterr().out.splitlines()[0] == first


@pytest.mark.long
def test_another_task_than_that_of_the_run_is_named_first(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["evaluate", f"model.name={POLICY}", "environment=countdown", "model.lora_rank=2", "sampling.max_tokens=8"]
    small = ["evaluation.num_prompts=2", "evaluation.num_samples=2", "evaluation.k=[1]"]
    assert main([*chosen, *small, "sampling.top_k=3", "hydra.run.dir=look"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == (
        f"{POLICY} on environment=countdown, with the settings typed, not those of run"
    )
    assert (
        printed.err.splitlines()[-1]
        == "WARNING: settings differ from the run in run: environment=countdown (run: arithmetic)"
    )

    chosen[2] = "environment=arithmetic"
    assert main([*chosen, *small, "hydra.run.dir=again"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == (
        "WARNING: settings differ from the run in run: "
        "environment.levels=[3] (run: [2]), environment.num_train=4096 (run: 40)"
    )


@pytest.mark.parametrize(
    ("verb", "words"),
    [("evaluate", []), ("evaluate", ["model.name=untrained"]), ("train", ["model.name=untrained"]), ("check", [])],
)
def test_a_policy_without_a_task_is_refused(verb: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("untrained").mkdir()
    Path("untrained/config.json").write_text("{}")
    assert main([verb, *words]) == 2
    what = "to measure" if verb == "evaluate" else "to train"
    assert capsys.readouterr().err.startswith(f"covey: nothing says what {what}: covey {verb} recipe=arithmetic")


DIGITS = "def reward(completions, **kwargs):\n    return [float(len(text) % 2) for text in completions]\n"


@pytest.mark.parametrize("place", ["rows.jsonl", "folder"])
def test_all_rows_of_a_file_that_is_named_are_measured(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    for file in ("rows.jsonl", "folder/test.jsonl"):
        Path(file).write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(30)))
    Path("own_reward.py").write_text(DIGITS)
    sizes = [word for word in words() if not word.startswith(("evaluation.num_prompts", "num_steps", "group", "optim"))]
    named = ["environment=reward_functions", "rewards=[own_reward:reward]", f"data.path={place}"]
    assert main(["evaluate", *sizes, *named, "hydra.run.dir=look"]) == 0
    assert before("look")["num_prompts"] == 30
    assert "30 prompts, greedy and 2 samples" in capsys.readouterr().out
    assert main(["evaluate", *sizes, *named, "evaluation.num_prompts=7", "hydra.run.dir=seven"]) == 0
    assert before("seven")["num_prompts"] == 7


def test_two_policies_are_measured_on_the_same_prompts_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    first = POLICY.replace("step-000002", "step-000001")
    shutil.copytree(POLICY, first)
    assert main(["evaluate", f"model.name={POLICY}", "--against", first, "hydra.run.dir=look"]) == 0
    printed = capsys.readouterr().out
    assert f"against: {first}\n" in printed
    found = json.loads(Path("look/summary.json").read_text())
    assert found["sides"] == ["against", "measured"]
    assert found["gain"]["accuracy"]["value"] == found["gain"]["pass_at_k"]["1"]["value"] == 0.0  # the same weights
    (heads,) = [line.split() for line in printed.splitlines() if "difference" in line]
    assert heads == ["against", "measured", "difference"]
    assert main(["evaluate", f"model.name={POLICY}", "--against", "run"]) == 2
    assert "model.name=run is a run folder, not a policy" in capsys.readouterr().err


@pytest.mark.long
def test_an_untrained_policy_is_called_so_in_the_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [word for word in words() if word.startswith(("evaluation", "sampling", "model.nano"))]
    assert main(["evaluate", *settings, "hydra.run.dir=look"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "an untrained policy (model=nano) on environment=arithmetic; model.name=FOLDER measures another"
    )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "run",
            '"run" sets nothing: it is a run; resume=run continues it, --config run/config.yaml takes its settings, '
            "model.name=run/checkpoints/STEP/policy its policy",
        ),
        ("model.name=run", f"model.name=run is a run folder, not a policy; its newest policy is model.name={POLICY}"),
        (
            "model.name=run/checkpoints/step-000002",
            "model.name=run/checkpoints/step-000002 is a checkpoint, not a policy; "
            f"its newest policy is model.name={POLICY}",
        ),
        ("model.name=.", f"model.name=. is a folder of runs, not a policy; its newest policy is model.name={POLICY}"),
        ("model.name=/nowhere/at", "model.name=/nowhere/at: there is no such folder"),
        (
            "model.name=run/checkpoints/x/policy",
            "model.name=run/checkpoints/x/policy: there is no such folder",
        ),
        ("model.name=empty", "model.name=empty is a run folder without a policy"),
    ],
)
def test_what_is_no_policy_is_answered_in_one_line(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    Path("empty/config.yaml").write_text("seed: 0\n")
    assert main(["evaluate", word]) == 2
    assert capsys.readouterr().err == f"covey: {message}\n"
