"""What a setting may change: functions of a config that run the real thing, small, and return what came of it.

They run in the folder that `settings_world` has filled, and return plain containers, or tensors, which `alike`
compares.
"""

import asyncio
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import compress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.config.checks import format_value
from covey.config.schema import Config
from covey.engine.base import EngineStats
from covey.environments.base import Environment
from covey.loop import train
from covey.policy import head as heads
from covey.policy.models.loading import load_policy
from covey.rollouts.encoding import encode_prompt
from covey.rollouts.group_checks import Outcome
from covey.rollouts.stream import AdaptiveSampler
from covey.run import cold_start, stages
from covey.run.build import Run, build_environment, build_run, training_stream
from covey.run.checkpoints.resume import locked_run_folder, resume_point
from covey.run.checkpoints.saved_settings import settings_of
from covey.run.evaluate import evaluate
from covey.run.records.callbacks import Callbacks, make_callbacks
from covey.system.waits.timer import PhaseTimer
from covey.trainer.prepare import make_training_batches
from covey.types import Failure, Group, Prompt, Reward, Rollout, RunStopped, Turn
from covey_report.command import report_at_the_end

from ...support.builders import as_fills, probe_logits, rollout_of, sampled_by
from ...support.processes import children
from ...support.small import rows, timeless


def alike(first: Any, second: Any, tolerance: float = 1e-4) -> bool:
    """Whether two observations are the same; vectors up to a relative error, everything else exactly."""
    if isinstance(first, Tensor):
        return first.shape == second.shape and float((first - second).norm()) <= tolerance * float(first.norm())
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(alike(first[key], second[key], tolerance) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(alike(a, b, tolerance) for a, b in zip(first, second, strict=True))
    return bool(first == second)


@contextmanager
def built(config: Config) -> Iterator[Run]:
    run = build_run(config, build_environment(config), PhaseTimer())
    try:
        yield run
    finally:
        run.close()


@contextmanager
def environment_of(config: Config) -> Iterator[Environment]:
    environment = build_environment(config)
    try:
        yield environment
    finally:
        environment.close()


# ------------------------------------------------------------------------------------------------ training


def fixed_groups(run: Run) -> list[Group]:
    """Two groups of unequal rewards and lengths, with a truncated and an empty completion, sampled by a policy near
    this one."""
    generator = torch.Generator().manual_seed(5)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, 250, (n,), generator=generator).tolist())

    def rollout(prompt: Sequence[int], length: int, reward: float) -> Rollout:
        finish = "length" if length == 9 else "stop"
        judged = Reward(reward, {"value": reward})
        return replace(rollout_of(prompt, tokens(length)), reward=judged, finish_reason=finish)

    groups = []
    for name, lengths, rewards in (("a", (3, 9, 1, 4), (1, 0, 0, 1)), ("b", (5, 5, 2, 0), (0, 0.5, 1, 0.2))):
        prompt = tokens(6)
        made = tuple(rollout(prompt, n, reward) for n, reward in zip(lengths, rewards, strict=True))
        groups.append(Group(Prompt(name, "test", "", {}), made, ()))
    groups = groups if run.policy.mask_id is None else as_fills(groups)
    return sampled_by(run.policy, groups, run.source.sampling, noise=0.3)


def trained_weights(run: Run) -> Tensor:
    """A copy, as one vector."""
    trained = [p for p in run.policy.model.parameters() if p.requires_grad]
    return torch.cat([p.detach().flatten().double() for p in trained])


def in_turns(group: Group) -> Group:
    """The group with two turns in every rollout of several tokens, the second begun in one state; one is void."""

    def cut(rollout: Rollout, index: int) -> Rollout:
        end, half = rollout.num_loss_tokens, rollout.num_loss_tokens // 2
        turns = (Turn(0, half, 0.3 * index, f"s{index % 2}"), Turn(half, end, 0.1, "met", is_void=index == 1))
        return replace(rollout, turns=turns) if half else rollout

    return replace(group, rollouts=tuple(cut(rollout, index) for index, rollout in enumerate(group.rollouts)))


def update_by_turns(config: Config) -> Tensor:
    """The same as `update` of episodes of several turns."""
    return update(config, in_turns)


