"""Fill-in on real text: what the judge pays for is no worse under a model that shares nothing with it."""

import json
from pathlib import Path

import pytest

from covey.cli.main import main

from ...support.small import logging_as_it_was

SETTINGS = (
    *("recipe=infill_nano", "num_steps=60", "environment.window=32", "environment.num_train=16384"),
    *("environment.monitors=[ngram]", "environment.judge_num_steps=1200", "environment.judge_floor=0.6"),
    # The judge is right about 72 % of texts: with less of a penalty it is flattered (docs/tasks/infill.md).
    *("cold_start.num_steps=600", "algorithm.kl_coef=3", "output.progress=false"),
)


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.timeout(1800)
def test_perplexity_of_fills_of_shakespeare_under_an_independent_model_does_not_get_worse(
    tmp_path: Path, shared: Path
) -> None:
    text = shared / "data" / "text" / "tinyshakespeare.txt"
    with logging_as_it_was():
        assert main(["train", *SETTINGS, f"data.path={text}", f"hydra.run.dir={tmp_path}/run"]) == 0
    gain = json.loads((tmp_path / "run" / "summary.json").read_text())["gain"]
    assert gain["reward_mean"]["low"] > 0
    assert gain["reward_parts"]["ngram"]["value"] > 0  # nats a character: perplexity is exp of their negative
