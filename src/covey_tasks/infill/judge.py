"""A frozen judge that scores how real a whole text looks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from covey.policy.policy import UNLIMITED
from covey_tasks.infill.settings import InfillConfig
from covey_tasks.scorer import Scorer, load_scorer

NOTHING = "\N{REPLACEMENT CHARACTER}"
"""Replacement for an empty text."""
AS_TEXT: Mapping[str, Any] = {"return_tensors": "pt", "padding": True, "truncation": True, "split_special_tokens": True}
"""Tokenizer's options for texts: a policy that spells a special token out makes none."""


class Judge:
    """Scores texts in batches, without gradient."""

    def __init__(self, name: str, settings: InfillConfig) -> None:
        self.name = name
        self._settings = settings
        self._loaded: Scorer = load_scorer(name, None, "float32", settings.judge_device)
        config, tokenizer = self._loaded.model.config, self._loaded.tokenizer
        self._most = min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", None) or UNLIMITED)
        num_labels = config.num_labels or 0
        if settings.judge_label >= num_labels:
            raise ValueError(f"label must be < {num_labels} for the judge {name}, got {settings.judge_label}")

    @property
    def is_frozen(self) -> bool:
        model = self._loaded.model
        return not model.training and not any(parameter.requires_grad for parameter in model.parameters())

    def check_lengths(self, texts: Sequence[str]) -> None:
        """Check that the judge reads whole texts. ValueError."""
        longest = max(map(len, self._loaded.tokenizer(list(texts))["input_ids"]))
        if longest > self._most:
            raise ValueError(
                f"environment.window needs a judge that reads {longest} tokens, {self.name} reads {self._most}"
            )

    async def scores(self, texts: Sequence[str]) -> list[float]:
        """Return one score for each text.

        They are passed by themselves: what others have scored meanwhile would change the last bits.
        """
        return self.score(texts)

    def score(self, texts: Sequence[str]) -> list[float]:
        size = self._settings.judge_batch_size
        # Texts of like length share a pass, so that little of it is padding.
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        found = [0.0] * len(texts)
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            for index, score in zip(chosen, self._pass([texts[i] for i in chosen]), strict=True):
                found[index] = score
        return found

    @torch.no_grad()
    def _pass(self, texts: Sequence[str]) -> list[float]:
        model, tokenizer = self._loaded.model, self._loaded.tokenizer
        # A text of no tokens has no mean.
        inputs = tokenizer([text or NOTHING for text in texts], max_length=self._most, **AS_TEXT)
        logits_NK = model(**inputs.to(model.device)).logits.float()
        values_NK = logits_NK
        if self._settings.judge_output != "logit":  # of one output the probability is its sigmoid, else the softmax
            values_NK = logits_NK.sigmoid() if logits_NK.shape[1] == 1 else logits_NK.softmax(dim=1)
        return [float(score) for score in values_NK[:, self._settings.judge_label]]
