"""Judges and references of other processes: asked in turns, and none for what must be played beside the sampler."""

from types import SimpleNamespace
from typing import Any

import pytest

from covey.cluster.judges import JudgedElsewhere, turns_of
from covey.cluster.references import RemoteReference
from covey.environments.base import Replies
from covey.policy.logprobs import Scoring
from covey.types import Prompt, Sampling
from tests.support.builders import make, random_groups

from ..support.fake_ray import fake_ray

PROMPT = Prompt("p", "chat", "a:", {})


def answering(method: str, *answers: Any) -> Any:
    """Actors of a role, whose one method keeps what it is asked."""
    actors = [SimpleNamespace(**{method: SimpleNamespace(remote=answer)}) for answer in answers]
    return SimpleNamespace(role="judge", actors=lambda: actors)


def test_the_metrics_of_judges_are_means() -> None:
    answerers = answering("metrics", lambda: {"a": 1.0, "b": 4.0}, lambda: {"a": 3.0})
    with fake_ray():
        judged = JudgedElsewhere(answerers, {}, SimpleNamespace(answer=list))  # type: ignore[arg-type]
    assert judged.metrics() == {"a": 2.0, "b": 4.0}


@pytest.mark.parametrize(("judges_groups", "tools"), [(True, []), (False, [{"name": "add"}]), (False, [])])
def test_only_replies_without_tools_are_judged_elsewhere(judges_groups: bool, tools: list[Any]) -> None:
    environment: Any = SimpleNamespace(
        prompts=lambda split: [PROMPT] if split == "train" else [],
        episode=lambda prompt, seed: Replies(environment, prompt),
        judges_groups=lambda prompt: judges_groups,
        tool_schemas=lambda prompt: tools,
        max_turns=lambda prompt: 3,
    )
    if not (judges_groups or tools):
        assert turns_of(environment, 2) == {"p": 3}
        return
    with pytest.raises(ValueError, match=r"devices.judge=2 judges answers, and environment=chat has episodes"):
        turns_of(environment, 2)


def test_each_rank_begins_with_another_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("covey.system.collectives.rank", lambda: 1)
    answerers = answering("logprobs", *(lambda *given, place=place: asked.append(place) for place in range(3)))
    (batch,) = make(random_groups()).micro_batches
    with fake_ray():
        reference = RemoteReference(answerers)
    for _ in range(3):
        reference.logprobs(batch, Scoring(Sampling(), 0), None)
    assert asked == [1, 2, 0]
