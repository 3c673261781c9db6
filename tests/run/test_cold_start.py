"""The supervised warm-up: it learns, is kept by content, and never leaves half a policy behind."""

import json
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from covey.config.schema import Config
from covey.config.validate import validate
from covey.environments.base import Environment, Split
from covey.loop import run_train, train
from covey.policy.models.loading import load_policy
from covey.policy.settings import ModelConfig
from covey.rollouts.demonstrations import demonstration_group
from covey.run import cold_start
from covey.run.checkpoints.checkpoint import save_policy
from covey.run.checkpoints.saved_settings import settings_of
from covey.run.cold_start import ensure
from covey.system.waits.signals import Stopper, StopRequested
from covey.types import Failure, Prompt, Reward, Sampling
from tests.support.scripted import Scripted

from ..support.builders import probe_logits
from ..support.small import TOKENIZER, rows, saved_policy, small_config, start_weights, use, varied

END = str(TOKENIZER.eos_token)
SEVEN = TOKENIZER("7")["input_ids"][0]
ALWAYS_SEVEN = Scripted(
    {"train": [f"{a}{b}:" for a in "abcdef" for b in "uvwxyz"], "test": ["zz:"]},
    lambda prompt, text: float(text == "7"),
    answer=lambda text: "7",
)


def config_for(tmp_path: Path, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "cold_start__enabled": True,
        "cold_start__num_steps": 12,
        "cold_start__check_every": 4,
        "cold_start__num_check_prompts": 6,
        "cold_start__batch_size": 8,
        "cold_start__lr": 1e-2,
        "cold_start__warmup_steps": 2,
        "cold_start__cache_dir": str(tmp_path / "cache"),
    }
    return small_config(**(settings | changes))


def warmed(config: Config, environment: Any = ALWAYS_SEVEN) -> tuple[cold_start.ColdStart, list[str]]:
    said: list[str] = []
    return ensure(config, environment, said.append), said


def folders(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").iterdir())


# ------------------------------------------------------------------------------------------------ learning


def test_a_demonstration_is_learned_to_its_end_and_the_prompt_is_not() -> None:
    policy = load_policy(small_config().model, seed=0)
    prompt = Prompt("p", "scripted", "ab:", {})
    (shown,) = demonstration_group(policy, prompt, "7").rollouts
    assert shown.target_ids[-2:] == (SEVEN, TOKENIZER.eos_token_id)
    assert shown.loss_mask == (False, False, True, True)


def test_a_demonstrated_turn_ends_as_the_policy_is_to_end_it() -> None:
    """By a stop string that it ends with, else by the end of sequence; what it is told is never learnt."""
    policy = load_policy(small_config().model, seed=0)
    prompt = Prompt("p", "scripted", "ab:", {})
    shown = [
        {"role": "assistant", "content": "7;"},
        {"role": "user", "content": "so"},
        {"role": "assistant", "content": "8"},
        {"role": "user", "content": "and"},
        {"role": "assistant", "content": "9!"},
    ]

    def learnt(*stop: str) -> str:
        (rollout,) = demonstration_group(policy, prompt, shown, stop).rollouts
        ids = [t for t, own in zip(rollout.target_ids, rollout.loss_mask, strict=True) if own]
        return str(TOKENIZER.decode(ids))

    for stop in ((), (";",), (";", "!"), ("8",)):
        words = [word if word.endswith(stop) else f"{word}{END}" for word in ("7;", "8", "9!")]
        assert learnt(*stop) == "".join(words)


def test_the_end_of_a_demonstration_may_be_named_by_the_generation_config_alone() -> None:
    policy = load_policy(small_config().model, seed=0)
    policy.tokenizer.eos_token = None
    policy.causal_lm.generation_config.eos_token_id = [3, 1]
    (shown,) = demonstration_group(policy, Prompt("p", "scripted", "a:", {}), "7").rollouts
    assert shown.target_ids[-1] == 1
    policy.causal_lm.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="need a tokenizer with an eos_token, got none"):
        demonstration_group(policy, Prompt("p", "scripted", "a:", {}), "7")


@pytest.mark.long
def test_it_learns_what_is_demonstrated_and_says_how_far_it_is(tmp_path: Path) -> None:
    start, said = warmed(config_for(tmp_path, cold_start__num_steps=40))
    assert start.accuracy == 1.0
    assert not start.cached
    before, *looks = said
    assert before.startswith("cold start: up to 40 steps on demonstrations first, kept for later runs in /")
    assert len(looks) == 10
    assert looks[0].startswith("cold start 4/40  loss ")
    assert looks[-1].endswith("greedy accuracy 100.0%")
    assert float(looks[-1].split()[4]) < float(looks[0].split()[4]) / 2


