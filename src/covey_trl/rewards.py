"""Read rewards as TRL does: functions, names, reward models."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.environments.reward_functions.specs import REWARDS
from covey_tasks.rewards.reward_model import RewardModel
from covey_tasks.scorer import Scorer, add_padding

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def reward_list(given: Any, tokenizers: Any) -> list[str | Callable[..., Any]]:
    """List the rewards of a trainer as functions and names.

    `tokenizers` belong to reward models, one for each reward or None. ValueError where there are not as many.
    """
    rewards = list(given) if isinstance(given, list | tuple) else [given]
    own = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers] * len(rewards)
    if not rewards or rewards == [None]:
        raise ValueError("reward_funcs is empty: a function, a name or a reward model")
    if len(own) != len(rewards):
        raise ValueError(f"reward_processing_classes has {len(own)} entries for {len(rewards)} reward_funcs")
    return [_reward(reward, tokenizer) for reward, tokenizer in zip(rewards, own, strict=True)]


def _reward(reward: Any, tokenizer: "PreTrainedTokenizerBase | None") -> str | Callable[..., Any]:
    from transformers import PreTrainedModel

    if isinstance(reward, PreTrainedModel):
        return _ModelInMemory(reward, tokenizer)
    if isinstance(reward, str) and (reward not in REWARDS or Path(reward).exists()):
        return _named_after(RewardModel(reward), reward)
    return reward


def _named_after(model: RewardModel, name: str) -> RewardModel:
    """Name a reward model by the last part of its path, as TRL does."""
    model.__name__ = name.rstrip("/").rpartition("/")[2]
    return model


class _ModelInMemory(RewardModel):
    """Reward model that a script has loaded."""

    def __init__(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None") -> None:
        super().__init__(model.name_or_path or type(model).__name__)
        _named_after(self, self.model)
        self._given = model, tokenizer

    def _load(self) -> Scorer:
        model, tokenizer = self._given
        if tokenizer is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
        return add_padding(Scorer(model.eval(), tokenizer))
