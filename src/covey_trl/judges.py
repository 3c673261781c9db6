"""covey's environments as judges inside other trainers: TRL's GRPOTrainer and verl.

    GRPOTrainer(model, reward_funcs=for_trl(environment), train_dataset=Dataset.from_list(trl_rows(environment)))

    custom_reward_function.path=my_file.py custom_reward_function.name=compute_score      # verl; my_file imports it

A failed judgement is None in TRL, which leaves it out; verl has no word for it, so it is an error there.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING, Any

from covey.environments.reward_functions.texts import Completion, final_text

if TYPE_CHECKING:
    from covey.environments.base import Environment, EnvironmentLike, Split
    from covey.types import Prompt

_log = logging.getLogger(__name__)

Row = Mapping[str, Any]
DATA_SOURCES = "covey_tasks.data_sources"
"""Module of a package beside covey, which covey reaches by name."""


def trl_rows(environment: "EnvironmentLike", split: "Split" = "train") -> list[dict[str, Any]]:
    """Return an environment's prompts as rows for `GRPOTrainer`, by `prompt_id`.

    >>> trl_rows(Arithmetic(levels=(3,)))[0]
    {'prompt': '60+48=', 'prompt_id': 'train-0'}
    """
    prompts = environment.prompts(split)
    texts = [p.text if isinstance(p.text, str) else [dict(message) for message in p.text] for p in prompts]
    return [{"prompt": text, "prompt_id": prompt.id} for text, prompt in zip(texts, prompts, strict=True)]


def for_trl(judge: "EnvironmentLike | str", *, gold: str = "answer", **settings: Any) -> "TrlReward":
    """Return a reward function for `GRPOTrainer(reward_funcs=...)`.

    `judge` is an environment, whose rows `trl_rows` makes, or the name of a data source as in `compute_score`, for rows
    of your own whose column `gold` holds the right answer; `settings` are those of the source. Raises ValueError for an
    unknown source.
    """
    from covey.environments.base import adapt

    if isinstance(judge, str):
        judge_of(judge, settings)  # say now what is wrong; the name, unlike its judge, can be sent to a process
        return TrlReward(judge.rpartition("/")[2], functools.partial(_by_gold, judge, settings, gold))
    if settings:
        raise ValueError(f"for_trl takes settings beside the name of a data source, got {', '.join(settings)}")
    environment = adapt(judge)
    prompts = {prompt.id: prompt for prompt in (*judge.prompts("train"), *judge.prompts("test"))}
    name = next((prompt.environment for prompt in prompts.values()), "environment")
    return TrlReward(name, functools.partial(_by_id, environment, prompts))


def judge_of(name: str, settings: Mapping[str, Any]) -> "Callable[[Any], tuple[Environment, Prompt]]":
    """Return a data source's judge. ValueError for unknown names and settings."""
    return import_module(DATA_SOURCES).judge_of(name, settings)


class TrlReward:
    """TRL's signature around an environment, judging groups together."""

    def __init__(self, name: str, find: "Callable[[Row], tuple[Environment, Prompt]]") -> None:
        """Set `find`, which returns a row's judge and prompt."""
        self.__name__ = name
        self._find = find

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return a float per completion, None where it could not be judged."""
        lists = {name: values for name, values in columns.items() if isinstance(values, list)}
        rows = [{name: values[i] for name, values in lists.items()} for i in range(len(prompts))]
        texts = [final_text(completion) for completion in completions]
        values = _run(_values([self._find(row) for row in rows], texts, completion_ids))
        problems = [value for value in values if isinstance(value, str)]
        for problem in problems:
            _log.warning("%s could not judge a completion: %s", self.__name__, problem)
        if log_metric is not None:
            log_metric(f"{self.__name__}/unscored", float(len(problems)))
        return [None if isinstance(value, str) else value for value in values]


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Row | None = None, **settings: Any
) -> float:
    """Return a completion's reward, in verl's signature.

    `settings` come from custom_reward_function.reward_kwargs. Raises ValueError for an unknown data source, and
    RuntimeError where the system could not judge the completion.
    """
    environment, prompt = judge_of(data_source, settings)(ground_truth)
    (value,) = _run(_values([(environment, prompt)], [solution_str], None))
    if isinstance(value, str):
        raise RuntimeError(f"{data_source} could not judge a completion: {value}")
    return value


def _by_id(environment: "Environment", prompts: "Mapping[str, Prompt]", row: Row) -> "tuple[Environment, Prompt]":
    if row.get("prompt_id") not in prompts:
        raise ValueError(f"rows need a prompt_id of the environment (trl_rows makes them), got {row.get('prompt_id')}")
    return environment, prompts[row["prompt_id"]]


def _by_gold(source: str, settings: Row, gold: str, row: Row) -> "tuple[Environment, Prompt]":
    if gold not in row:
        raise ValueError(f"rows have no column {gold!r} with the right answer (has: {', '.join(row)})")
    return judge_of(source, settings)(row[gold])


async def _values(
    found: "Sequence[tuple[Environment, Prompt]]", texts: Sequence[str], token_ids: Sequence[Sequence[int]] | None
) -> list[float | str]:
    """Return rewards or reasons, judging neighbours of one prompt together."""
    from covey.environments.episode import maybe_await
    from covey.types import Failure

    values: list[float | str] = []
    for (environment, prompt), members in groupby(range(len(found)), key=found.__getitem__):
        group = list(members)
        written = [texts[i] for i in group]
        if token_ids is None:
            verdicts = await maybe_await(environment.score(prompt, written))
        else:
            verdicts = await maybe_await(environment.score_tokens(prompt, written, [token_ids[i] for i in group]))
        values += [verdict.reason if isinstance(verdict, Failure) else verdict.value for verdict in verdicts]
    return values


def _run(coroutine: "Coroutine[Any, Any, list[float | str]]") -> list[float | str]:
    """Run in a thread, as the caller may be in an event loop."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, coroutine).result()