def test_it_does_not_warn_of_log_probs_that_no_engine_sampled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warmed(config_for(tmp_path))
    assert "sampler and trainer" not in caplog.text


def test_it_stops_at_the_target_accuracy(tmp_path: Path) -> None:
    start, said = warmed(config_for(tmp_path, cold_start__num_steps=400, cold_start__target_accuracy=0.9))
    assert start.accuracy >= 0.9
    assert start.num_steps < 100
    assert start.num_steps % 4 == 0, "it looks after every 4 steps"
    assert said[-1].startswith(f"cold start {start.num_steps}/400")


def test_it_is_measured_on_demonstrations_it_was_not_shown(tmp_path: Path) -> None:
    scored: set[str] = set()

    def verdict(prompt: Prompt, text: str) -> float:
        scored.add(prompt.id)
        return 0.0

    shown: set[str] = set()
    environment = replace(ALWAYS_SEVEN, verdict=verdict)

    def watched(policy: Any, prompt: Prompt, text: str, *more: Any) -> Any:
        shown.add(prompt.id)
        return demonstration_group(policy, prompt, text, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cold_start, "demonstration_group", watched)
        warmed(config_for(tmp_path), environment)
    assert len(scored) == 6
    assert len(shown) == 30
    assert not scored & shown
    assert all(name.startswith("train-") for name in scored)


def test_a_reward_at_the_bound_is_right() -> None:
    groups = [SimpleNamespace(rewards=[reward], rollouts=[0], failures=()) for reward in (0.5, 0.49, 0.0, 1.0)]
    source: Any = SimpleNamespace(run=lambda prompts, count, sampling: groups)
    prompts = [Prompt(str(number), "scripted", "", {}) for number in range(4)]
    assert cold_start._accuracy(source, prompts, Sampling(), 0.5) == 0.5


# ------------------------------------------------------------------------------------------------ the cache


def test_a_second_call_takes_the_policy_from_the_cache(tmp_path: Path) -> None:
    first, _ = warmed(config_for(tmp_path))
    again, said = warmed(config_for(tmp_path))
    assert said == []
    assert again == replace(first, cached=True)
    assert again.summary_line.startswith("12 supervised steps, greedy accuracy ")
    assert "taken from the cache" in again.summary_line
    assert folders(tmp_path) == [first.path.name]


def test_the_report_describes_the_policys_cold_start(tmp_path: Path) -> None:
    start, _ = warmed(config_for(tmp_path))
    report = json.loads((start.path / "cold_start.json").read_text())
    assert report == {"num_steps": 12, "accuracy": start.accuracy}


def test_the_cold_started_policy_loads_by_path_and_differs_from_the_start(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    start, _ = warmed(config)
    loaded = load_policy(replace(config.model, name=str(start.path)), seed=0)
    before = start_weights(config)
    assert loaded.tokenizer.decode([SEVEN]) == "7"
    assert all(not torch.equal(w, before[name]) for name, w in loaded.model.state_dict().items())


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"cold_start__lr": 2e-2},
        {"cold_start__num_steps": 8},
        {"model__nano_num_layers": 2},
        {"sampling__max_tokens": 5},
        {"sampling__stop": ["x"]},
        {"evaluation__correct_above": 0.5},
    ],
)
def test_a_setting_the_policy_depends_on_makes_another_one(tmp_path: Path, change: dict[str, Any]) -> None:
    first, _ = warmed(config_for(tmp_path))
    second, said = warmed(config_for(tmp_path, **change))
    assert said != []
    assert second.path != first.path


@pytest.mark.parametrize(
    "change", [{"num_steps": 9}, {"model__lora_rank": 2}, {"optimizer__lr": 1e-4}, {"cold_start__enabled": False}]
)
def test_a_setting_it_does_not_depend_on_takes_the_same_policy(tmp_path: Path, change: dict[str, Any]) -> None:
    first, _ = warmed(config_for(tmp_path))
    second, said = warmed(config_for(tmp_path, **change))
    assert (said, second.path) == ([], first.path)


