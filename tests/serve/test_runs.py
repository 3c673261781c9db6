"""Run folders of models, as `covey watch` and `covey report` read them."""

import asyncio
from pathlib import Path

import pytest

from covey.run.folder import is_running
from covey_report.logs.foreign import read_any
from covey_report.runs.folders import run_folders
from covey_report.runs.show import run_show
from covey_report.text import as_lines

from .served import cross_entropy, serving

TEXTS = [cross_entropy([5, 9, 11, 3, 8]), cross_entropy([7, 2, 30])]


def test_each_model_has_a_run_that_is_watched_while_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> tuple[list[Path], list[bool]]:
        async with serving(tmp_path) as client:
            await client.begin()
            for place in range(2):
                client.seq = 0
                model = await client.make(place)
                for _ in range(3):
                    await client.train(model, TEXTS)
                    await client.step(model)
            folders = run_folders("watch", [str(tmp_path / "runs")])
            return folders, [is_running(folder) for folder in folders]

    folders, running = asyncio.run(run())
    assert running == [True, True]
    assert not any(map(is_running, folders))
    runs = [read_any(folder) for folder in folders]
    for found in runs:
        assert [row["step"] for row in found.steps] == [1, 2, 3]
        assert found.steps[0]["loss"] > found.steps[2]["loss"] > 0
        assert found.steps[0]["num_tokens"] == 6
        assert found.settings["model.name"] == "Qwen/Qwen3-8B"
    lines = "\n".join(as_lines(runs, ["one", "two"]))
    assert "Under way, or killed: step 3." in lines
    assert "loss" in lines
    assert "gradient norm" in lines
    assert "models of a service, each its client's own: not compared" in lines
    assert "seed" not in lines.partition("settings that differ")[0]
    run_show([str(folders[0])])
    assert "; a model of covey serve, which knows no rewards\n" in capsys.readouterr().out


def test_a_run_continues_in_its_folder_after_a_restart(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as client:
            await client.begin()
            model = await client.make()
            await client.train(model, TEXTS)
            await client.step(model)
        async with serving(tmp_path) as after:
            after.seq = client.seq
            await after.train(model, TEXTS)
            await after.step(model)

    asyncio.run(run())
    (folder,) = (tmp_path / "runs").iterdir()
    assert [row["step"] for row in read_any(folder).steps] == [1, 2]
