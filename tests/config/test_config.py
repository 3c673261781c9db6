"""What may be set, what is refused and with which words."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from covey.cli.errors import explain
from covey.cli.help import all_settings, group_choices
from covey.cli.main import main
from covey.config import compose as settings
from covey.config.names import other_names
from covey.config.schema import Config, OutputConfig, setting_names
from covey.config.shelves import presets
from covey.config.validate import validate
from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.environments.settings import ArithmeticConfig
from covey.policy.settings import ModelConfig
from covey.trainer.settings import OptimizerConfig
from covey_report.plan.settings import derive_numbers, report
from covey_tasks.infill.settings import InfillConfig
from covey_tasks.math.settings import Gsm8kConfig

RESOLVED = Path(__file__).parents[1] / "data" / "resolved_default.yaml"
REGENERATE = "COVEY_CACHE=.cache/covey covey config > tests/data/resolved_default.yaml"
ROWS = ["data.path=rows.jsonl"]
SHOWN = ["algorithm.teacher=self", "algorithm.teacher_shows=[gold]"]
MY_REWARDS = ["environment=reward_functions", *ROWS, "rewards=[my_module:my_reward]"]


def composed(*overrides: str, folder: Path | None = None, name: str = "config") -> Config:
    """The config that `covey config OVERRIDES` would show."""
    settings.register()
    extra = [f"hydra.searchpath=[file://{folder}]"] if folder else []
    with initialize_config_dir(str(settings.CONF), version_base="1.3"):
        return settings.to_config(compose(name, overrides=[*overrides, *extra]))


ODD_TEXT = (
    *("1e5", "1e-6", "-.5", "+1", "0x1F", "0o7", "1_000", "12:30:45", "inf", ".inf", "-Infinity", ".NaN", "null", "~"),
    *(
        "true",
        "Yes",
        "off",
        "",
        "  x",
        "a\nb",
        "a: b",
        "#c",
        "- d",
        "2020-01-01",
        "<<",
        "${x}",
        "é",
        "😀",
        "\x07",
        "'q'",
    ),
)


def refusal(*overrides: str) -> str:
    """The line a user sees."""
    with pytest.raises(Exception) as caught:
        composed(*overrides)
    return explain(caught.value)


# ------------------------------------------------------------------------------------------------ the default


def test_every_changed_default_is_a_visible_decision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COVEY_CACHE", ".cache/covey")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["config"]) == 0
    assert capsys.readouterr().out == RESOLVED.read_text(), f"if this change is meant: {REGENERATE}"


def test_the_default_config_of_the_dataclasses_is_that_of_the_yaml() -> None:
    assert composed() == Config()


def test_the_default_config_is_valid() -> None:
    validate(Config())


def test_every_setting_is_explained_in_one_line() -> None:
    documented = {setting.name for found in all_settings().values() for setting in found}
    names = {name.rpartition(".")[2] for name in setting_names()}
    sections = {"model", "data", "engine", "sampling", "algorithm", "optimizer", "cold_start", "evaluation", "output"}
    sections |= {"parallel", "preflight", "doctor", "timeouts", "curriculum", "devices"}
    entries = {"step"}  # of group_size_schedule
    assert names - sections == documented - sections - entries  # timeouts.sampling is called like a section


# ------------------------------------------------------------------------------------------------ composing


NEEDED = {
    **dict.fromkeys(("gsm8k", "gsm8k_lora", "math", "torchrl_gsm8k"), ROWS),
    **dict.fromkeys(("my_rewards", "my_rewards_reference_ratio"), MY_REWARDS[1:]),
    "code_mbpp": ROWS,
}
"""What a recipe leaves to its user."""


@pytest.mark.long
@pytest.mark.parametrize("name", group_choices()["recipe"])
def test_every_recipe_composes_with_the_model_that_needs_no_download(name: str) -> None:
    model = "nano-masked" if "infill" in name else "nano"
    config = composed(f"recipe={name}", f"model={model}", *NEEDED.get(name, []))
    assert config.model.name == model


@pytest.mark.long
@pytest.mark.parametrize("group", ["model", "algorithm"])
def test_every_choice_of_a_group_is_valid(group: str) -> None:
    for choice in group_choices()[group]:
        chosen = OmegaConf.load(presets(group)[choice])
        assert isinstance(chosen, DictConfig)
        chosen.pop("defaults", None)
        merged = OmegaConf.merge(OmegaConf.structured(Config), {group: chosen})
        for name, value in MASKED.get(choice, {}).items():
            OmegaConf.update(merged, name, value)
        config = OmegaConf.to_object(merged)
        assert isinstance(config, Config)
        if choice in MASKED:
            config.environment = InfillConfig()
        validate(config)


VLLM = ("engine=vllm", "engine.url=http://127.0.0.1:8000")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("engine.sleep=2", "model.lora_rank=4"), "engine.sleep=2 needs model.lora_rank = 0, got model.lora_rank=4"),
        (
            ("engine.gpu_memory_utilization=0.5",),
            "engine.gpu_memory_utilization=0.5 needs engine.url = null, got engine.url=http://127.0.0.1:8000",
        ),
    ],
)
def test_memory_of_vllm_that_could_not_be_had_or_come_back_is_refused(words: tuple[str, ...], line: str) -> None:
    assert refusal(*VLLM, *words) == line


MASKED: dict[str, dict[str, str]] = {name: {"engine.name": "fill"} for name in ("nano-masked", "modernbert-base")}
"""What a masked policy needs of its engine."""


@pytest.mark.long
@pytest.mark.parametrize("group", ["engine", "optimizer"])
def test_every_choice_that_the_schema_names_can_be_made(group: str) -> None:
    for choice in group_choices()[group]:
        masked = ["model=nano-masked", "environment=infill"] if choice == "fill" else []
        elsewhere = ["engine.url=http://127.0.0.1:8000"] if choice == "vllm" else []
        config = composed(f"{group}={choice}", *masked, *elsewhere)
        assert getattr(config, group).name == choice


def test_the_engine_of_masked_policies_brings_its_distribution() -> None:
    config = composed("engine=fill", "model=nano-masked", "environment=infill")
    assert (config.sampling.temperature, config.sampling.top_p) == (0.8, 0.95)


def test_each_environment_brings_its_own_settings() -> None:
    assert composed().environment == ArithmeticConfig()
    assert composed("environment=gsm8k", *ROWS, "environment.scheme=trl").environment == Gsm8kConfig(scheme="trl")
    assert isinstance(composed(*MY_REWARDS).environment, RewardFunctionsConfig)


def test_the_command_line_wins_over_the_recipe() -> None:
    config = composed("recipe=arithmetic", "seed=3", "optimizer.lr=0.5", "cold_start.enabled=false")
    assert (config.seed, config.optimizer.lr, config.cold_start.enabled) == (3, 0.5, False)


def test_rewards_are_named_by_module_and_function() -> None:
    assert composed(*MY_REWARDS, "reward_weights=[2.0]").rewards == ["my_module:my_reward"]


def test_options_of_functions_are_set_like_any_other_key() -> None:
    config = composed("algorithm.advantage_options.ddof=0", "algorithm.shaping.repetition.ngram=4")
    assert config.algorithm.advantage_options == {"ddof": 0}
    assert config.algorithm.shaping == {"repetition": {"ngram": 4}}


def test_a_users_own_recipe_is_found_in_their_folder(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /optimizer: sgd\nnum_steps: 7\n"
    )
    config = composed("recipe=mine", folder=tmp_path)
    assert (config.num_steps, config.optimizer.name) == (7, "sgd")


def test_the_cache_folder_follows_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_CACHE", "/data/cache")
    assert Config().cold_start.cache_dir == "/data/cache"
    monkeypatch.delenv("COVEY_CACHE")
    assert Config().cold_start.cache_dir == str(Path.home() / ".cache" / "covey")


def test_the_printed_config_can_be_read_back(tmp_path: Path) -> None:
    config = composed("recipe=arithmetic", "seed=3")
    path = tmp_path / "config.yaml"
    path.write_text(report(config))
    schema = OmegaConf.structured(Config)
    schema.environment = OmegaConf.structured(ArithmeticConfig)
    assert OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.load(path))) == config


def test_derived_numbers_follow_from_the_settings() -> None:
    config = Config(num_steps=10, groups_per_step=6, group_size=4, updates_per_batch=2, mini_batch_groups=2)
    config.max_staleness = 2
    config.evaluation.every = 3
    config.sampling.max_tokens = 100
    numbers = derive_numbers(config, num_ranks=4)
    assert numbers["rollouts_per_step"] == 24
    assert numbers["rollouts_in_all"] == 240
    assert numbers["groups_per_rank"] == 2
    assert (numbers["rollouts_per_rank"], numbers["micro_batches_per_rank"]) == (8, 1)
    assert numbers["optimizer_steps"] == 60
    assert numbers["buffer_groups"] == 18
    assert numbers["most_completion_tokens_per_step"] == 2400
    assert numbers["evaluations"] == 5  # before, after steps 3, 6 and 9, after
    assert numbers["completions_per_evaluation"] == 128 * 5


# ------------------------------------------------------------------------------------------------ refusing


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("sed=3", "unknown setting sed; did you mean seed?"),
        ("algorithm.kl_cof=1", "unknown setting algorithm.kl_cof; did you mean algorithm.kl_coef?"),
        ("lr=3", "unknown setting lr; did you mean cold_start.lr or optimizer.lr?"),
        ("modle=nano", "unknown setting modle; did you mean model?"),
        ("optimizer.learning_rate=1e-4", "unknown setting optimizer.learning_rate; did you mean optimizer.lr?"),
        ("cold_start.max_steps=9", "unknown setting cold_start.max_steps; did you mean cold_start.num_steps?"),
        ("num_generations=4", "unknown setting num_generations; did you mean group_size?"),
        ("kl=0.1", "unknown setting kl; did you mean algorithm.kl_coef?"),
        ("use_lora=true", "unknown setting use_lora; did you mean model.lora_rank or model.lora_alpha?"),
        ("eval_every=4", "unknown setting eval_every; did you mean evaluation.every?"),
        ("+beta=0.04", "unknown setting beta; did you mean algorithm.kl_coef?"),
        ("+bar=3", "unknown setting bar"),
        ("+model.foo=3", "unknown setting model.foo"),
        (
            "environment.scheme=trl",
            "the chosen environment has no setting environment.scheme; these have: gsm8k, ifeval, math",
        ),
        ("~seed", "seed cannot be deleted; every setting has a value"),
        ("seed=abc", "seed must be an integer, got abc"),
        (
            "environment.levels=[1,a]",
            "environment.levels[1] must be an integer, got a",
        ),
        ("seed=null", "seed must have a value, got null; it is 0 where nothing is said"),
        ("evaluation.every=null", "evaluation.every must have a value, got null; it is 0 where nothing is said"),
        ("seed=", "seed must be an integer, got nothing"),
        ("shuffle=maybe", "shuffle must be true or false, got maybe"),
        ("optimizer.lr=[1]", "optimizer.lr must be a number, got [1]"),
        ("model.name=[nano]", "model.name must be text, got ['nano']"),
        ("evaluation.k={a:1}", "evaluation.k must be a list"),
        ("algorithm.loss_options=[1]", "algorithm.loss_options must be a mapping"),
        ("algorithm.loss_options=1", "algorithm.loss_options must be a mapping, got int"),
        ("rewards=mine:good", "rewards is a list: write rewards=[mine:good]"),
        ("recipe", 'cannot read the override "recipe": settings are written name=value, such as recipe=arithmetic'),
        ("seed==", 'cannot read the override "seed==": quote the value, for the shell and for Hydra: "seed=\'=\'"'),
        ("data=rows.jsonl", "data is a section of settings: write data.path=rows.jsonl"),
        ("cold_start=false", "cold_start is a section of settings: write cold_start.enabled=false"),
        ("output=x", "output is a section of settings: write hydra.run.dir=x"),
        (
            "timeouts=3",
            "timeouts is a section of settings: write timeouts.NAME=3; NAME is one of "
            f"{', '.join(vars(Config().timeouts))}",
        ),
        ("~recipe=code", "recipe is not there to be deleted; settings are written name=value"),
        ("~nothing", "nothing is not there to be deleted; settings are written name=value"),
        (
            "seed=1−2",
            'cannot read the override "seed=1−2": − is not the plain character of programs; type it anew',
        ),
        (
            "model.name=“x”",
            'cannot read the override "model.name=“x”": “ is not the plain character of programs; type it anew, or '
            "quote the value",
        ),
        ("data.colum=x", "unknown setting data.colum; did you mean data.answer_column or data.prompt_column?"),
        ("seed=3,", 'cannot read the override "seed=3,": it ends with a comma'),
        ("model=org/name", 'model has no choice "org/name"; a folder or a hub name is model.name=org/name'),
        (
            "environment=mine:Task",
            'environment has no choice "mine:Task"; a class of yours is environment=custom '
            "environment.factory=mine:Task",
        ),
        (
            "recipe=fizbuzz",
            f'recipe has no choice "fizbuzz"; did you mean fizzbuzz? choices: {", ".join(group_choices()["recipe"])}',
        ),
        (
            "environment=gsm9k",
            'environment has no choice "gsm9k"; did you mean gsm8k? '
            f"choices: {', '.join(group_choices()['environment'])}",
        ),
    ],
)
def test_a_slip_is_one_line_with_the_nearest_name(overrides: str, line: str) -> None:
    assert refusal(overrides) == line


@pytest.mark.parametrize(
    ("overrides", "meant"),
    [
        ("use_vllm=true", "engine=vllm"),
        ("vllm_mode=colocate", "engine=vllm"),
        ("vllm_tensor_parallel_size=2", "engine=vllm"),
        ("sync_iter=false", "max_staleness"),
    ],
)
def test_a_name_of_another_library_that_is_one_value_here_is_answered_with_it(overrides: str, meant: str) -> None:
    assert refusal(overrides) == f"unknown setting {overrides.partition('=')[0]}; did you mean {meant}?"


def test_names_of_other_libraries_are_answered_with_settings_that_are_there() -> None:
    known = {*setting_names(), "algorithm.loss_options.eps_low", "algorithm.loss_options.eps_high"}
    assert {own.partition("=")[0] for names in other_names().values() for own in names} <= known | {"engine"}
    assert not {name for name in other_names() if name in {other.rpartition(".")[2] for other in known}}


def test_a_slip_inside_a_yaml_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\nmodel:\n  lora_ranck: 3\n")
    with pytest.raises(Exception) as caught:
        composed("recipe=mine", folder=tmp_path)
    assert (
        explain(caught.value) == "unknown setting model.lora_ranck in recipe/mine.yaml; did you mean model.lora_rank?"
    )


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["group_size=1"], "group_size must be >= 2, got 1"),
        (["num_steps=0"], "num_steps must be >= 1, got 0"),
        (["model.nano_num_heads=0"], "model.nano_num_heads must be >= 1, got 0"),
        (["updates_per_batch=0"], "updates_per_batch must be >= 1, got 0"),
        (["sampling.temperature=0"], "sampling.temperature must be > 0, got 0.0"),
        (["sampling.top_p=1.5"], "sampling.top_p must be <= 1, got 1.5"),
        (["packing=tight"], "packing must be one of shared, packed, padded, got tight"),
        (["output.trackers=[neptune]"], "output.trackers must be one of tensorboard, wandb, got neptune"),
        (
            ["max_staleness=2"],
            "max_staleness=2 needs source=ray, got source=local (groups are sampled between updates)",
        ),
        (["source=slurm"], "source must be one of local, ray, got slurm"),
        (
            ["micro_batch_tokens=100"],
            "sampling.max_tokens must be <= micro_batch_tokens=100, got 256",
        ),
        (
            ["evaluation.k=[1,16]"],
            "evaluation.k must be <= evaluation.num_samples=4, got 16",
        ),
        (
            ["recipe=infill_nano", "num_steps=5"],
            "optimizer.schedule=cosine needs optimizer.warmup_steps < num_steps, got optimizer.warmup_steps=5, "
            "num_steps=5; a run this short takes optimizer.warmup_steps=0",
        ),
        (["mini_batch_groups=33"], "mini_batch_groups must be <= groups_per_step=32, got 33"),
        (["mini_batch_rollouts=264"], "mini_batch_rollouts=264 needs a step of as many rollouts, got 256"),
        (
            ["mini_batch_rollouts=12"],
            "mini_batch_rollouts=12 must be a multiple of group_size=8: a group is never split",
        ),
        (["optimizer.betas=[0.9]"], "optimizer.betas must be two numbers in [0, 1), got [0.9]"),
        (
            ["model=qwen2.5-0.5b", "model.load_in_4bit=true"],
            "model.load_in_4bit=true needs model.lora_rank > 0, got model.lora_rank=0",
        ),
        (
            ["environment=gsm8k"],
            "environment=gsm8k needs data.path (a file, a folder or a hub name; any will do for covey plan), "
            "got data.path=null",
        ),
        (["data.path=x"], "data.path=x needs an environment that reads rows, got environment=arithmetic"),
        (
            ["environment=math", *ROWS, "environment.timeout=60", "timeouts.scoring=60"],
            "timeouts.scoring must be > 60 (environment.timeout=60), got 60",
        ),
        (
            [*MY_REWARDS, "environment.timeout=50", "environment.start_timeout=30", "timeouts.scoring=80"],
            "timeouts.scoring must be > 80 (environment.timeout + environment.start_timeout), got 80",
        ),
        (
            [
                *("environment=code", "environment.total_seconds=10", "environment.num_slots=2"),
                *("group_size=7", "timeouts.scoring=40"),
            ],
            "timeouts.scoring must be > 40 (environment.total_seconds=10 for 7 programs in 2 slots), got 40",
        ),
        (
            ["environment=code", "environment.timeout=30"],
            "environment.total_seconds must be >= timeout=30.0, got 20.0",
        ),
        (
            ["environment=tools", *ROWS, "environment.tools=[look]", "rewards=[a:b]"],
            "tools of environment=tools must be module:function, got look",
        ),
        (
            ["environment=tools", *ROWS, "environment.tools=[a:look]"],
            "environment=tools needs rewards=[module:function], or a toolset with get_reward, got none",
        ),
        (
            ["model=qwen2.5-0.5b", "model.lora_rank=4", "model.lora_targets=[]"],
            "model.lora_rank=4 needs model.lora_targets, got an empty list",
        ),
        (["rewards=[a:b]"], "rewards=[a:b] needs environment=reward_functions, got environment=arithmetic"),
        (
            [*MY_REWARDS[:2], "rewards=[think_format,{function:soft_overlong,args:{max_lenght:9,cache:3}}]"],
            "reward function soft_overlong has no argument 'max_lenght'; did you mean max_length?; "
            "it takes max_length, cache",
        ),
        (
            [*MY_REWARDS, "data.path=my_rows:posts", "data.subset=main"],
            "data.subset=main needs data.path = a folder or a hub name, got data.path=my_rows:posts",
        ),
        (
            [*MY_REWARDS, "data.path=my_rows:posts", "data.train_split=dev"],
            "data.train_split=dev needs data.path = a folder or a hub name, got data.path=my_rows:posts",
        ),
        (
            ["environment=reward_functions", *ROWS],
            "environment=reward_functions needs rewards=[module:function], or a teacher, got rewards=[]",
        ),
        (
            ["algorithm.teacher=self"],
            "algorithm.teacher=self needs algorithm.teacher_shows=[gold], [solution] or [feedback], or "
            "algorithm.teacher_temperature: a policy that sees nothing more is no teacher, and algorithm.kl_coef keeps "
            "to the first one, got algorithm.teacher_shows=[], algorithm.teacher_temperature=null",
        ),
        (
            ["algorithm.teacher_model=self"],
            "unknown setting algorithm.teacher_model; did you mean algorithm.teacher?",
        ),
        (
            [*SHOWN, "algorithm.teacher_template='{text} {answer}'"],
            "algorithm.teacher_template must have no other braces than {what} and {text}, got '{text} {answer}'",
        ),
        (
            [*SHOWN, "algorithm.teacher_options={discount: 2}"],
            "algorithm.teacher_options.discount must be <= 1, got 2",
        ),
        (
            [*SHOWN, "algorithm.teacher_term=divergence", "algorithm.teacher_options={beta: 2}"],
            "algorithm.teacher_options.beta must be in [0, 1], got 2",
        ),
        (
            ["algorithm.teacher=http://127.0.0.1:9", "algorithm.teacher_term=divergence"],
            "algorithm.teacher_term=divergence with a server needs algorithm.teacher_options={top_k: 20, support: "
            "teacher}, for it tells its likeliest tokens alone, got {}",
        ),
        (
            ["algorithm.teacher=http://127.0.0.1:9", "sampling.temperature=0.5"],
            "algorithm.teacher=http://127.0.0.1:9 needs algorithm.teacher_temperature=1, no filter of sampling and "
            "model.kind=causal, for a server tells log-probs at temperature 1, got algorithm.teacher_temperature=0.5",
        ),
        ([*MY_REWARDS, "reward_weights=[1,2]"], "reward_weights must have one weight for each of 1 rewards, got 2"),
        (
            [*MY_REWARDS, *ROWS, "data.answer_column=gold", "data.prefill=true"],
            "data.answer_column=gold needs data.prefill=false: an answer at the end of a prompt is moved into a column "
            "or gone on from, not both",
        ),
        (
            [*MY_REWARDS, *ROWS, "data.answer_column=prompt"],
            "data.answer_column must be another column than data.prompt_column=prompt",
        ),
        (
            [*MY_REWARDS, *ROWS, "data.test_fraction=0"],
            "data.test_fraction must be above 0 and at most 0.9, got 0: a run is measured on rows that it does not "
            "train on; to train on all rows of a file, give a test split: data.path=FOLDER with train.* and test.* "
            "files",
        ),
        (
            ["environment=gsm8k", *ROWS, "data.prefill=true"],
            "data.prefill=true needs environment=reward_functions, got environment=gsm8k",
        ),
        (
            ["environment=gsm8k", *ROWS, "data.prompt_column=text"],
            "data.prompt_column=text needs environment=reward_functions, got environment=gsm8k",
        ),
        (
            ["preflight.max_tokens=8", "preflight.enabled=false"],
            "preflight.max_tokens=8 needs preflight.enabled = true, got preflight.enabled=false",
        ),
        (
            [
                *("algorithm.kl_coef=0.1", "algorithm.target_kl=0.1", "algorithm.kl_horizon=25"),
                *("groups_per_step=16", "group_size=8"),
            ],
            "algorithm.kl_horizon must be > 25.6, a fifth of the completions of a step, or algorithm.kl_coef_min > 0, "
            "got 25: one step could drive kl_coef to 0",
        ),
        (
            ["algorithm.target_kl=0.1"],
            "algorithm.target_kl=0.1 needs algorithm.kl_coef > 0, got algorithm.kl_coef=0.0",
        ),
        (
            ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_estimator=full"],
            "algorithm.kl_estimator=full needs algorithm.kl_in = loss, got algorithm.kl_in=reward",
        ),
        (
            ["algorithm.reference_refresh_every=5"],
            "algorithm.reference_refresh_every=5 needs algorithm.kl_coef > 0, got algorithm.kl_coef=0.0, "
            "algorithm.ratio_denominator=old",
        ),
        (
            [
                "algorithm.kl_coef=0.1",
                "model.lora_rank=8",
                "algorithm.reference_refresh_every=5",
                "algorithm.reference_refresh_alpha=0.5",
            ],
            "algorithm.reference_refresh_alpha=0.5 needs model.lora_rank = 0 (adapters can only be copied), "
            "got model.lora_rank=8",
        ),
    ],
)
def test_settings_in_conflict_are_named_both(overrides: Sequence[str], line: str) -> None:
    assert refusal(*overrides) == line


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("algorithm.kl_estimator=k1", "algorithm.kl_coef > 0, got algorithm.kl_coef=0.0"),
        ("algorithm.kl_horizon=5", "algorithm.target_kl set, got algorithm.target_kl=null"),
        ("algorithm.correction_max=3.0", "algorithm.correction = truncate or mask, got algorithm.correction=none"),
        ("algorithm.rejection_thresholds=2", "algorithm.rejection set, got algorithm.rejection=null"),
        ("algorithm.selection_options={k: 2}", "algorithm.selection set, got algorithm.selection=null"),
        ("algorithm.group_filter_rounds=9", "algorithm.group_filter set, got algorithm.group_filter=null"),
        (
            "algorithm.norm_length=9",
            "algorithm.aggregation to end in _norm, got algorithm.aggregation=token_mean, "
            "algorithm.kl_aggregation=null",
        ),
        ("model.lora_dropout=0.1", "model.lora_rank > 0, got model.lora_rank=0"),
        ("model.revision=abc", "model.name = a hub name, got model.name=nano"),
        ("optimizer.min_lr_ratio=0.1", "optimizer.schedule = linear or cosine, got optimizer.schedule=constant"),
        ("output.wandb_project=mine", "output.trackers with wandb, got output.trackers=[]"),
    ],
)
def test_a_setting_that_nothing_would_read_is_refused(override: str, reason: str) -> None:
    assert refusal(override).endswith(f"needs {reason}")


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["algorithm.advantage=zscore"], "algorithm.advantage must be one of "),
        (
            ["algorithm.advantage_options.dof=0"],
            "algorithm.advantage_options must be among ddof, eps, eps_mode, singleton",
        ),
        (["algorithm.advantage=my_missing_module:f"], "my_missing_module:f needs module my_missing_module"),
        (["algorithm.loss_options.foo=1"], "got foo"),
        (["algorithm.loss=ppo"], "algorithm.loss must be one of "),
        (["algorithm.loss=clipp"], "or module:function, got clipp; did you mean clip?"),
        (["algorithm.advantage=zscore"], "or module:function, got zscore; did you mean group_zscore?"),
        (["algorithm.aggregation=mean"], "aggregation must be one of "),
        (["algorithm.shaping.repetition.size=3"], "algorithm.shaping.repetition must be among ngram, max_penalty"),
        (["algorithm.selection=top_k"], "algorithm.selection_options must set k"),
        (["algorithm.group_filter=zero"], "algorithm.group_filter must be one of zero_std, mean_bounds"),
        (
            ["algorithm.turn_credit=discounted", "algorithm.turn_credit_options.gamma=5"],
            "algorithm.turn_credit_options of discounted: gamma must be in [0, 1], got 5",
        ),
        (
            ["algorithm.turn_credit=turn_mixed", "algorithm.turn_credit_options.gamma=0.5"],
            "algorithm.turn_credit_options must be among weight, scale, ddof, eps for turn_mixed, got gamma",
        ),
        (
            ["algorithm.turn_credit_options.gamma=0.5"],
            "algorithm.turn_credit_options={'gamma': 0.5} needs algorithm.turn_credit = discounted, turn_mixed",
        ),
        (
            [
                "algorithm.turn_credit=anchor_state",
                "algorithm.turn_credit_options.scale=none",
                "algorithm.turn_credit_options.eps=0.1",
            ],
            "algorithm.turn_credit_options.eps=0.1 needs algorithm.turn_credit_options.scale=std for anchor_state",
        ),
        (
            ["algorithm.turn_credit=discounted", "algorithm.selection=top_k", "algorithm.selection_options.k=2"],
            "algorithm.turn_credit=discounted needs algorithm.selection = null, got algorithm.selection=top_k",
        ),
        (
            ["algorithm.turn_credit=discounted", "algorithm.advantage=role_ema"],
            "algorithm.turn_credit=discounted needs algorithm.advantage = group_zscore, group_center, leave_one_out",
        ),
        (
            ["algorithm.advantage=passk", "algorithm.advantage_options.k=8"],
            "algorithm.advantage_options.k=8 needs group_size >= 9 for passk, got group_size=8",
        ),
        (
            ["algorithm.selection=top_k", "algorithm.selection_options.k=9"],
            "algorithm.selection_options.k must be <= group_size=8, got 9",
        ),
    ],
)
def test_functions_and_their_options_are_checked_before_the_run(overrides: Sequence[str], part: str) -> None:
    assert part in refusal(*overrides)


def test_one_completion_is_enough_for_an_advantage_without_a_group_baseline() -> None:
    assert composed("group_size=1", "algorithm.advantage=reinforce_plus_plus").group_size == 1


def test_a_missing_extra_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.config.checks.find_spec", lambda package: None)
    assert refusal("optimizer=adamw8bit") == (
        "optimizer.name=adamw8bit needs bitsandbytes: pip install 'covey[quantization]'"
    )
    assert refusal("output.trackers=[wandb]") == "output.trackers=[wandb] needs wandb: pip install 'covey[wandb]'"


@pytest.mark.parametrize("text", ODD_TEXT)
def test_text_that_looks_like_something_else_is_read_back_as_it_was(text: str) -> None:
    config = Config(output=OutputConfig(wandb_project=text))
    written = OmegaConf.create(settings.to_yaml(config))
    assert OmegaConf.to_container(written)["output"]["wandb_project"] == text


@pytest.mark.parametrize("recipe", ["arithmetic", "machines", "infill_nano", "tldr_nano", "machines_clamped"])
def test_settings_are_written_as_omegaconf_writes_them(recipe: str) -> None:
    config = composed(f"recipe={recipe}")
    assert settings.to_yaml(config) == OmegaConf.to_yaml(OmegaConf.structured(config))


def test_a_whole_number_is_converted_to_the_fields_type() -> None:
    config = Config(optimizer=OptimizerConfig(lr=1, betas=[0, 0.9]), model=ModelConfig(name=Path("here")))  # type: ignore[arg-type]
    written = OmegaConf.create(settings.to_yaml(config))
    assert [repr(written.optimizer.lr), repr(written.optimizer.betas), written.model.name] == [
        "1.0",
        "[0.0, 0.9]",
        "here",
    ]