def test_a_policy_depends_on_the_room_that_its_answers_have(tmp_path: Path) -> None:
    def key(**changes: Any) -> str:
        return cold_start._key(config_for(tmp_path, **changes), ALWAYS_SEVEN, ALWAYS_SEVEN.demonstrations("train"))

    assert key(sampling__max_total_tokens=20) != key(sampling__max_total_tokens=21) != key() == key(num_steps=9)


def test_a_policy_depends_on_answers_tools_files_and_the_bound_of_a_right_one(tmp_path: Path) -> None:
    def key(environment: Any = ALWAYS_SEVEN, **changes: Any) -> str:
        return cold_start._key(config_for(tmp_path, **changes), environment, environment.demonstrations("train"))

    class Tooled(Scripted):
        def tool_schemas(self, prompt: Prompt) -> list[dict[str, Any]]:
            return [{"name": "multiply"}]

    tooled = Tooled(ALWAYS_SEVEN.texts, ALWAYS_SEVEN.verdict, ALWAYS_SEVEN.answer)
    model = tmp_path / "model"
    model.mkdir()
    found = {key(), key(replace(ALWAYS_SEVEN, answer=lambda text: "8")), key(tooled)}
    found |= {key(evaluation__correct_above=0.25), key(evaluation__correct_above=0.75), key(model__name=str(model))}
    for content in (b"1", b"22"):
        (model / "model.safetensors").write_bytes(content)
        found.add(key(model__name=str(model)))
    assert len(found) == 8


def test_its_accuracy_is_greedy_with_the_room_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sampling] = []
    monkeypatch.setattr(cold_start, "_accuracy", lambda source, prompts, sampling, bound: asked.append(sampling) or 0.0)
    warmed(config_for(tmp_path, cold_start__num_steps=1, sampling__max_tokens=3, sampling__stop=["x"]))
    assert asked == [Sampling(temperature=0.0, max_tokens=3, stop=("x",))]


