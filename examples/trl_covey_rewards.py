"""covey's environments and rewards in TRL's own GRPOTrainer (pip install trl).

    python examples/trl_covey_rewards.py --model Qwen/Qwen2.5-0.5B-Instruct --steps 100

The environment makes the rows and judges the answers; length and repetition are priced beside it.
"""

import argparse

import torch
from datasets import Dataset

from covey.environments.arithmetic import Arithmetic
from covey.rewards import Repetition, SoftOverlong, for_trl, trl_rows
from trl import GRPOConfig, GRPOTrainer

MAX_TOKENS = 32


def make_trainer(model: str, num_steps: int, folder: str) -> GRPOTrainer:
    """A trainer whose rewards are all covey's; `model` is a folder or a hub name."""
    environment = Arithmetic(levels=(1, 2), num_train=512, num_test=64)
    settings = GRPOConfig(
        output_dir=folder,
        max_steps=num_steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=MAX_TOKENS,
        learning_rate=1e-6,
        reward_weights=[1.0, 0.2, 0.1],
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        report_to="none",
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=[for_trl(environment), SoftOverlong(max_length=MAX_TOKENS, cache=16), Repetition(ngram=3)],
        args=settings,
        train_dataset=Dataset.from_list(trl_rows(environment)),
        eval_dataset=Dataset.from_list(trl_rows(environment, "test")),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO of TRL with the rewards of covey")
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", default="outputs/trl")
    given = parser.parse_args()
    trainer = make_trainer(given.model, given.steps, given.folder)
    trainer.train()
    for row in trainer.state.log_history:
        if "reward" in row:
            print(f"step {row['step']}  reward {row['reward']:.3f}  right {row['rewards/arithmetic/mean']:.3f}")


if __name__ == "__main__":
    main()
