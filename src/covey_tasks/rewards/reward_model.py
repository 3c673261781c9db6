"""A learned reward model as a reward function of TRL's."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from covey.environments.reward_functions.texts import Completion
from covey.system.jsonl import map_leaves
from covey.system.lookup import one_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from covey_tasks.scorer import Scorer


PRECISIONS = ("float32", "bfloat16", "float16")


class RewardModel:
    """The score of an `AutoModelForSequenceClassification` for prompt and completion.

    Text prompts are joined with their completions; conversations go through the reward model's own chat template. A
    special token that a completion spells out is read as ordinary text, so that it opens no turn there. The reward is
    the logit number `label`, as it stands. Give it a scale with reward_weights, or take algorithm=gdpo.
    """

    __name__ = "reward_model"

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        precision: str = "float32",
        device: str = "auto",
        batch_size: int = 16,
        label: int = 0,
    ) -> None:
        """Name a model, a folder or a hub name; loading is lazy."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}")
        one_of("precision", precision, PRECISIONS)
        if label < 0:
            raise ValueError(f"label must be >= 0, got {label}")
        self.model, self.revision = model, revision
        self.precision, self.device = precision, device
        self.batch_size, self.label = batch_size, label
        self._loaded: Scorer | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the weights out: a worker process loads them itself."""
        return vars(self) | {"_loaded": None}

    def prepare(self) -> None:
        """Load the model. ValueError for no model, or an untrained head."""
        if self._loaded is None:
            self._loaded = self._load()

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float]:
        self.prepare()
        assert self._loaded is not None
        texts = [self._text(prompt, written) for prompt, written in zip(prompts, completions, strict=True)]
        batches = [texts[start : start + self.batch_size] for start in range(0, len(texts), self.batch_size)]
        return [score for batch in batches for score in self._scores(self._loaded, batch)]

    def _text(self, prompt: str | Sequence[Mapping[str, Any]], completion: Completion) -> str:
        assert self._loaded is not None
        tokenizer = self._loaded.tokenizer
        completion = break_special_tokens(completion, tokenizer)
        if isinstance(prompt, str):
            assert isinstance(completion, str)
            return prompt + completion
        if tokenizer.chat_template is None:
            raise ValueError(f"the reward model {self.model} has no chat template; its prompts must be text")
        return str(tokenizer.apply_chat_template([*prompt, *completion], tokenize=False))

    def _scores(self, loaded: "Scorer", texts: Sequence[str]) -> list[float]:
        import torch

        # The template has written the special tokens already; text prompts get none either, as in TRL.
        inputs = loaded.tokenizer(
            list(texts), return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        with torch.inference_mode():
            logits = loaded.model(**inputs.to(loaded.model.device)).logits
        if self.label >= logits.shape[1]:
            raise ValueError(f"label must be < {logits.shape[1]} for the reward model {self.model}, got {self.label}")
        return [float(score) for score in logits[:, self.label].float()]

    def _load(self) -> "Scorer":
        from covey_tasks.scorer import load_scorer

        return load_scorer(self.model, self.revision, self.precision, self.device)


def break_special_tokens(said: Any, tokenizer: "PreTrainedTokenizerBase") -> Any:
    """Break special tokens in text by spaces, so none is forged."""
    pattern = special_tokens(tokenizer, len(tokenizer))

    def divided(mark: re.Match[str]) -> str:
        return f"{mark[0][0]} {mark[0][1:]}" if len(mark[0]) > 1 else " "  # "" would join another mark

    return map_leaves(said, lambda one: pattern.sub(divided, one) if isinstance(one, str) else one)


@lru_cache(maxsize=8)
def special_tokens(tokenizer: "PreTrainedTokenizerBase", size: int) -> re.Pattern[str]:
    """Return a pattern of special tokens; `size` is the cache's key."""
    special = {str(entry) for entry in tokenizer.added_tokens_decoder.values() if entry.special}
    longest_first = sorted(special | set(tokenizer.all_special_tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, filter(None, longest_first))) or r"(?!)")