def test_each_process_trains_on_its_share_of_the_demonstrations(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config()
    policy = load_policy(config.model, seed=0)
    groups = [demonstration_group(policy, Prompt(name, "scripted", "ab:", {}), "7") for name in "abcde"]
    monkeypatch.setattr(cold_start.collectives, "world_size", lambda: 2)
    for rank, own in enumerate((["a", "c", "e"], ["b", "d"])):
        monkeypatch.setattr(cold_start.collectives, "rank", lambda rank=rank: rank)
        batch = cold_start._batch(groups, config, policy)
        assert [name for part in batch.micro_batches for name in part.prompt_ids] == own
        assert (batch.num_loss_tokens, batch.num_sequences) == (10, 5)


@pytest.mark.long
def test_other_demonstrations_make_another_policy(tmp_path: Path) -> None:
    first, _ = warmed(config_for(tmp_path))
    second, _ = warmed(config_for(tmp_path), replace(ALWAYS_SEVEN, answer=lambda text: "8"))
    assert second.path != first.path


@pytest.mark.long
def test_another_model_at_the_same_path_makes_another_policy(tmp_path: Path) -> None:
    start, _ = warmed(config_for(tmp_path))
    local = config_for(tmp_path, model__name=str(start.path))
    first, _ = warmed(local)
    os.utime(start.path / "model.safetensors", ns=(1, 1))
    second, said = warmed(local)
    assert said != []
    assert len({start.path, first.path, second.path}) == 3


# ------------------------------------------------------------------------------------------------ adapters


def adapted_config(tmp_path: Path, **changes: Any) -> Config:
    """A run that trains adapters over saved weights."""
    base = tmp_path / "model"
    if not base.is_dir():
        save_policy(load_policy(small_config().model, seed=3), base)
    usual = ModelConfig()
    named = {f"model__{name}": value for name, value in vars(usual).items() if name.startswith("nano_")}
    lora = {"model__name": str(base), "model__lora_rank": 2, "model__lora_alpha": 16.0}
    return config_for(tmp_path, **(named | lora | {"preflight__enabled": False} | changes))


@pytest.mark.long
def test_a_lora_run_cold_starts_its_adapters_and_leaves_the_base(tmp_path: Path) -> None:
    config = adapted_config(tmp_path, cold_start__num_steps=60, model__lora_rank=8)
    start, said = warmed(config)
    assert float(said[-1].split()[4]) < 0.85 * float(said[1].split()[4])
    assert sorted(path.name for path in start.path.glob("*.safetensors")) == ["adapter_model.safetensors"]
    policy = load_policy(replace(config.model, name=str(start.path)), seed=0)
    base = load_policy(replace(config.model, lora_rank=0), seed=0)
    with policy.model.disable_adapter():  # type: ignore[operator]
        assert torch.equal(probe_logits(policy), probe_logits(base))
    assert not torch.equal(probe_logits(policy), probe_logits(base))
    again, said = warmed(config)
    assert (again.cached, said) == (True, [])


@pytest.mark.long
def test_a_cold_start_trains_all_weights_on_request_or_from_scratch(tmp_path: Path) -> None:
    whole, _ = warmed(adapted_config(tmp_path, cold_start__all_weights=True))
    embedded, _ = warmed(config_for(tmp_path, model__lora_rank=2))
    adapters, _ = warmed(adapted_config(tmp_path))
    assert [(start.path / "model.safetensors").is_file() for start in (whole, embedded, adapters)] == [
        True,
        True,
        False,
    ]
    assert len({whole.path, adapters.path}) == 2


def test_all_weights_need_adapters_that_they_are_to_come_before() -> None:
    with pytest.raises(ValueError, match=r"^cold_start.all_weights=true needs model.lora_rank > 0"):
        validate(small_config(cold_start__enabled=True, cold_start__all_weights=True))


@pytest.mark.long
def test_a_run_trains_the_cold_started_adapters_with_that_policy_as_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, replace(ALWAYS_SEVEN, verdict=varied))
    config = adapted_config(tmp_path, algorithm__kl_coef=0.1, num_steps=2, output__save_every=1)
    train(config, tmp_path / "run")
    start, said = warmed(config, replace(ALWAYS_SEVEN, verdict=varied))
    assert said == []
    kl = [row["kl"] for row in rows(tmp_path / "run" / "metrics.jsonl", "train")]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    begun, trained = load_file(start.path / "adapter_model.safetensors"), saved_policy(tmp_path / "run")
    assert begun.keys() == trained.keys()
    moved = max(float((trained[name] - begun[name]).abs().max()) for name in begun)
    assert 0 < moved < 0.1
    assert json.loads((tmp_path / "run/checkpoints/step-000002/policy/adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(tmp_path / "model")


@pytest.mark.long
def test_a_run_after_a_warm_up_of_adapters_resumes_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, replace(ALWAYS_SEVEN, verdict=varied))
    config = adapted_config(tmp_path, algorithm__kl_coef=0.1, num_steps=4, output__save_every=2)
    train(config, tmp_path / "whole")
    train(replace(config, num_steps=2), tmp_path / "begun")
    changes = {"resume": str(tmp_path / "begun"), "resume_changes": ["num_steps"]}
    train(replace(config, **changes), tmp_path / "begun", exact=False)
    whole, resumed = saved_policy(tmp_path / "whole"), saved_policy(tmp_path / "begun")
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


# ------------------------------------------------------------------------------------------------ interruptions


@pytest.mark.long
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_resumed_run_keeps_its_cold_start_despite_changed_settings(
    lora_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy hardly moves, and so stays the reference unless that is another one."""
    use(monkeypatch, ALWAYS_SEVEN)
    settings = {"preflight__enabled": False, "model__lora_rank": lora_rank, "algorithm__kl_coef": 0.1}
    settings |= {"optimizer__lr": 1e-12, "cold_start__num_steps": 2}
    train(config_for(tmp_path, num_steps=1, **settings), tmp_path / "run")
    (made,) = folders(tmp_path)
    more = settings | {"resume": "run", "resume_changes": ["num_steps", "sampling"], "sampling__max_tokens": 5}
    train(config_for(tmp_path, num_steps=2, **more), tmp_path / "run")
    assert folders(tmp_path) == [made]
    assert abs(rows(tmp_path / "run" / "metrics.jsonl", "train")[1]["kl"]) < 1e-9
    # Without the cache
    (tmp_path / "cache").rename(tmp_path / "gone")
    if lora_rank:
        train(config_for(tmp_path, num_steps=3, **more), tmp_path / "run")
        assert not (tmp_path / "cache").exists()
        assert abs(rows(tmp_path / "run" / "metrics.jsonl", "train")[2]["kl"]) < 1e-9
    else:
        with pytest.raises(ValueError, match=rf"^the reference of this run was {made}, .* make it cold-start-"):
            train(config_for(tmp_path, num_steps=3, **more), tmp_path / "run")


@pytest.mark.long
def test_settings_of_a_cold_start_cannot_change_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ALWAYS_SEVEN)
    train(config_for(tmp_path, preflight__enabled=False, cold_start__num_steps=2), tmp_path / "run")
    typed = ["cold_start.num_steps=9", "resume_changes=[cold_start.num_steps]"]
    with pytest.raises(ValueError, match=r"^cold_start\.num_steps=9 cannot change a run, which began with .*=2$"):
        settings_of(tmp_path / "run", typed)


def test_ranks_stop_a_cold_start_together_at_the_next_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once it is done, when whoever sent the signal has killed them."""
    use(monkeypatch, ALWAYS_SEVEN)
    votes = [0, signal.SIGTERM]
    with pytest.raises(StopRequested):
        run_train(config_for(tmp_path), tmp_path, Stopper(together=lambda asked: votes.pop(0)))
    assert not (tmp_path / "cache").exists() or folders(tmp_path) == []
    assert votes == []


@pytest.mark.long
def test_a_maker_that_dies_while_it_saves_leaves_no_half_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(policy: Any, folder: Path, weights: object) -> None:
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(cold_start, "save_policy", dies)
    with pytest.raises(KeyboardInterrupt):
        warmed(config_for(tmp_path))
    assert folders(tmp_path) == []
    monkeypatch.undo()
    start, said = warmed(config_for(tmp_path))
    assert said != []
    assert folders(tmp_path) == [start.path.name]


@pytest.mark.long
def test_a_folder_that_a_killed_maker_left_is_not_taken_for_a_policy(tmp_path: Path) -> None:
    """Killed between two files of its temporary folder: the name that is looked for does not exist yet."""
    start, _ = warmed(config_for(tmp_path))
    start.path.rename(start.path.with_name(f"{start.path.name}.tmp-1"))
    (start.path.with_name(f"{start.path.name}.tmp-1") / "cold_start.json").unlink()
    again, said = warmed(config_for(tmp_path))
    assert said != []
    assert not again.cached


@pytest.mark.long
def test_day_old_remains_of_killed_cold_starts_are_removed_newer_ones_stay(tmp_path: Path) -> None:
    for name, age in (("cold-start-0.tmp-old", 90_000), ("cold-start-0.tmp-young", 80_000), ("mine.tmp-old", 90_000)):
        (tmp_path / "cache" / name / "cold-start-0").mkdir(parents=True)
        os.utime(tmp_path / "cache" / name, (time.time() - age,) * 2)
    start, _ = warmed(config_for(tmp_path))
    assert folders(tmp_path) == sorted([start.path.name, "cold-start-0.tmp-young", "mine.tmp-old"])


@pytest.mark.long
def test_makers_of_the_same_policy_do_not_disturb_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: warmed(config_for(tmp_path))[0], range(2))
    assert first.path == second.path
    assert folders(tmp_path) == [first.path.name]
    config = config_for(tmp_path, model__name=str(first.path))
    assert load_policy(config.model, seed=0).tokenizer.decode([SEVEN]) == "7"


# ------------------------------------------------------------------------------------------------ mistakes


@dataclass(frozen=True)
class Silent(Environment):
    """An environment without demonstrations."""

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt("p", "silent", "?", {})]

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return [Reward(0.0, {}) for _ in completions]