def update_on_sums(config: Config) -> Tensor:
    """The same as `update` of prompts that a teacher can read anew, with right answers."""

    def asked(group: Group) -> Group:
        prompt = Prompt(group.prompt.id, "arithmetic", "4+3=", {"answer": 7, "level": 8})
        ids = encode_prompt(load_policy(config.model, seed=config.seed).tokenizer, prompt)
        made = [rollout_of(ids, tuple(compress(r.target_ids, r.loss_mask))) for r in group.rollouts]
        pairs = zip(made, group.rollouts, strict=True)
        kept = (replace(one, reward=of.reward, text="4", finish_reason=of.finish_reason) for one, of in pairs)
        return Group(prompt, tuple(kept), ())

    return update(config, asked)


def update(config: Config, change: Callable[[Group], Group] = lambda group: group) -> Tensor:
    """How far num_steps steps on the same groups move the weights."""
    with built(config) as run:
        groups, before = [change(group) for group in fixed_groups(run)], trained_weights(run)
        for step in range(config.num_steps):
            run.trainer.step(make_training_batches(groups, run.trainer, run.credit, run.packing, step)[0], step)
        return trained_weights(run) - before


def kept_of_the_reference(config: Config) -> int:
    """How many tensors of the reference a checkpoint holds: none of one that stays as it is."""
    with built(config) as run:
        return len(run.trainer.state_dict()["reference"])


def coefficients(config: Config) -> list[float]:
    """The weights of the KL penalty and of the entropy bonus after num_steps steps."""
    with built(config) as run:
        groups = fixed_groups(run)
        for step in range(config.num_steps):
            run.trainer.step(make_training_batches(groups, run.trainer, run.credit, run.packing, step)[0], step)
        return [run.trainer.controller.coef, run.trainer.entropy.applied]


def streams(config: Config) -> bool:
    """Whether a step says how much of it was trained before its other groups were there."""
    with built(config) as run:
        (batch,), _ = make_training_batches(fixed_groups(run), run.trainer, run.credit, run.packing, 0)
        return "streamed_fraction" in run.trainer.step(batch, 0)


def work(config: Config) -> dict[str, list[Any]]:
    """What one step asks of the model: the shape of each pass, the tokens of each run of the head, runs of a layer."""
    with built(config) as run:
        (batch,), _ = make_training_batches(fixed_groups(run), run.trainer, run.credit, run.packing, 0)
        seen: dict[str, list[Any]] = {"passes": [], "head": [], "layer": []}
        inner = run.policy.causal_lm
        body: Any = inner.base_model
        body.register_forward_pre_hook(
            lambda module, given, named: seen["passes"].append(named["input_ids"].shape), with_kwargs=True
        )
        body.layers[0].mlp.register_forward_pre_hook(lambda module, given: seen["layer"].append(1))
        head: Any = inner.get_output_embeddings()  # a linear one alone is not called
        head.register_forward_pre_hook(lambda module, given: seen["head"].append(len(given[0])))
        with watched(heads, "_logits", lambda head, rows_LC, *weights: seen["head"].append(len(rows_LC))):
            run.trainer.step(batch, 0)
        return seen


@contextmanager
def watched(module: ModuleType, name: str, hears: Callable[..., None]) -> Iterator[None]:
    """`hears` is told what a function of a module is called with."""
    original = vars(module)[name]

    def told(*given: Any, **named: Any) -> Any:
        hears(*given)
        return original(*given, **named)

    setattr(module, name, told)
    try:
        yield
    finally:
        setattr(module, name, original)


def attention(config: Config) -> str:
    """What packed streams attend through."""
    with built(config) as run:
        return run.policy.attention


def steps_until_stopped(config: Config) -> int:
    """Steps of a policy that is no number."""
    with built(config) as run:
        (batch,), _ = make_training_batches(fixed_groups(run), run.trainer, run.credit, run.packing, 0)
        with torch.no_grad():
            next(run.policy.model.parameters()).fill_(torch.nan)
        for step in range(100):
            try:
                run.trainer.step(batch, step)
            except RunStopped:
                return step + 1
        return 0


# ------------------------------------------------------------------------------------------------ sampling, judging


def rollouts(config: Config) -> dict[str, Any]:
    """What a step would train on, what it left out, and how far it went through the data for it."""
    with built(config) as run:
        groups = run.source.take(config.groups_per_step)
        found = [(g.prompt.id, g.prompt.text, r.input_ids, r.reward.value) for g in groups for r in g.rollouts]
        return {"rollouts": found, "drops": run.source.take_drops(), **run.source.state_dict()}


