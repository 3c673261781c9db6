"""Train the embedded judge, a small encoder, on real and corrupted texts.

It lies in a content-addressed cache, as cold-start policies do, from which a second run takes it. How often it ranks a
held-out text above its corrupted version is measured before it may be used, for judges from elsewhere too.
"""

import hashlib
import json
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from covey.policy.models.nano import NanoShape, nano_judge_model, nano_masked_tokenizer
from covey.system.disk import LEFTOVER_SECONDS, atomic_folder
from covey_tasks.infill.judge import AS_TEXT, Judge
from covey_tasks.infill.settings import InfillConfig

LOGGER = logging.getLogger(__name__)
NANO_JUDGE = "nano-judge"
REPORT = "judge.json"
NUM_HEADS = 4
WARMUP = 20
"""Steps over which the learning rate rises."""


Pair = tuple[str, str]
"""A real text and its corrupted version."""
Pairs = Callable[[int, random.Random], list[Pair]]
"""Draws so many pairs."""


def ensure_judge(
    settings: InfillConfig, seed: int, draw: Pairs, content: Sequence[str], say: Callable[[str], None] = LOGGER.info
) -> Path:
    """Return the folder of the judge of these pairs, trained if missing.

    `content` is what the pairs follow from besides.
    """
    training = {
        "hidden_size": settings.judge_hidden_size,
        "num_layers": settings.judge_num_layers,
        "num_heads": NUM_HEADS,
        "num_steps": settings.judge_num_steps,
        "batch_size": settings.judge_pairs,
        "lr": settings.judge_lr,
        "seed": seed,
    }
    cache = Path(settings.judge_cache_dir)
    given = json.dumps([training, torch.__version__, *content])
    folder = cache / f"judge-{hashlib.sha256(given.encode()).hexdigest()[:16]}"
    if (folder / REPORT).is_file():
        return folder
    say(f"judge: {settings.judge_num_steps} steps of training begin, once for all runs with these texts")
    tokenizer = nano_masked_tokenizer()
    model, loss = train_judge(settings, seed, tokenizer, draw)
    say(f"judge: {settings.judge_num_steps} steps done, loss {loss:.3f}")
    cache.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_folder(folder, family="judge-*", max_age=LEFTOVER_SECONDS) as aside:
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            (aside / REPORT).write_text(json.dumps({"num_steps": settings.judge_num_steps, "loss": loss}))
    except OSError:
        if not (folder / REPORT).is_file():  # else another run made the same judge in the meantime
            raise
    return folder


def train_judge(
    settings: InfillConfig, seed: int, tokenizer: PreTrainedTokenizerFast, draw: Pairs
) -> tuple[PreTrainedModel, float]:
    """Train a judge on pairs; return it and its final loss (nats)."""
    shape = NanoShape("modernbert", settings.judge_hidden_size, settings.judge_num_layers, NUM_HEADS)
    model = nano_judge_model(shape, tokenizer, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.judge_lr, betas=(0.9, 0.98), weight_decay=0.01)
    chance = random.Random(f"judge/{seed}")
    losses = []
    model.train()
    for step in range(settings.judge_num_steps):
        left = 1 - step / settings.judge_num_steps
        optimizer.param_groups[0]["lr"] = settings.judge_lr * min((step + 1) / WARMUP, left)
        pairs = draw(settings.judge_pairs, chance)
        texts = [text for pair in pairs for text in pair]
        inputs = tokenizer(texts, **AS_TEXT)
        real_N = torch.tensor([1.0, 0.0] * len(pairs))
        loss = F.binary_cross_entropy_with_logits(model(**inputs).logits[:, 0], real_N)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return model.eval(), fmean(losses[-20:])


def accuracy(judge: Judge, pairs: Sequence[Pair]) -> float:
    """Return the share of pairs ranked right; a tie counts half."""
    scores = judge.score([text for pair in pairs for text in pair])
    ranked = zip(scores[::2], scores[1::2], strict=True)
    return fmean(float(real > wrong) + 0.5 * float(real == wrong) for real, wrong in ranked)