def test_an_environment_without_demonstrations_is_one_line(tmp_path: Path) -> None:
    line = r"^cold_start.enabled=true needs an environment with demonstrations \(.*\), got environment=arithmetic$"
    with pytest.raises(ValueError, match=line):
        warmed(config_for(tmp_path), Silent())


@pytest.mark.parametrize(("count", "held_back"), [(35, 35), (36, 18), (256, 18)])
def test_half_of_few_demonstrations_is_held_out(count: int, held_back: int) -> None:
    demonstrations = [(Prompt(str(number), "arithmetic", "", {}), "") for number in range(36)]
    validated_on, trained_on = cold_start._hold_back(demonstrations, count, 0)
    assert (len(validated_on), len(trained_on)) == (held_back, 36 - held_back)
    assert sorted(prompt.id for prompt, _ in validated_on + trained_on) == sorted(map(str, range(36)))


def test_one_demonstration_is_too_few() -> None:
    with pytest.raises(ValueError, match=r"^a cold start needs two demonstrations at least, .*, got 1$"):
        cold_start._hold_back([(Prompt("0", "arithmetic", "", {}), "")], 1, 0)


def test_the_cache_is_where_the_environment_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "mine"))
    assert Config().cold_start.cache_dir == str(tmp_path / "mine")
