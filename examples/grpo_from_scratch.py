"""GRPO from scratch, in one file: sample, reward, advantage, loss, step. Read it from top to bottom.

    covey cold-start recipe=arithmetic              # prints the folder of a policy that solves a third
    python examples/grpo_from_scratch.py FOLDER     # teaches it more: minutes on a laptop

It needs torch and transformers alone. A test trains covey beside it: from the same draws, loss, gradients and weights
are the same to the last bit in float64 (tests/docs/test_grpo_from_scratch.py). What covey adds is everything around
these lines: any model and task, engines, packing, many ranks, checkpoints, deadlines.

Shapes: N rollouts (groups of M, one after the other), T positions, L tokens that the policy wrote, V vocabulary.
"""

import argparse
import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

NUM_STEPS, NUM_GROUPS, GROUP_SIZE, MAX_TOKENS = 100, 64, 8, 8
LEARNING_RATE, WARMUP_STEPS, BETAS, MAX_GRAD_NORM = 2e-4, 10, (0.9, 0.99), 1.0
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def make_sum(generator: random.Random) -> tuple[str, str]:
    """Return a prompt and its answer: ("41+37=", "78")."""
    a, b = generator.randrange(10, 100), generator.randrange(10, 100)
    return f"{a}+{b}=", str(a + b)


@dataclass
class Rollouts:
    """Prompts with their completions. Position t reads token t and predicts token t + 1."""

    tokens: Tensor  # (N, T + 1) prompt, completion, padding
    mask: Tensor  # (N, T) True where the predicted token is one that the policy wrote


@torch.no_grad()
def sample(model: PreTrainedModel, prompts: Tensor, end: int, uniform: Tensor) -> Rollouts:
    """Continue each prompt (N, P) by a token a time until `end`, or until `uniform` (N, MAX_TOKENS) is used up.

    A token is drawn by inverting the cumulative distribution: the first one at which it exceeds a number in [0, 1).
    """
    tokens, ended = prompts, torch.zeros(len(prompts), dtype=torch.bool)
    for uniform_N in uniform.unbind(dim=1):
        logits = model(tokens).logits[:, -1]  # the whole text is read again for each token: slow, and short
        cumulative = logits.softmax(dim=-1).double().cumsum(dim=-1)
        drawn = (cumulative <= uniform_N[:, None] * cumulative[:, -1:]).sum(dim=-1)
        drawn = torch.where(ended, end, drawn)
        tokens = torch.cat([tokens, drawn[:, None]], dim=1)
        ended = ended | (drawn == end)
    is_end = tokens[:, prompts.shape[1] :] == end
    written = is_end.cumsum(dim=1) - is_end.long() == 0  # everything up to the first end, and that itself
    return Rollouts(tokens, torch.cat([torch.zeros_like(prompts[:, 1:], dtype=torch.bool), written], dim=1))


def reward(completion: str, answer: str) -> float:
    """Return 1 for the right number and nothing else, 0 for all the rest: no partial credit, no judge."""
    return float(completion.strip() == answer)


def group_advantages(rewards: Tensor) -> Tensor:
    """Return how many standard deviations each reward (N,) lies above the mean of its group, (N,).

    The siblings are the baseline: no value network. A group of equal rewards says nothing, and gets 0.
    """
    groups = rewards.view(-1, GROUP_SIZE)
    centered = groups - groups.mean(dim=1, keepdim=True)
    std = (centered.square().sum(dim=1, keepdim=True) / (GROUP_SIZE - 1)).sqrt()
    return (centered / (std + 1e-6)).flatten()


class TokenLogProbs(torch.autograd.Function):
    """Log-probs (L,) of tokens under logits (L, V). Their gradient is the heart of every policy gradient:

    d log p(token) / d logits = 1 at the token - p. It lifts the token, and lowers all by what they were likely.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, logits: Tensor, tokens: Tensor) -> Tensor:
        shifted = logits - logits.amax(dim=-1, keepdim=True)
        log_probs = shifted - shifted.exp().sum(dim=-1, keepdim=True).log()
        ctx.save_for_backward(log_probs, tokens)
        return log_probs.gather(1, tokens[:, None])[:, 0]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        log_probs, tokens = ctx.saved_tensors
        return (-gradient[:, None] * log_probs.exp()).scatter_add(1, tokens[:, None], gradient[:, None]), None


def policy_loss(model: PreTrainedModel, rollouts: Rollouts, advantages: Tensor, num_tokens: int) -> Tensor:
    """Return PPO's clipped loss, a scalar: likelier than before where the advantage is positive, but not by too much.

    One update on a batch begins where the old policy is the current one: every ratio is 1, and its gradient counts.
    Each token of the step weighs 1 / `num_tokens`, in long completions as in short ones.
    """
    width = int(rollouts.mask.any(dim=0).nonzero().max()) + 1
    tokens, mask = rollouts.tokens[:, : width + 1], rollouts.mask[:, :width]
    hidden = model.base_model(tokens[:, :-1]).last_hidden_state[mask]  # (L, C): logits of other tokens are not read
    log_probs = TokenLogProbs.apply(model.get_output_embeddings()(hidden), tokens[:, 1:][mask])
    ratio = (log_probs - log_probs.detach()).exp()
    advantage = advantages[:, None].expand_as(mask)[mask]
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    loss = torch.maximum(-ratio * advantage, -clipped * advantage)
    by_rollout = loss.new_zeros(mask.shape).masked_scatter(mask, loss).sum(dim=1)
    return (by_rollout * (1 / num_tokens)).sum()


def update(model: PreTrainedModel, optimizer: torch.optim.Optimizer, rollouts: Rollouts, rewards: Tensor) -> Tensor:
    """Make one step of AdamW on the rollouts, and return the loss."""
    advantages, num_tokens = group_advantages(rewards), int(rollouts.mask.sum())
    teaching = advantages != 0  # the others have no gradient, and are only counted
    if not bool(teaching.any()):
        return torch.zeros(())
    kept = Rollouts(rollouts.tokens[teaching], rollouts.mask[teaching])
    loss = policy_loss(model, kept, advantages[teaching], num_tokens)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return loss.detach()


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    """Train on sums, and print the share that is right: the curve to watch."""
    torch.manual_seed(seed)
    generator = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True)
    for step in range(NUM_STEPS):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        sums = [make_sum(generator) for _ in range(NUM_GROUPS)]
        repeated = [one for one in sums for _ in range(GROUP_SIZE)]
        prompts = torch.tensor([tokenizer(text)["input_ids"] for text, _ in repeated])  # all of one length
        rollouts = sample(model, prompts, tokenizer.eos_token_id, torch.rand(len(prompts), MAX_TOKENS))
        completions = tokenizer.batch_decode(rollouts.tokens[:, prompts.shape[1] :], skip_special_tokens=True)
        rewards = torch.tensor([reward(c, answer) for c, (_, answer) in zip(completions, repeated, strict=True)])
        loss = update(model, optimizer, rollouts, rewards)
        print(f"step {step + 1:3}  right {float(rewards.mean()):.3f}  loss {float(loss):+.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Teach a small policy to add, by GRPO.")
    parser.add_argument("folder", help="a policy with its tokenizer: `covey cold-start recipe=arithmetic` makes one")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    policy = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    train(policy, AutoTokenizer.from_pretrained(options.folder), options.seed)
