"""Values of a preset or a recipe give way to what is typed, and only those."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from covey.cli.main import main
from covey.cluster.settings import DevicesConfig
from covey.config import compose as settings
from covey.config.auto_adjust import adjust_unset_options, find_shadowed_presets
from covey.config.checks import read
from covey.config.schema import Config
from covey.config.validate import validate
from covey.engine.settings import EngineConfig
from covey.loop import train


def composed(*words: str) -> tuple[Config, list[str]]:
    """Return the settings of `covey train WORDS`, and what gave way."""
    settings.register()
    with initialize_config_dir(str(settings.CONF), version_base="1.3"):
        config = settings.to_unchecked(compose("config", overrides=list(words)))
    notices = adjust_unset_options(config, {word.partition("=")[0] for word in words} - {"recipe"})
    validate(config)
    return config, notices


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (
            ["algorithm=two_kl", "algorithm.kl_coef=0"],
            {"algorithm.kl_gradient": "straight_through_k2"},
        ),
        (
            ["algorithm=two_kl", "algorithm.kl_in=reward"],
            {"algorithm.kl_gradient": "straight_through_k2"},
        ),
        (
            ["algorithm=two_kl", "algorithm.loss=reinforce"],
            {"algorithm.loss_options": {}},
        ),
        (
            ["algorithm=two_kl", "algorithm.advantage=leave_one_out"],
            {"algorithm.advantage_options": {}},
        ),
        (
            ["algorithm=gspo", "algorithm.loss=reinforce"],
            {"algorithm.ratio": "token", "algorithm.loss_options": {}},
        ),
        (["algorithm=gspo", "algorithm.ratio=token"], {"algorithm.loss_options": {}}),
        (["recipe=infill_nano", "environment.judge=."], {"environment.judge_num_steps": 300}),
        (["recipe=infill_nano", "num_steps=3"], {"optimizer.warmup_steps": 0}),
        (["recipe=tldr", "environment=arithmetic"], {"data.path": None, "data.max_rows": None, "rewards": []}),
        (
            ["recipe=tldr", "model.lora_rank=0"],
            {"model.load_in_4bit": False, "model.lora_dropout": 0.0, "model.lora_targets": ["all-linear"]},
        ),
        (["recipe=arithmetic", "evaluation.num_samples=1"], {"evaluation.k": [1]}),
        (["recipe=arithmetic", "evaluation.k=[2,16]"], {"evaluation.num_samples": 16}),
        (["sampling.max_tokens=20000"], {"micro_batch_tokens": 20000}),
        (["recipe=torchrl_ifeval", "mini_batch_rollouts=32"], {"mini_batch_groups": None}),
        (["recipe=tldr_reference_ratio", "groups_per_step=2"], {"mini_batch_groups": 2}),
        (["recipe=tldr_reference_ratio", "group_size=6"], {}),
        (["recipe=tldr_reference_ratio", "group_size=8", "group_size_schedule=[{step:100,group_size:4}]"], {}),
    ],
    ids=" ".join,
)
def test_typed_values_override_a_presets(words: list[str], changed: dict[str, Any]) -> None:
    config, notices = composed(*words)
    assert {name: read(config, name) for name in changed} == changed
    assert {line.partition("=")[0] for line in notices} == {*changed}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["recipe=arithmetic", "algorithm.kl_estimator=k1"],
            "algorithm.kl_estimator=k1 needs algorithm.kl_coef > 0, got algorithm.kl_coef=0.0",
        ),
        (
            ["algorithm=two_kl", "algorithm.kl_coef=0", "algorithm.kl_gradient=naive"],
            "algorithm.kl_gradient=naive needs algorithm.kl_coef > 0, got algorithm.kl_coef=0.0",
        ),
        (
            ["recipe=tldr", "environment=arithmetic", "data.path=rows.jsonl"],
            "data.path=rows.jsonl needs an environment that reads rows, got environment=arithmetic",
        ),
        (
            ["algorithm=two_kl", "algorithm.loss=reinforce", "algorithm.loss_options.eps_low=0.1"],
            "loss_options must be empty for reinforce, got eps_low",
        ),
    ],
    ids=" ".join,
)
def test_what_is_typed_is_refused_where_nothing_reads_it(words: list[str], line: str) -> None:
    with pytest.raises(ValueError) as refusal:
        composed(*words)
    assert str(refusal.value) == line


@pytest.mark.long
def test_tokens_of_older_weights_are_corrected_for_unless_something_else_is_typed() -> None:
    def corrected(*words: str) -> tuple[str, str]:
        algorithm = composed("source=ray", *words)[0].algorithm
        return algorithm.ratio_denominator, algorithm.correction

    assert corrected() == ("old", "none")
    assert corrected("max_staleness=2") == ("behaviour", "none")
    assert corrected("max_staleness=2", "algorithm.ratio_denominator=old") == ("old", "none")
    assert corrected("max_staleness=2", "algorithm.correction=none") == ("old", "none")
    assert corrected("max_staleness=2", "algorithm=decoupled") == ("old", "truncate")
    assert corrected("max_staleness=2", "algorithm=gspo") == ("old", "truncate")
    assert corrected("max_staleness=2", "algorithm.loss=reinforce") == ("old", "truncate")


@pytest.mark.parametrize(("given", "left"), [([1, 4, 8], [1, 4]), ([8, 16], [4])], ids=["some fit", "none fits"])
def test_pass_at_k_is_measured_for_as_many_samples_as_there_are(given: list[int], left: list[int]) -> None:
    config = Config()
    config.evaluation.k, config.evaluation.num_samples = given, 4
    adjust_unset_options(config, {"evaluation.num_samples"})
    assert config.evaluation.k == left


@pytest.mark.parametrize(
    "words", [["algorithm=gspo", "algorithm.loss_options.eps_low=0.0003"], ["algorithm=dr_grpo"]], ids=["typed", "wide"]
)
def test_clip_ranges_that_are_typed_or_wide_stay_for_ratios_of_tokens(words: list[str]) -> None:
    before = composed(words[0])[0].algorithm.loss_options
    assert composed(*words, "algorithm.ratio=token")[0].algorithm.loss_options == before


def test_settings_that_contradict_each_other_with_nothing_typed_stay() -> None:
    config = Config()
    config.algorithm.kl_estimator = "k1"
    assert adjust_unset_options(config, {"num_steps"}) == []
    assert config.algorithm.kl_estimator == "k1"


def takes_anything(inputs: Any, **options: Any) -> Any:
    return -inputs.ratio * inputs.advantages_NT * options["eps_low"]


def test_options_stay_for_a_function_that_takes_any() -> None:
    config, notices = composed("algorithm=gspo", f"algorithm.loss={__name__}:takes_anything")
    assert notices == []
    assert config.algorithm.loss_options == {"eps_low": 3e-4, "eps_high": 4e-4}
    assert config.algorithm.ratio == "sequence_mean"


def test_what_gave_way_is_said_in_one_line_each(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", "recipe=infill_nano", "num_steps=3"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "optimizer.warmup_steps=0 in place of 5: the run has num_steps=3\n"
    assert "  warmup_steps: 0\n" in shown.out


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            ["algorithm=gdpo", "algorithm.advantage=pairwise"],
            ["algorithm=gdpo has no effect: algorithm.advantage=pairwise in place of gdpo"],
        ),
        (
            ["algorithm=dapo", "algorithm.group_filter=null"],
            ["algorithm=dapo has no effect: algorithm.group_filter=null in place of zero_std"],
        ),
        (["algorithm=gdpo"], []),
        (["algorithm=gspo", "algorithm.ratio=token"], []),
        (["algorithm=grpo", "algorithm.advantage=pairwise"], []),
        (["algorithm=mine", "seed=1"], []),
    ],
    ids=lambda value: " ".join(value) if value and "=" in value[0] else "",
)
def test_a_preset_of_which_nothing_is_left_is_said_to_have_no_effect(words: list[str], lines: list[str]) -> None:
    there = [word for word in words if word != "algorithm=mine"]
    config, _ = composed(*there)
    assert find_shadowed_presets(config, words) == lines


def test_the_command_says_that_a_preset_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "algorithm=gdpo", "algorithm.advantage=pairwise"]) == 0
    assert "algorithm=gdpo has no effect" in capsys.readouterr().err


VLLM = ("engine=vllm", "engine.url=http://127.0.0.1:8000")
ON_RAY = ("engine=vllm", "source=ray", "devices.python=python")


@pytest.mark.parametrize("words", [VLLM, ON_RAY], ids=["local", "ray"])
def test_tokens_are_weighed_where_sampler_and_trainer_are_different_programs(words: tuple[str, ...]) -> None:
    config, notices = composed("recipe=arithmetic", *words)
    assert (config.algorithm.correction, config.algorithm.correction_max) == ("truncate", 2.0)
    line = "algorithm.correction=truncate in place of none: engine=vllm is another program than the trainer"
    assert line in notices


def test_tokens_are_weighed_where_weights_of_eight_bits_are_sampled_from() -> None:
    config, notices = composed("recipe=arithmetic", "engine.weights=int8")
    assert config.algorithm.correction == "truncate"
    line = "algorithm.correction=truncate in place of none: engine.weights=int8 samples from rounded weights"
    assert line in notices
    typed, _ = composed("recipe=arithmetic", "engine.weights=int8", "algorithm.correction=none")
    assert typed.algorithm.correction == "none"


def test_settings_of_a_program_get_the_same_correction_as_those_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Config] = []
    monkeypatch.setattr("covey.loop._train", lambda config, *given: seen.append(config))
    chosen = Config(source="ray", devices=DevicesConfig(python="python"), engine=EngineConfig(name="vllm"))
    train(chosen, tmp_path)
    train(chosen, tmp_path, as_typed=True)
    train(Config(source="ray", max_staleness=1), tmp_path)
    train(Config(), tmp_path)
    found = [(config.algorithm.correction, config.algorithm.ratio_denominator) for config in seen]
    assert found == [("truncate", "old"), ("none", "old"), ("none", "behaviour"), ("none", "old")]
    assert chosen.algorithm.correction == "none", "what was given stays as it is"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine=vllm"], "needs vLLM here"),
        (["engine=vllm", "engine.url=http://here", "model.precision=float64"], "needs model.precision"),
    ],
    ids=["not installed", "not with what else was typed"],
)
def test_an_engine_that_was_typed_is_refused_where_it_cannot_sample_and_never_replaced(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.engine.settings.find_spec", lambda package: None)
    with pytest.raises(ValueError, match=f"^engine.name=vllm {message}"):
        composed("recipe=arithmetic", *words)


def test_no_correction_is_added_for_the_trainers_engine_or_over_a_typed_one() -> None:
    assert composed("recipe=arithmetic")[0].algorithm.correction == "none"
    assert composed("recipe=arithmetic", *VLLM, "algorithm.correction=none")[0].algorithm.correction == "none"
    assert composed("recipe=arithmetic", *VLLM, "algorithm.correction=mask")[0].algorithm.correction == "mask"


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ([], 0),
        (["devices.trainer=2"], 0),
        (["max_staleness=1"], 1),
        (["streaming=true"], 1),
        (["devices.sampler=1"], 1),
        (["devices.cpus_per_sampler=2"], 1),
        (["devices.python=python"], 1),
        (["engine.update=abort"], 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_synchronous_samplers_start_only_where_typed(words: list[str], count: int) -> None:
    config, notices = composed("source=ray", *words)
    assert config.devices.sampler == count
    assert any(line.startswith("devices.sampler=0 in place of 1: ") for line in notices) == (count == 0)
    resumed, _ = composed("source=ray", "resume=outputs/begun", *words)
    assert resumed.devices.sampler == 1, "a run that was begun goes on as it was"


def test_a_chosen_preset_drops_options_of_another_loss_and_keeps_its_own_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, notices = composed("recipe=machines", "algorithm=cispo")
    assert config.algorithm.loss_options == {"ratio_min": 0.0, "ratio_max": 5.0}
    assert any(notice.endswith("cispo takes no eps_high, eps_low") for notice in notices)
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text("loss: clip\nloss_options: {eps_lo: 0.1}\n")
    assert main(["config", "--config-dir", str(tmp_path), "algorithm=mine", "recipe=arithmetic"]) == 2
    assert "got eps_lo" in capsys.readouterr().err
