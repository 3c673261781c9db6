"""A custom reference model: a name, a folder or an object."""

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from covey.policy.models.adapters import saved_rank
from covey.policy.models.loading import load_policy, policy_in_memory
from covey.policy.policy import Policy
from covey.policy.reference import Reference, is_base_model
from covey.policy.settings import ModelConfig

SETTING = "algorithm.reference_model"
BLOCK, NUM_BLOCKS = 1 << 16, 16
"""Bytes read at once of a file, and how often, to tell it from another: no file of weights is read whole."""
WEIGHTS = ("*.safetensors", "*.bin", "*config.json")


@dataclass(frozen=True)
class FrozenModels:
    """Models in memory that a program compares with."""

    reference: nn.Module | None = None
    teacher: nn.Module | None = None

    @property
    def missing(self) -> list[str]:
        """Name the settings of models that are not in memory."""
        given = {"reference_model": self.reference, "teacher": self.teacher}
        return [name for name, model in given.items() if model is None]


NO_MODELS = FrozenModels()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens and their numbers, which comparable models share."""

    tokens: str
    """Hash of the tokenizer's entries."""
    size: int
    """Entries of the embedding, of which the tokenizer may know fewer."""
    max_length: int
    """The longest sequence, in tokens."""
    positions: int | None
    """Positions where they are learnt, None where they are computed."""


def vocabulary_of(policy: Policy) -> Vocabulary:
    """Return a policy's vocabulary; its weights need no storage."""
    entries = sorted(policy.tokenizer.get_vocab().items())
    digest = hashlib.sha256(repr(entries).encode()).hexdigest()
    config = policy.causal_lm.config.get_text_config(decoder=True)
    is_computed = getattr(config, "rope_parameters", None) is not None
    longest = policy.max_length
    return Vocabulary(digest, int(config.vocab_size), longest, None if is_computed else longest)


def settings_of_reference(model: ModelConfig, name: str, revision: str | None) -> ModelConfig:
    """Return the policy's settings with the reference's name, frozen."""
    found = replace(_frozen(model), name=name, revision=revision)
    rank_and_alpha = saved_rank(name)
    if rank_and_alpha is None:
        return found
    rank, alpha = rank_and_alpha
    return replace(found, lora_rank=rank, lora_alpha=alpha, lora_targets=["all-linear"])


def _frozen(model: ModelConfig) -> ModelConfig:
    return replace(model, gradient_checkpointing=False, activation_offload=False, chat_template_kwargs={})


def load_reference_model(
    model: ModelConfig,
    name: str,
    revision: str | None,
    wanted: Vocabulary,
    *,
    seed: int,
    on_host: bool = False,
    setting: str = SETTING,
) -> Reference:
    """Load a named model, frozen. ValueError if unloadable or incomparable."""
    try:
        loaded = load_policy(settings_of_reference(model, name, revision), seed=seed, trainable=False, on_host=on_host)
    except ValueError as error:
        raise ValueError(str(error).replace("model.name=", f"{setting}=")) from error
    _check_vocabulary(f"{setting}={name}", vocabulary_of(loaded), wanted, may_pad=setting != SETTING)
    return Reference(loaded, None, is_own=True)


def reference_in_memory(given: nn.Module, model: ModelConfig, policy: Policy, setting: str = SETTING) -> Reference:
    """Return a frozen copy of a model in memory as reference.

    ValueError where it is the trained model itself, or has another vocabulary.
    """
    if given is policy.model or given is policy.causal_lm:
        told = 'teacher is the very model that is trained: give teacher="self"'
        if setting == SETTING:
            told = "reference is the very model that is trained: leave it out to compare with its beginning"
        raise ValueError(told)
    bare = replace(_frozen(model), lora_rank=0, load_in_4bit=False, load_in_8bit=False)
    copied = policy_in_memory(copy.deepcopy(given), policy.tokenizer, bare, seed=0)
    copied.model.requires_grad_(False)
    wanted = vocabulary_of(policy)
    _check_vocabulary(f"{setting}=the model in memory", replace(vocabulary_of(copied), tokens=wanted.tokens), wanted)
    return Reference(replace(copied, offload=False), None, is_own=True)


def _check_vocabulary(name: str, found: Vocabulary, wanted: Vocabulary, *, may_pad: bool = False) -> None:
    """Refuse a model of other tokens.

    `may_pad` allows more untrained entries behind them.
    """
    if found.size != wanted.size and not (may_pad and found.tokens == wanted.tokens):
        raise ValueError(f"{name} must have the policy's vocabulary of {wanted.size:,} tokens, it has {found.size:,}")
    if found.tokens != wanted.tokens:
        raise ValueError(f"{name} must have the policy's tokens, its tokenizer numbers others")
    if found.positions is not None and found.positions < wanted.max_length:
        raise ValueError(
            f"{name} must read as long texts as the policy, {wanted.max_length:,} tokens, it has learnt "
            f"positions for {found.positions:,}"
        )


def model_hash(name: str, revision: str | None, given: nn.Module | None = None) -> str:
    """Return a fingerprint of a model, read in part."""
    if given is not None:
        parts = _of_weights(given)
    elif Path(name).is_dir():
        parts = _of_files(Path(name))
    else:
        parts = iter((f"{name} {revision}".encode(), (_commit_of(name, revision) or "").encode()))
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _commit_of(name: str, revision: str | None) -> str | None:
    """Return the commit of a cached hub model, None if unknown."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError):  # an embedded model, or one that loading complains of
        return None
    return getattr(config, "_commit_hash", None)


def _of_files(folder: Path) -> Iterator[bytes]:
    """Yield name, size and evenly spaced blocks of each file."""
    for path in sorted({path for kind in WEIGHTS for path in folder.glob(kind)}):
        size = path.stat().st_size
        yield f"{path.name} {size}\n".encode()
        with path.open("rb") as file:
            for index in range(NUM_BLOCKS):
                file.seek(max(0, size - BLOCK) * index // (NUM_BLOCKS - 1))
                yield file.read(BLOCK)


def _of_weights(model: nn.Module) -> Iterator[bytes]:
    """Yield names and evenly spaced numbers of weights, untrained adapters left out."""
    is_base = is_base_model(model)
    for name, weight in model.named_parameters():
        if is_base and ".lora_" in name:
            continue
        yield f"{name} {tuple(weight.shape)}\n".encode()
        flat: Tensor = weight.detach().flatten()
        yield flat[:: max(1, flat.numel() // 1024)].to("cpu", torch.float64).numpy().tobytes()
