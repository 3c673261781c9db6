"""Load a frozen model that scores texts: reward model or judge."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from covey.policy.models.loading import choose_device, load_tokenizer
from covey.policy.models.saved import NO_CODE, read_weights
from covey.policy.settings import ModelConfig
from covey.system.hub import silence
from covey.system.text.format import first_line


@dataclass(frozen=True)
class Scorer:
    """A model that scores texts, frozen."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_scorer(name: str, revision: str | None, precision: str, device: str) -> Scorer:
    """Load a frozen sequence classifier and its tokenizer.

    ValueError where it has no trained head.
    """
    if not Path(name).exists():
        silence()
    keywords: dict[str, Any] = NO_CODE | ({} if revision is None else {"revision": revision})
    try:
        model, lacking = read_weights(AutoModelForSequenceClassification, name, dtype=precision, **keywords)
        tokenizer = load_tokenizer(ModelConfig(name=name, revision=revision))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{name} is no directory or reachable hub reward model ({first_line(error)})") from error
    # A causal model loads too, with a random head
    if lacking:
        raise ValueError(f"{name} is no reward model: it {lacking}")
    return add_padding(Scorer(model.requires_grad_(False).eval().to(choose_device(device)), tokenizer))


def add_padding(scorer: Scorer) -> Scorer:
    """Return the scorer with a padding token, by default the end token."""
    tokenizer = scorer.tokenizer
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    scorer.model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return scorer
