"""What a plan says: memory by the one model, seconds that follow from the work, the cheapest change, dated prices."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.algorithm.intervals import Estimate
from covey.cli.main import main
from covey.config.budget import resolve_budget
from covey.config.schema import Config
from covey.config.validate import validate
from covey.engine.native.cache import budget
from covey.policy.models.nano import nano_tokenizer
from covey.policy.settings import ModelConfig
from covey.rollouts.settings import GroupSizeStep
from covey.run.given import RunObjects
from covey.run.memory.estimate import workload
from covey.run.memory.memory_model import memory_of
from covey.run.memory.model_shapes import Shape
from covey_report.logs.read import RunFiles
from covey_report.page.content import planned
from covey_report.plan.command import lines_of, read_flags
from covey_report.plan.hardware import GPUS, Hardware, named
from covey_report.plan.kept import against, keep_plan, kept_plan
from covey_report.plan.known import prompt_tokens_of
from covey_report.plan.plan import Measured, bottleneck, bounded, changes, memory_on, plan_of, work_of
from covey_report.plan.probe import Watch, compared, probe
from covey_report.plan.seconds import PHASES, active_weights, step_seconds
from covey_report.plan.settings import shape_for
from covey_tasks.games.settings import GuessConfig

from ...support.small import changed

H100 = GPUS["h100"]


def config_of(**changes: Any) -> Config:
    config = Config(num_steps=200, groups_per_step=64)
    config.model = ModelConfig(name="Qwen/Qwen2.5-0.5B", precision="bfloat16")
    config.sampling.max_tokens = 512
    config.model.gradient_checkpointing = False
    return changed(config, {name.replace("__", "."): value for name, value in changes.items()})


@pytest.fixture(scope="module", name="small")
def _small() -> Shape:
    return shape_for(ModelConfig(name="Qwen/Qwen2.5-0.5B"))


def seconds(config: Config, shape: Shape, length: float = 200, on: Hardware = H100) -> dict[str, float]:
    return step_seconds(shape, workload(config, 1), work_of(config, 1, 100, length), on)


# ------------------------------------------------------------------------------------------------ memory


def test_an_unbounded_cache_takes_the_engines_default_on_a_cpu(small: Shape) -> None:
    cpu = Hardware("a CPU", 24e9, 1e11, 2e10, is_gpu=False)
    config = config_of(engine__max_rows=512)
    load = bounded(workload(config, 1), small, cpu)
    assert load.cache_bytes == budget(None, torch.device("cpu"))
    given = bounded(workload(config_of(engine__cache_bytes=12345), 1), small, cpu)
    assert given.cache_bytes == 12345


def test_a_conversation_has_the_answers_of_all_its_turns(small: Shape) -> None:
    words = {"groups_per_step": 2, "group_size": 4, "sampling__max_tokens": 100, "micro_batch_tokens": 8192}
    plain, talk = config_of(**words), config_of(**words)
    talk.environment = GuessConfig(max_turns=4)
    assert (workload(plain, 1).num_cached, workload(talk, 1).num_cached) == (800, 3200)
    talk.environment.max_context = 250
    assert workload(talk, 1).num_cached == 2000
    talk.environment.max_context = None
    known = Measured(prompt_tokens=50)
    once, turns = (plan_of(config, small, H100, 1, known) for config in (plain, talk))
    assert turns.memory["training"] > 2 * once.memory["training"]  # of a step, which is less than a micro-batch
    assert turns.step.value > once.step.value
    assert turns.phases["backward"] > 1.5 * once.phases["backward"]


def test_prompts_that_are_not_shared_are_there_for_each_answer(small: Shape) -> None:
    words = {"groups_per_step": 2, "group_size": 8, "sampling__max_tokens": 10, "micro_batch_tokens": 16384}
    known = Measured(prompt_tokens=500)
    shared, apart = (plan_of(config_of(**words, packing=name), small, H100, 1, known) for name in ("shared", "packed"))
    assert apart.memory["training"] > 2 * shared.memory["training"]
    assert apart.phases["backward"] > 2 * shared.phases["backward"]


def test_weights_of_models_are_counted_exactly() -> None:
    assert shape_for(ModelConfig(name="Qwen/Qwen3-0.6B")).weights == 596_049_920
    assert shape_for(ModelConfig(name="Qwen/Qwen2.5-0.5B")).weights == 494_032_768


def test_any_configuration_in_a_folder_is_enough(tmp_path: Path) -> None:
    sizes = {
        **{"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000, "num_experts": 8, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 48, "intermediate_size": 96, "tie_word_embeddings": True},
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    shape = shape_for(ModelConfig(name=str(tmp_path)))
    # A token goes through two of eight experts
    attention = 2 * (64 * 4 * 32 * 2 + 64 * 2 * 32 * 2)
    assert active_weights(shape) == attention + 2 * 2 * 3 * 64 * 48 + 64 * 1000


def test_an_unknown_model_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"name a folder with its config\.json"):
        shape_for(ModelConfig(name="nobody/knows-this"))


def test_planned_memory_is_the_memory_models_plus_process_or_gpu_overhead(small: Shape) -> None:
    load = replace(workload(config_of(), 1), cache_bytes=1 << 30)
    parts, own = memory_on(small, load, H100), memory_of(small, load)
    assert {name: parts[name] for name in own if name != "in_all"} == {n: v for n, v in own.items() if n != "in_all"}
    assert parts["in_all"] == own["in_all"] + parts["context"] + parts["fragments"]
    around = {"process": 420_000_000, "fragments": own["in_all"] // 10}
    in_all = own["in_all"] + sum(around.values())
    assert memory_on(small, load, replace(H100, is_gpu=False)) == {**own, **around, "in_all": in_all}


@pytest.mark.parametrize(
    ("changes", "gpu", "expected"),
    [
        ({}, "h100", ()),
        ({}, "rtx4090", ("micro_batch_tokens=1024",)),
        ({"model__name": "Qwen/Qwen2.5-7B", "model__lora_rank": 32}, "h100", ("micro_batch_tokens=1024",)),
        ({"model__name": "Qwen/Qwen2.5-7B", "groups_per_step": 8}, "l40s", ("model.lora_rank=32",)),
        ({"model__name": "Qwen/Qwen2.5-3B"}, "l40s", ("micro_batch_tokens=1024", "optimizer=adamw8bit")),
    ],
)
def test_the_cheapest_change_that_makes_it_fit_is_named(
    changes: dict[str, Any], gpu: str, expected: tuple[str, ...]
) -> None:
    config = config_of(**changes)
    plan = plan_of(config, shape_for(config.model), GPUS[gpu], 1, Measured())
    assert plan.fits == (not expected)
    assert set(expected) <= set(plan.change)
    assert len(plan.change) <= 3


def test_no_change_is_named_that_is_not_needed() -> None:
    config = config_of(model__name="Qwen/Qwen2.5-7B")
    shape = shape_for(config.model)
    found, _ = changes(config, shape, GPUS["rtx4090"], 1)
    assert "model.lora_rank=32" in found or "model.load_in_4bit=true" in found
    assert "optimizer=adamw8bit" not in found


def test_advice_names_no_micro_batch_above_a_step_and_nothing_if_it_fits(small: Shape) -> None:
    """One group of 8 answers of 128 tokens fills no micro-batch of 16384."""
    config = config_of(groups_per_step=1, group_size=8, sampling__max_tokens=128)
    assert changes(config, small, replace(H100, memory=15e9), 1) == ((), ())
    found, _ = changes(config, small, replace(H100, memory=10e9), 1)
    assert found == ("model.gradient_checkpointing=true", "optimizer=adamw8bit")


def test_what_fits_on_no_gpu_alone_is_sharded() -> None:
    config = config_of(model__name="meta-llama/Llama-3.3-70B-Instruct")
    found, _ = changes(config, shape_for(config.model), replace(H100, memory=30e9), 1)
    assert found[0].startswith("parallel.strategy=fsdp on ") or found[0] == "no change"


def test_what_keeps_the_update_is_named_before_what_changes_it(small: Shape) -> None:
    eight = config_of(model__name="Qwen/Qwen2.5-1.5B", model__precision="float32")
    shape, narrow = shape_for(eight.model), replace(H100, memory=22e9)
    assert changes(eight, shape, narrow, 8)[0][0] == "parallel.strategy=fsdp"
    alone, same = changes(eight, shape, narrow, 1)
    assert not alone[-1].startswith("parallel")
    assert same[0] == "parallel.strategy=fsdp on 2 GPUs"
    seventy = config_of(model__name="Qwen/Qwen2.5-72B-Instruct")
    _, none = changes(seventy, shape_for(seventy.model), H100, 64)
    assert none[0].startswith("nothing, as sampling takes 135.4 GiB of each of 64 GPUs, for the weights that sample")


@pytest.mark.parametrize(
    ("typed", "memory"), [("H100", 80e9), ("RTX 3080", 10e9), ("10 GB", 10e9), ("16gib", 2.0**34), ("24", 24e9)]
)
def test_a_gpu_is_named_in_any_spelling_or_by_its_size(typed: str, memory: float) -> None:
    assert named(typed).memory == memory


def test_a_plan_says_how_many_weights_are_trained(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "recipe=gsm8k", "data.path=x", "--on", "10 GB", "--prompt-tokens", "64"]
    assert main([*words, "model.name=Qwen/Qwen2.5-1.5B"]) == 0
    assert "1,543,714,304 weights, all trained" in capsys.readouterr().out
    assert main([*words, "model.name=Qwen/Qwen2.5-1.5B", "model.lora_rank=16"]) == 0
    printed = capsys.readouterr().out
    assert "1,543,714,304 weights, all frozen; adapters of rank 16 are trained, 18,464,768 weights" in printed
    assert "a GPU of 10 GB, as fast as RTX 3080 10 GB" in printed


# ------------------------------------------------------------------------------------------------ time and cost


def test_the_longest_answer_decides_not_how_many_there_are(small: Shape) -> None:
    base = seconds(config_of(), small)["sampling"]
    assert seconds(config_of(groups_per_step=128), small)["sampling"] < 1.4 * base
    longer = config_of(sampling__max_tokens=1024)
    assert seconds(longer, small, length=400)["sampling"] > 1.8 * base


def test_training_follows_tokens_and_products(small: Shape) -> None:
    base = seconds(config_of(), small)["backward"]
    assert seconds(config_of(groups_per_step=128), small)["backward"] == pytest.approx(2 * base, rel=0.15)
    assert seconds(config_of(updates_per_batch=4), small)["backward"] == pytest.approx(4 * base)
    again = seconds(config_of(model__gradient_checkpointing=True), small)["backward"]
    assert 1.2 * base < again < 1.4 * base
    assert seconds(config_of(model__lora_rank=8), small)["backward"] < base


def test_passes_without_a_gradient_are_counted_only_where_something_reads_them(small: Shape) -> None:
    assert seconds(config_of(), small)["logprobs"] == 0.0
    assert seconds(config_of(algorithm__kl_coef=0.1), small)["logprobs"] > 0
    assert seconds(config_of(updates_per_batch=2), small)["logprobs"] > 0


def test_a_published_step_lies_within_the_interval() -> None:
    """Llama-3.1-8B on 16 H100, 2,048 answers of 1,060 tokens, at most 4,096: 97.7 s on-policy (NeMo RL v0.4)."""
    config = config_of(
        model__name="meta-llama/Llama-3.1-8B", groups_per_step=128, group_size=16, sampling__max_tokens=4096
    )
    plan = plan_of(config, shape_for(config.model), H100, 16, Measured(completion_tokens=1060))
    assert 0.65 * 97.7 < plan.step.value < 1.35 * 97.7
    assert plan.step.low < plan.step.value < plan.step.high


def test_samplers_of_their_own_hide_behind_training_where_staleness_allows(small: Shape) -> None:
    apart = config_of(source="ray", max_staleness=1, devices__sampler=2)
    here = plan_of(config_of(), small, H100, 1, Measured())
    beside = plan_of(apart, small, H100, 1, Measured())
    assert beside.num_gpus == 3
    assert beside.phases["sampling"] < here.phases["sampling"]
    fresh = plan_of(replace(apart, max_staleness=0), small, H100, 1, Measured())
    assert fresh.phases["sampling"] > beside.phases["sampling"]  # they wait for the weights


def test_hours_hold_steps_evaluations_the_cold_start_and_loading(small: Shape) -> None:
    evaluated = {"evaluation__every": 5, "evaluation__num_prompts": 64, "evaluation__num_samples": 7}
    config = config_of(num_steps=10, group_size=8, **evaluated)  # three evaluations of as many answers as a step
    plan = plan_of(config, small, H100, 1, Measured())
    answering = plan.phases["sampling"] + plan.phases["reward"]
    assert 3600 * plan.hours.value == pytest.approx(10 * plan.step.value + 3 * answering + 30)
    warmed = plan_of(changed(config, {"cold_start.enabled": True}), small, H100, 1, Measured())
    assert warmed.hours.value > plan.hours.value


def test_cost_is_gpus_times_hours_times_price_and_a_given_price_counts(small: Shape) -> None:
    plan = plan_of(config_of(), small, H100.with_price(2.0), 4, Measured(completion_tokens=100))
    assert plan.cost is not None
    assert plan.cost.low == pytest.approx(4 * plan.hours.low * 2.0)
    assert plan.cost.value == pytest.approx(1.4 * 4 * plan.hours.value * 2.0)
    dear = plan_of(config_of(), small, replace(H100, price=(1.0, 4.0)), 4, Measured(completion_tokens=100))
    assert dear.cost is not None
    assert dear.cost.high == pytest.approx(1.4 * 4 * dear.hours.high * 4.0)
    assert "as given" in "\n".join(lines_of(plan))


def test_times_of_a_plan_say_what_they_count(small: Shape) -> None:
    plan = plan_of(config_of(num_steps=20), small, H100, 1, Measured(completion_tokens=100))
    plan = replace(plan, step=Estimate(250.0, 2.5, 2500.0), hours=Estimate(0.75, 0.01, 30.5))
    lines = lines_of(plan)
    assert "a step      250 s (2.5 s to 2,500 s): " in lines[3]
    assert lines[4] == "  the run     0:45:00 (0:00:36 to 30:30:00), h:m:s"


def test_weights_in_few_bits_are_named_with_the_adapters_that_they_need() -> None:
    config = config_of(model__name="Qwen/Qwen2.5-7B", groups_per_step=8)
    found, _ = changes(config, shape_for(config.model), replace(H100, memory=14e9), 1)
    assert found[-1].startswith("model.load_in_")
    assert "model.lora_rank=32" in found


def test_a_cold_start_of_all_weights_takes_longer_than_one_of_adapters(small: Shape) -> None:
    def hours(all_weights: bool) -> float:
        start = {"cold_start__enabled": True, "cold_start__num_steps": 1000, "cold_start__all_weights": all_weights}
        return plan_of(config_of(model__lora_rank=8, **start), small, H100, 1, Measured()).hours.value

    assert hours(True) > 1.05 * hours(False)


def test_every_price_of_a_gpu_has_its_date() -> None:
    for gpu in (gpu for gpu in GPUS.values() if gpu.price is not None):
        assert gpu.price is not None
        assert gpu.price[0] < gpu.price[1]
        assert gpu.source.endswith("2026")


def test_factors_of_a_probe_correct_each_phase(small: Shape) -> None:
    plain, factors = seconds(config_of(), small), {"sampling": 2.0, "backward": 0.5}
    work = work_of(config_of(), 1, 100, 200)
    found = step_seconds(small, workload(config_of(), 1), work, H100, factors)
    assert found["sampling"] == pytest.approx(2 * plain["sampling"])
    assert found["backward"] == pytest.approx(plain["backward"] / 2)
    assert found["other"] == plain["other"]


def test_a_probe_returns_what_its_steps_took(small: Shape) -> None:
    config, watch = config_of(), Watch(lambda: 0.0)
    watch.phases = [
        {"sampling": 1.0, "backward": 1.0},
        {"sampling": 3.0, "backward": 2.0},
        {"sampling": 5.0, "backward": 3.0},
    ]
    watch.times, watch.lengths, watch.prompt_tokens = [2.0, 6.0, 10.0], [9.0, 100.0, 200.0], 50.0
    found = compared(config, small, H100, watch)
    assert (found.completion_tokens, found.prompt_tokens) == (150.0, 50.0)
    work = work_of(config, 1, 50.0, 150.0)
    again = step_seconds(small, workload(config, 1), work, H100, found.factors)
    assert again["sampling"] == pytest.approx(2.0)
    assert again["backward"] == pytest.approx(1.0)
    assert sum(again.values()) == pytest.approx(4.0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_epochs": 2.0},
        {"total_rollouts": 10**6},
        {"group_size_schedule": [GroupSizeStep(step=100, group_size=16)]},
    ],
)
def test_a_probe_makes_a_few_steps_of_a_run_of_any_length(changes: dict[str, Any], small: Shape) -> None:
    made: list[int] = []

    def train(short: Config, folder: Path, given: RunObjects) -> None:
        validate(short)
        made.append(resolve_budget(short, num_prompts=1000).num_steps)
        (watch,) = given.callbacks
        assert isinstance(watch, Watch)
        watch.phases, watch.times, watch.lengths = [{}, {}], [0.0, 1.0], [9.0, 9.0]

    probe(config_of(**changes), small, H100, train)
    assert made == [4]


# ------------------------------------------------------------------------------------------------ the command


def test_flags_are_told_from_settings_and_refused_in_one_line() -> None:
    rest, asked = read_flags(["recipe=gsm8k", "--on", "h100,here", "--gpus=4", "--price", "2.5", "--json"])
    assert rest == ["recipe=gsm8k"]
    assert (asked.on, asked.num_gpus, asked.price, asked.as_json) == (("h100", "here"), 4, 2.5, True)
    for words, line in (
        (["--on", "h1000"], "h1000"),
        (["--price", "cheap"], "--price must be a number above 0, got cheap"),
        (["--gpus"], "--gpus needs a value"),
        (["--probe", "--on", "h100"], "--probe measures this machine"),
    ):
        with pytest.raises(ValueError, match=line):
            read_flags(words)


@pytest.mark.long
def test_the_command_prints_a_plan_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model.name=Qwen/Qwen3-0.6B", "environment=arithmetic", "num_steps=50"]
    assert main(["plan", *words, "--on", "h100"]) == 0
    said = capsys.readouterr().out
    assert "596,049,920 weights, all trained; 50 steps of 32 × 8 answers" in said
    for part in (
        "H100 SXM 80 GB: fits",
        "memory      weights 2.2 GiB",
        "bottleneck  ",
        "prices: mercatus-ai.com, May 2026",
    ):
        assert part in said
    assert list(tmp_path.iterdir()) == []
    assert main(["plan", *words, "--on", "h100", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["fits"]
    assert list(row["phases"]) == list(PHASES)


@pytest.mark.parametrize(
    ("given", "is_gpu", "advice"),
    [
        ({}, False, "shorter sampling.max_tokens"),
        ({"packing": "padded"}, False, "packing=shared, shorter sampling.max_tokens"),
        (
            {"model.gradient_checkpointing": None},
            True,
            "larger micro_batch_tokens, more GPUs, shorter sampling.max_tokens",
        ),
        (
            {"model.gradient_checkpointing": True},
            True,
            "larger micro_batch_tokens, more GPUs, model.gradient_checkpointing=false, shorter sampling.max_tokens",
        ),
    ],
)
def test_a_plan_advises_what_is_not_set_and_helps_there(given: dict[str, Any], is_gpu: bool, advice: str) -> None:
    said = bottleneck(changed(config_of(), given), dict.fromkeys(PHASES, 1.0) | {"backward": 3.0}, is_gpu=is_gpu)
    assert said.partition(": ")[2] == advice


def test_a_plan_that_was_kept_is_set_against_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path))
    settings = {"num_steps": 10, "model.name": "nano", "output.report": True, "seed": 0}
    assert kept_plan(settings) is None
    keep_plan(settings, {"phases": {"sampling": 2.0}, "hours": {"value": 0.01}, "source": "a probe"})
    summary = {"steps": 10, "seconds": 40.0, "phases": {"sampling": {"seconds": 30.0, "share": 0.75}}}
    found = planned(RunFiles(tmp_path, {**settings, "seed": 1, "output.report": False}, summary=summary))
    assert found == {"rows": [("sampling, s a step", 2.0, 3.0), ("whole run, s", 36.0, 40.0)], "source": "a probe"}
    assert planned(RunFiles(tmp_path, {**settings, "num_steps": 11}, summary=summary)) is None
    assert against({}, {}) == [("whole run, s", None, None)]


def test_this_machine_is_measured() -> None:
    found = named("here")
    assert found.memory > 1 << 30
    assert found.flops > 1e9
    assert found.bandwidth > 1e9


def test_a_micro_batch_is_no_larger_than_a_step() -> None:
    config = config_of(model__name="nano", groups_per_step=4, group_size=2, sampling__max_tokens=8)
    config.model.precision = "float32"
    shape, cpu = shape_for(config.model), Hardware("a CPU", 1e10, 1e11, 1e10, is_gpu=False)
    few, many, sampled_in_turns = (
        plan_of(
            replace(config, groups_per_step=count, engine=replace(config.engine, max_rows=rows)),
            shape,
            cpu,
            1,
            Measured(),
        )
        for count, rows in ((4, 256), (8, 256), (8, 4))
    )
    activations = [plan.memory["training"] + plan.memory["gradients"] for plan in (few, many)]
    assert activations[1] == pytest.approx(2 * activations[0], rel=0.05)
    assert sampled_in_turns.memory["training"] == many.memory["training"]


def test_the_plan_closes_with_the_lengths_that_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "cache"))
    words = ["plan", "recipe=ifeval", "model=qwen2.5-coder-0.5b-instruct", "--on", "h100"]
    assert main(words) == 0
    usual = "prompts of 128 tokens, a guess (--prompt-tokens), answers between a quarter and all of sampling.max_tokens"
    assert usual in capsys.readouterr().out
    assert main([*words, "--prompt-tokens", "60", "--answer-tokens", "29"]) == 0
    assert "shares; prompts of 60 tokens, answers of 29 tokens\n" in capsys.readouterr().out
    assert main([*words, "sampling.max_tokens=300", "--prompt-tokens", "60", "--answer-tokens", "900"]) == 0
    assert "shares; prompts of 60 tokens, answers of 300 tokens\n" in capsys.readouterr().out


def rows_of_two_lengths(folder: Path) -> str:
    """Write 200 rows, those of 10 characters before those of 30."""
    prompts = [f"{place:03}{'x' * (7 if place < 100 else 27)}" for place in range(200)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (folder / "planned.py").write_text("def right(completions, **columns):\n    return [0.0] * len(completions)\n")
    return str(folder / "rows.jsonl")


def test_prompts_of_a_saved_model_are_counted_on_rows_of_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    nano_tokenizer().save_pretrained(tmp_path / "saved")  # a token for each byte
    sizes = {"model_type": "llama", "vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "saved" / "config.json").write_text(json.dumps({**sizes, "num_attention_heads": 4}))
    words = ["plan", f"model.name={tmp_path}/saved", f"data.path={rows_of_two_lengths(tmp_path)}", "--on", "h100"]
    assert main([*words, "environment=reward_functions", "rewards=[planned:right]", "--json"]) == 0
    source = json.loads(capsys.readouterr().out)[0]["source"]
    counted = re.search(r"prompts of (\d+) tokens, answers", source)
    assert counted is not None, source
    assert 17 <= int(counted[1]) <= 23  # the first 64 rows have 10 each


@pytest.mark.parametrize("missing", ["model", "rows"])
def test_nothing_is_fetched_to_count_prompts(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.environments.registry.build", lambda config: pytest.fail("rows were asked for"))
    config = Config(model=ModelConfig(name="nobody/here" if missing == "model" else "nano"))
    config.data.path = "nobody/rows" if missing == "rows" else rows_of_two_lengths(tmp_path)
    assert prompt_tokens_of(config) is None


@pytest.mark.slow
def test_a_probe_of_a_real_run_is_kept_for_later_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "cache"))
    words = ["environment=arithmetic", "model=nano", "num_steps=20", "groups_per_step=8", "--on", "here"]
    assert main(["plan", *words, "--probe"]) == 0
    assert "from        a probe of 3 steps on this CPU" in capsys.readouterr().out
    assert main(["plan", *words]) == 0
    assert "from        a probe of 3 steps on this CPU" in capsys.readouterr().out
