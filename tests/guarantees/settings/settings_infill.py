"""What settings of masked policies and of environment=infill may change, with judges of a few steps."""

import asyncio
from collections.abc import Mapping
from typing import Any

from covey.config.schema import Config
from covey.trainer.prepare import make_training_batches
from covey.types import RunStopped
from covey_tasks.infill.environment import Infill

from .settings_observed import built, environment_of, fixed_groups, prompts, rollouts

INFILL: dict[str, Any] = {
    "environment.name": "infill",
    "environment.num_train": 8,
    "environment.num_test": 4,
    "environment.monitors": [],
    "environment.judge_num_steps": 2,
    "environment.judge_pairs": 2,
    "environment.judge_hidden_size": 16,
    "environment.judge_num_layers": 1,
    "environment.judge_floor": 0.0,
    "environment.judge_cache_dir": "judges",
    "model.name": "nano-masked",
    "model.kind": "masked",
    "model.nano_architecture": "bert",
    "engine.name": "fill",
    "sampling.max_tokens": 12,
}
ROWS = INFILL | {"data.path": "rows.jsonl", "environment.text_column": "prompt"}
SAVED = INFILL | {"environment.judge": "judge"}
SPANS = INFILL | {"environment.masking": "spans", "environment.mask_ratios": [0.5]}
PASSES = INFILL | {"sampling.num_passes": 2}
TEXTS = ("the cat sings.", "teh c t sin.s")


def scores(config: Config) -> list[float]:
    """What the judge says of two texts."""
    with environment_of(config) as environment:
        assert isinstance(environment, Infill)
        return [round(score, 6) for score in environment._judge.score(TEXTS)]


def judges(config: Config) -> Mapping[str, Any]:
    """The judges and how often they are right; the refusal of one that is not often enough."""
    try:
        with environment_of(config) as environment:
            return environment.facts()
    except ValueError as error:
        return {"refused": str(error)}


def judged(config: Config) -> list[list[str]]:
    """The names of the parts of the rewards of gold fills."""
    with environment_of(config) as environment:
        assert isinstance(environment, Infill)
        prompt = environment.prompts("train")[0]
        found = asyncio.run(environment.score_tokens(prompt, [""], [prompt.columns["hidden"]]))
        return [sorted(vars_of(verdict)) for verdict in found]


def vars_of(verdict: Any) -> Mapping[str, float]:
    return dict(verdict.parts)


def batches(config: Config) -> list[int]:
    """Texts in each pass of the judge over five."""
    with environment_of(config) as environment:
        assert isinstance(environment, Infill)
        seen: list[int] = []
        model = environment._judge._loaded.model
        model.register_forward_pre_hook(
            lambda module, given, named: seen.append(len(named["input_ids"])), with_kwargs=True
        )
        environment._judge.score(TEXTS * 3)
        return seen


def refusal(config: Config) -> str:
    """Why the environment cannot be made; "" where it can."""
    try:
        with environment_of(config):
            return ""
    except ValueError as error:
        return str(error)


def ending(config: Config) -> str:
    """Why num_steps steps on the same groups came to an end; "" where they were all made."""
    with built(config) as run:
        groups = fixed_groups(run)
        try:
            for step in range(config.num_steps):
                run.trainer.step(make_training_batches(groups, run.trainer, run.credit, run.packing, step)[0], step)
        except RunStopped as error:
            return str(error)
        return ""


MOVING = {"algorithm.kl_coef": 0.1, "num_steps": 3, "optimizer.lr": 0.1}
CHANGES: dict[str, tuple[Any, ...]] = {
    "sampling.num_passes": (rollouts, 2, INFILL),
    "sampling.likelihood": (rollouts, "one_step", PASSES),
    "algorithm.max_kl": (ending, 1e-6, MOVING),
    "algorithm.max_mismatch": (ending, 1e-6, MOVING),
    "environment.text_column": (prompts, "other", ROWS),
    "environment.window": (prompts, 12, INFILL),
    "environment.masking": (prompts, "spans", INFILL),
    "environment.mask_ratios": (prompts, [0.1, 0.6], INFILL),
    "environment.span_length": (prompts, 2, SPANS),
    "environment.judge": (judges, "judge", INFILL | {"environment.monitors": ["second_judge"]}),
    "environment.judge_floor": (judges, 1.0, INFILL),
    "environment.judge_device": (refusal, "nowhere", INFILL),
    "environment.judge_batch_size": (batches, 2, INFILL),
    "environment.judge_output": (scores, "logit", INFILL),
    "environment.judge_label": (refusal, 1, INFILL),
    "environment.judge_num_steps": (scores, 3, INFILL),
    "environment.judge_pairs": (scores, 3, INFILL),
    "environment.judge_lr": (scores, 0.01, INFILL),
    "environment.judge_hidden_size": (scores, 32, INFILL),
    "environment.judge_num_layers": (scores, 3, INFILL),
    "environment.judge_cache_dir": (judges, "elsewhere", INFILL),
    "environment.monitors": (judged, ["grammar", "ngram", "second_judge"], INFILL),
}
"""Setting -> what it changes, another value, what both have."""
OFF = {
    "model.kind = causal": INFILL,
    "a policy that continues its prompts, model.kind = causal": INFILL,
    "data.path = rows, not a text file": INFILL,
    "environment.masking = spans": INFILL,
    "a judge that covey trains (nano-judge, or second_judge among the monitors)": {
        name: value
        for name, value in SAVED.items()
        if not name.startswith("environment.judge_") or name == "environment.judge_floor"
    },
}
