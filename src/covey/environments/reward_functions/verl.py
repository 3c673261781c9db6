"""Rewards in other signatures: verl's `compute_score(data_source, solution_str, ...)`, and `reward(samples)`."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.environments.data.columns import VERLS, value_in
from covey.environments.reward_functions.call import HOOKS, RewardCallable, is_async, name_of, named_parameters
from covey.environments.reward_functions.texts import Completion, final_text
from covey.system.lookup import attribute

WANTED = frozenset({"data_source", "solution_str", "ground_truth"})
"""Parameters by which verl's signature is known."""


SAMPLES = "samples"
"""The one parameter besides options of a function that takes rows, each with its prompt and its completion."""


def adapt(function: RewardCallable) -> RewardCallable:
    """Wrap a function of another signature; covey's own stays."""
    named = named_parameters(function)[0]
    if [name for name, p in named.items() if p.default is p.empty and name not in HOOKS] == [SAMPLES]:
        return (_AsyncSamples if is_async(function) else _Samples)(function, name_of(function))
    if not named.keys() >= WANTED:
        return function
    return (_AsyncScore if is_async(function) else _Score)(function, name_of(function))


@dataclass(frozen=True)
class _Score:
    """Calls the function per completion with verl's row data."""

    function: Callable[..., Any]
    __name__: str

    def __call__(self, completions: Sequence[Completion], log_extra: Any = None, **columns: Any) -> list[Any]:
        return _values([self.function(**given) for given in self._given(completions, columns)], log_extra)

    def _given(self, completions: Sequence[Completion], columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        named = named_parameters(self.function)[0].keys() - attribute(self.function, "keywords", {}).keys()
        for place, completion in enumerate(completions):
            lists = {name: values for name, values in columns.items() if isinstance(values, list)}
            row = {name: values[place] for name, values in lists.items() if name != "prompts"}
            truth = next(
                (found for name in ("ground_truth", VERLS) if (found := value_in(row, name)) is not None), None
            )
            if truth is None:
                raise ValueError(f"{self.__name__} needs rows with {VERLS} or ground_truth (have: {', '.join(row)})")
            own = {"data_source": row.get("data_source"), "extra_info": row.get("extra_info"), "ground_truth": truth}
            yield {name: value for name, value in {**row, **own}.items() if name in named} | {
                "solution_str": final_text(completion)
            }


class _AsyncScore(_Score):
    async def __call__(  # type: ignore[override]
        self, completions: Sequence[Completion], log_extra: Any = None, **columns: Any
    ) -> list[Any]:
        calls = (self.function(**given) for given in self._given(completions, columns))
        return _values(await asyncio.gather(*calls), log_extra)


@dataclass(frozen=True)
class _Samples:
    """Calls the function with a mapping per completion and its columns."""

    function: Callable[..., Any]
    __name__: str

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> Any:
        lists = {name: values for name, values in columns.items() if isinstance(values, list)}
        named = named_parameters(self.function)[0]
        return self.function(
            samples=[
                {
                    **{name: values[place] for name, values in lists.items()},
                    "prompt": prompts[place],
                    "completion": final_text(completion),
                }
                for place, completion in enumerate(completions)
            ],
            **{name: columns[name] for name in HOOKS if name in named and name in columns},
        )


class _AsyncSamples(_Samples):
    async def __call__(self, prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> Any:
        return await super().__call__(prompts, completions, **columns)


def _values(found: Sequence[Any], log_extra: Any) -> list[Any]:
    said = [value if isinstance(value, Mapping) else {"score": value} for value in found]
    for name in {name: None for each in said for name in each if name != "score"} if log_extra else ():
        log_extra(name, [each.get(name) for each in said])
    return [each.get("score") for each in said]