def order(config: Config) -> list[list[str]]:
    """The training prompts of forty steps, which are solved more or less well."""
    with environment_of(config) as environment:
        stream = training_stream(config, environment, environment.prompts("train"))
    found = []
    for step in range(40):
        names = [(prompt.environment, prompt.id) for prompt, _ in stream.draw(config.groups_per_step)]
        found.append([name for _, name in names])
        if isinstance(stream, AdaptiveSampler):
            stream.learn([Outcome(of, name, (sum(name.encode()) + step) % 5 / 4) for of, name in names])
    return found


def stats(config: Config) -> list[EngineStats]:
    """What the engine counted in a step."""
    found: list[EngineStats] = []
    with built(config) as run:
        engine = run.local.sampler.engine
        take_stats = engine.take_stats

        def noted() -> EngineStats:
            found.append(take_stats())
            return found[-1]

        engine.take_stats = noted  # type: ignore[method-assign]
        run.source.take(config.groups_per_step)
    return found


def rows_at_once(config: Config) -> int:
    """The most completions sampled at the same time."""
    return max(each.peak_rows for each in stats(config))


def drafts(config: Config) -> bool:
    """Whether tokens are drafted."""
    return any(each.drafted_tokens for each in stats(config))


def sampled_logprobs(config: Config) -> list[tuple[float, ...]]:
    with built(config) as run:
        return [rollout.sampler_logprobs for group in run.source.take(1) for rollout in group.rollouts]


def has_journal(config: Config) -> bool:
    """Whether a run opens a journal."""
    opened: list[Any] = []
    with (
        tempfile.TemporaryDirectory(dir=".") as made,
        watched(stages, "RolloutJournal", lambda *given: opened.append(given)),
    ):
        train(config, Path(made))
    return bool(opened)


def kernels(config: Config) -> tuple[str, str, list[str]]:
    """Return what the engine decodes through, what packed streams attend through, and the kinds of layers."""
    with built(config) as run:
        kinds = sorted({type(module).__name__ for module in run.policy.model.modules()})
        return run.source.sampler.engine.kernels, run.policy.attention, kinds


def prompts(config: Config) -> Any:
    """Of both splits; the refusal, where the rows are refused."""
    try:
        with environment_of(config) as environment:
            return [[(p.id, p.text, p.columns) for p in environment.prompts(split)] for split in ("train", "test")]
    except ValueError as error:
        return str(error)


COMPLETIONS = ("#### 500", "#### 1", "It is 1.", "some long words") * 6


def verdicts(config: Config) -> Any:
    """On fixed completions of the first prompt. Numbers of processes become "here" and "elsewhere"."""
    with environment_of(config) as environment:
        prompt = environment.prompts("train")[0]
        try:
            found = asyncio.run(environment.score(prompt, COMPLETIONS))
        except RunStopped:
            return "stopped"
        return [v.reason if isinstance(v, Failure) else place(v.value, config.rewards) for v in found]


def place(value: float, rewards: Sequence[str]) -> float | str:
    if not any(name.endswith(":process") for name in rewards):
        return value
    return "here" if value == os.getpid() else "elsewhere"


def workers_needed(config: Config) -> int:
    """Different processes that judge three times, one after the other."""
    with environment_of(config) as environment:
        prompt = environment.prompts("train")[0]
        asked = [asyncio.run(environment.score(prompt, ["text"])) for _ in range(3)]
    return len({verdict.value for verdicts in asked for verdict in verdicts if isinstance(verdict, Reward)})


def processes(config: Config) -> int:
    """How many the environment starts to judge."""
    if not Path("/proc/self/task").exists():
        pytest.skip("reads /proc")
    before = children(os.getpid())
    with environment_of(config) as environment:
        # Slow programs, each another one: every place is taken before the first is free again.
        slow = [f"```python\nimport time\ntime.sleep(0.3)\nprint({number})\n```" for number in range(16)]
        asyncio.run(environment.score(environment.prompts("train")[0], [*COMPLETIONS, *slow]))
        return len(children(os.getpid()) - before)  # of those before some may be ending


# ------------------------------------------------------------------------------------------------ models


