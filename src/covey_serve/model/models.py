"""Models in memory: bases, and what is trained on them.

A LoRA model is a tree of modules of its own on the base's tensors; a full model is a copy. All functions here are
called by the one thread that computes.
"""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from covey.policy.kernels.adamw import adamw
from covey.policy.models.adapters import ALL_LINEAR, linear_layers
from covey.policy.models.loading import load_policy, policy_in_memory
from covey.policy.models.text_part import beside_text
from covey.policy.policy import Policy, head_modules
from covey.policy.settings import ModelConfig
from covey.run.checkpoints.checkpoint import load_weights, name_base, save_policy
from covey.trainer.optimizer import clipped_step

ALPHA = 32.0
"""LoRA scale numerator of every model; the wire has none."""
ATTENTION = ("attn", "attention", "mixer", "conv")
"""Parts of module names that train_attn adapts; other linear layers inside are train_mlp's."""
POLICY, MOMENTS = "policy", "optimizer.pt"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Base, rank and layers: weights of equal shapes replace one another."""

    base: str
    """Name that clients know the base by."""
    rank: int = 0
    """LoRA rank; 0 for a full model."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class Bases:
    """Base models by the names that clients know, each in memory once."""

    def __init__(self, folders: Mapping[str, ModelConfig], *, full: bool = False) -> None:
        """Load all bases. ValueError for a bad one. `full` trains all weights of every model."""
        self.folders, self.full = folders, full
        self._loaded = {name: load_policy(settings, trainable=False) for name, settings in folders.items()}

    def policy(self, name: str) -> Policy:
        return self._loaded[name]

    def tokenizer(self, name: str) -> str | None:
        """Return the tokenizer's folder, None where the name leads to it."""
        place = str(Path(self.folders[name].name).resolve())
        return place if Path(place).is_dir() and ":" not in place else None

    def make(self, shape: ModelShape, seed: int) -> Policy:
        """Return a policy to train. ValueError without layers to adapt."""
        settings = self.folders[shape.base]
        if shape.rank == 0:
            return load_policy(settings, seed=seed)
        base = self.policy(shape.base)
        shared = [*base.model.parameters(), *base.model.buffers()]
        # deepcopy takes what it finds here for copied: modules are new, tensors are the base's own
        model = copy.deepcopy(base.causal_lm, {id(tensor): tensor for tensor in shared})
        targets = adapted_layers(base, shape)
        adapted = replace(settings, lora_rank=shape.rank, lora_alpha=ALPHA, lora_targets=targets)
        with warnings.catch_warnings():  # the base below an adapted head is neither merged nor saved
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
            policy = policy_in_memory(model, base.tokenizer, adapted, seed=seed)
        name_base(policy, settings.name)
        return policy


def adapted_layers(base: Policy, shape: ModelShape) -> list[str]:
    """Name the layers to adapt, as lora_targets. ValueError without any."""
    if shape.train_attn and shape.train_mlp and not shape.train_unembed:
        return ALL_LINEAR
    model, beside = base.causal_lm, beside_text(base.causal_lm)
    inside = [name for name, _ in linear_layers(model) if f"{name}.weight" not in beside]
    wanted = {True: shape.train_attn, False: shape.train_mlp}
    names = [name for name in inside if wanted[any(part in name for part in ATTENTION)]]
    heads = [id(module) for module in head_modules(model) if isinstance(module, nn.Linear)]
    if shape.train_unembed:
        names += [name for name, module in model.named_modules() if id(module) in heads]
    if not names:
        raise ValueError(f"lora_config must train at least one of attn, mlp and unembed of {shape.base}")
    return names


class TrainedModel:
    """Weights, their optimiser and the gradients so far."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.num_steps = 0
        self._parameters = [each for each in policy.model.parameters() if each.requires_grad]
        self._scaler = torch.amp.GradScaler(policy.device.type, enabled=False)
        self.reset_moments()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of trained weights, gradients and moments."""
        return 4 * sum(each.numel() * each.element_size() for each in self._parameters)

    def reset_moments(self) -> None:
        self._optimizer = adamw([{"params": self._parameters}])

    def step(self, adam: Mapping[str, float]) -> dict[str, float]:
        """Make a step of AdamW with gradients so far, and clear them.

        Without any gradient, or with one that is not finite, weights and moments stay.
        """
        for group in self._optimizer.param_groups:
            group |= {
                "lr": adam["learning_rate"],
                "betas": (adam["beta1"], adam["beta2"]),
                "eps": adam["eps"],
                "weight_decay": adam["weight_decay"],
            }
        if all(each.grad is None for each in self._parameters):
            return {"grad_norm": 0.0, "skipped": 1.0, "step": float(self.num_steps)}
        told = clipped_step(self._optimizer, self._scaler, self._parameters, adam["grad_clip_norm"], is_finite=True)
        self._optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return {"grad_norm": told["grad_norm"], "skipped": told["skipped"], "step": float(self.num_steps)}

    def save(self, folder: Path, *, optimizer: bool, gradients: bool = False) -> None:
        """Save weights, and optionally moments and gradients, into a new folder."""
        save_policy(self.policy, folder / POLICY)
        if optimizer:
            state: dict[str, Any] = {"optimizer": self._optimizer.state_dict(), "num_steps": self.num_steps}
            if gradients:
                state["gradients"] = [each.grad for each in self._parameters]
            torch.save(state, folder / MOMENTS)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Load weights, and moments or fresh ones. ValueError for a mismatch."""
        if optimizer and not (folder / MOMENTS).is_file():
            raise ValueError(f"{folder.name} holds no optimizer state: load it without, or save it by save_state")
        load_weights(self.policy, folder)
        self.reset_moments()
        for parameter in self._parameters:
            parameter.grad = None
        if not optimizer:
            return
        state = torch.load(folder / MOMENTS, weights_only=True, map_location=self.policy.device)
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_steps = state["num_steps"]
        for parameter, grad in zip(self._parameters, state.get("gradients") or [], strict=False):
            parameter.grad = grad
