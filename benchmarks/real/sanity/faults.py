"""Faults of the running system, planted one at a time: settings, data and model stay as they are."""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.checks.doctor.planted import change_groups, dealt, hotter, keep_first_weights, with_rewards
from covey.types import Completion, Group


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong, and the findings of `covey doctor` that name it."""

    named_by: tuple[str, ...]
    plant: Callable[[], None]
    hides: bool = False
    """Whether problems are learnt all the same: one update a batch divides by the trainer's own log-probs, so that the
    sampler's are only measured."""


# ------------------------------------------------------------------------------------------------ the sampler


def push_every(steps: int) -> None:
    """The engine takes new weights only every so many steps, and says that it has them."""
    from covey.engine.native.engine import NativeEngine

    kept: dict[int, tuple[Any, int]] = {}

    def take_some(self: Any) -> None:
        _, since = kept.get(id(self), (None, -steps))
        if self.version - since >= steps:
            kept[id(self)] = (copy.deepcopy(self._trained), self.version)
            self._policy = kept[id(self)][0]
            self._runner = self._new_runner()

    NativeEngine._take_weights = take_some  # type: ignore[method-assign]


def change_completions(changed: Callable[[Completion], Completion]) -> None:
    from covey.engine.native.engine import NativeEngine

    generate = NativeEngine.generate_telling

    async def generated(self: Any, *given: Any) -> list[Completion]:
        return [changed(one) for one in await generate(self, *given)]

    NativeEngine.generate_telling = generated  # type: ignore[method-assign]


def neighbour(completion: Completion) -> Completion:
    """Each token with the log-prob of the one before."""
    return replace(completion, logprobs=(completion.logprobs[-1], *completion.logprobs[:-1]))


def raised(completion: Completion) -> Completion:
    """Each log-prob 0.2 nats too high."""
    return replace(completion, logprobs=tuple(value + 0.2 for value in completion.logprobs))


# ------------------------------------------------------------------------------------------------ the trainer's scores


def change_scores(changed: Callable[[Any], Any]) -> None:
    """Change the log-probs that the trainer makes, with gradient and without."""
    from covey.trainer import forward

    score = forward.score_tokens

    def scored(policy: Any, batch: Any, *rest: Any) -> Any:
        found = score(policy, batch, *rest)
        return replace(found, logprob_L=changed(found.logprob_L))

    forward.score_tokens = scored  # type: ignore[assignment]


def targets_of_neighbours() -> None:
    """The trainer scores at each place the token that comes next."""
    from covey.trainer import forward

    score = forward.score_tokens

    def scored(policy: Any, batch: Any, *rest: Any) -> Any:
        return score(policy, replace(batch, target_L=batch.target_L.roll(-1)), *rest)

    forward.score_tokens = scored


def colder_scores() -> None:
    """The trainer scores at another temperature than was sampled."""
    from covey.trainer import forward

    score = forward.score_tokens

    def scored(policy: Any, batch: Any, scoring: Any, *rest: Any) -> Any:
        cold = replace(scoring.sampling, temperature=scoring.sampling.temperature / 2)
        return score(policy, batch, replace(scoring, sampling=cold), *rest)

    forward.score_tokens = scored


# ------------------------------------------------------------------------------------------------ rewards, advantages


def rotated(groups: Sequence[Group]) -> list[Group]:
    """Each group has the rewards of the next."""
    others = [*groups[1:], *groups[:1]]
    return [with_rewards(g, [one.reward for one in o.rollouts]) for g, o in zip(groups, others, strict=True)]


def change_credit(changed: Callable[[Sequence[Group]], Sequence[Group]]) -> None:
    """Change the rewards that advantages are made of, while the groups keep theirs."""
    from covey.algorithm.credit.groups import CreditAssigner

    assign = CreditAssigner.assign

    def assigned(self: Any, groups: Sequence[Group], kl: Any = None) -> Any:
        return assign(self, changed(groups), kl)

    CreditAssigner.assign = assigned  # type: ignore[method-assign]


def flip_sign() -> None:
    """Advantages with the wrong sign."""
    from covey.algorithm.credit.groups import CreditAssigner

    assign = CreditAssigner.assign

    def assigned(self: Any, groups: Sequence[Group], kl: Any = None) -> Any:
        credit = assign(self, groups, kl)
        return replace(credit, advantages=[[-value for value in of_group] for of_group in credit.advantages])

    CreditAssigner.assign = assigned  # type: ignore[method-assign]


def climb() -> None:
    """The loss is climbed, not descended."""
    from covey.trainer.trainer import Trainer

    loss = Trainer._loss

    def negated(self: Any, *given: Any) -> Any:
        value, sums = loss(self, *given)
        return -value, sums

    Trainer._loss = negated  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------------------ the optimiser


def step_a_copy() -> None:
    """The optimiser has the parameters of a copy of the model."""
    from covey.trainer import trainer

    build = trainer.build_optimizer
    trainer.build_optimizer = lambda model, *given: build(copy.deepcopy(model), *given)


def step_with_gradients_of_others() -> None:
    """Each parameter is stepped with the gradient of the next of its shape."""
    from covey.trainer import trainer

    step = trainer.clipped_step

    def stepped(optimizer: Any, scaler: Any, parameters: Any, *rest: Any, **more: Any) -> Any:
        with_gradient = sorted((p for p in parameters if p.grad is not None), key=lambda p: tuple(p.shape))
        for _, same in itertools.groupby(with_gradient, key=lambda p: tuple(p.shape)):
            of_shape = list(same)
            grads = [parameter.grad for parameter in of_shape]
            for parameter, grad in zip(of_shape, [*grads[1:], *grads[:1]], strict=True):
                parameter.grad = grad
        return step(optimizer, scaler, parameters, *rest, **more)

    trainer.clipped_step = stepped


def deal(groups: Sequence[Group]) -> list[Group]:
    return list(map(dealt, groups))


FAULTS: dict[str, Fault] = {
    "never_pushed": Fault(("D12", "D10"), keep_first_weights),
    "pushed_every_4th": Fault(("D10", "D12"), partial(push_every, 4)),
    "hotter_engine": Fault(("D10",), hotter, hides=True),
    "engine_neighbour": Fault(("D10",), partial(change_completions, neighbour), hides=True),
    "engine_raised": Fault(("D10",), partial(change_completions, raised), hides=True),
    "trainer_raised": Fault(("D10",), partial(change_scores, lambda logprob_L: logprob_L + 0.2), hides=True),
    "trainer_neighbour": Fault(("D10",), targets_of_neighbours),
    "trainer_colder": Fault(("D10",), colder_scores, hides=True),
    "rewards_rotated": Fault(("D24",), partial(change_groups, rotated)),
    "rewards_shuffled": Fault(("D24",), partial(change_groups, deal)),
    "credit_rotated": Fault(("D37",), partial(change_credit, rotated)),
    "credit_shuffled": Fault(("D37",), partial(change_credit, deal)),
    "sign_flipped": Fault(("D37",), flip_sign),
    "loss_climbed": Fault(("D37",), climb),
    "copy_stepped": Fault(("D37",), step_a_copy),
    "gradients_of_others": Fault(("D37",), step_with_gradients_of_others),
}