def policy(config: Config) -> dict[str, Any]:
    """Kind and shape of every weight, and what the policy thinks of a few tokens."""
    loaded = load_policy(config.model, seed=config.seed)
    weights = {name: (p.shape, p.dtype, p.requires_grad) for name, p in loaded.model.named_parameters()}
    return {"weights": weights, "logits": probe_logits(loaded).float()}


def warm_up(config: Config) -> dict[str, Any]:
    """A cold start that no cache knows: where it is kept, how far it came, what it said and made."""
    shutil.rmtree(config.cold_start.cache_dir, ignore_errors=True)
    with environment_of(config) as environment:
        said: list[str] = []
        start = cold_start.ensure(config, environment, said.append)
    warmed = load_policy(replace(config.warmed_model, name=str(start.path)), seed=0)
    folder = start.path.parent.name
    return {"folder": folder, "steps": start.num_steps, "said": said, "logits": probe_logits(warmed)}


# ------------------------------------------------------------------------------------------------ runs


def run_folder(config: Config) -> dict[str, Any]:
    """What a whole run leaves behind and says, times aside."""
    importlib.import_module("observed_rewards").CALLS.clear()
    folder = Path(tempfile.mkdtemp(prefix="run-", dir="."))
    with redirect_stdout(StringIO()) as said:
        train(config, folder)
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "files": sorted(path.name for path in folder.iterdir()),
        "checkpoints": sorted(path.name for path in (folder / "checkpoints").iterdir()),
        "metrics": timeless(rows(folder / "metrics.jsonl")),
        "rollouts": len(rows(folder / "rollouts.jsonl")),
        "answers": len(rows(folder / "evaluations.jsonl")),
        "traces": [row["step"] for row in rows(folder / "traces.jsonl")] if config.output.traces else [],
        "evaluations": (summary["before"], summary["after"]),
        "lines": len(said.getvalue().splitlines()),
    }


def warnings_of_the_doctor(config: Config) -> tuple[list[str], str | None]:
    """What is said of a run of three steps in which no answer ends by itself, and why it ends early."""
    said: list[str] = []
    callbacks = Callbacks(make_callbacks(config, said.append))
    for step in (1, 2, 3):
        callbacks.step(step, {"truncated_fraction": 1.0})
    return said, callbacks.reason


def number_of_callbacks(config: Config) -> int:
    """How many hear of a run."""
    return len(make_callbacks(config, print))


def has_report(config: Config) -> bool:
    """Whether `covey train` leaves a report."""
    with tempfile.TemporaryDirectory(dir=".") as made:
        folder = Path(made)
        (folder / "config.yaml").write_text("num_steps: 1\n")
        return report_at_the_end(config.output, folder) is not None


def evaluation(config: Config) -> Any:
    """What `covey evaluate` measures."""
    with built(config) as run:
        return repr(evaluate(run.source, run.test_prompts, run.source.sampling, config.evaluation))


def resumed_from(config: Config) -> str | None:
    """The checkpoint that a run in the folder of a stopped one goes on from."""
    with tempfile.TemporaryDirectory(dir=".") as made:
        folder = Path(made) / "copy"
        shutil.copytree("stopped", folder)
        found = resume_point(config, folder)
        return None if found is None else found.name


def resumed_rate(config: Config) -> float | str:
    """The learning rate with which a run goes on for which another was asked."""
    changes = format_value(config.resume_changes)
    try:
        found = settings_of(Path("stopped"), ["resume=stopped", "optimizer.lr=0.5", f"resume_changes={changes}"])
    except ValueError as error:
        return str(error)
    return float(found.optimizer.lr)


def followed_links(config: Config) -> str:
    """What becomes of a run whose log somebody linked to elsewhere, when it is resumed."""
    with tempfile.TemporaryDirectory(dir=".") as made:
        folder = Path(made) / "copy"
        shutil.copytree("stopped", folder)
        (folder / "linked.log").symlink_to(Path("elsewhere.log").absolute())
        try:
            with locked_run_folder(config, folder, exact=True, old=folder):
                return "followed"
        except ValueError:
            return "refused"


def wandb_project(config: Config) -> list[str]:
    """The project W&B is asked to open for a run."""
    import wandb

    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wandb, "init", lambda **given: asked.append(given["project"]))
        run_folder(config)
    return asked
