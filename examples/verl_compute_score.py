"""covey's judges in verl, by the name of the data source:

    python -m verl.trainer.main_ppo ... \\
        custom_reward_function.path=examples/verl_compute_score.py \\
        custom_reward_function.name=compute_score

Settings of a judge go in as +custom_reward_function.reward_kwargs.scheme=verl_strict. Run this file by itself to see a
few rows judged.
"""

from covey.rewards import compute_score

__all__ = ["compute_score"]

ROWS = [
    {"data_source": "openai/gsm8k", "solution_str": "6 * 7 is 42.\n#### 42", "ground_truth": "42"},
    {"data_source": "openai/gsm8k", "solution_str": "That makes \\boxed{42.0}", "ground_truth": "42"},
    {"data_source": "openai/gsm8k", "solution_str": "6 * 7 is 43.\n#### 43", "ground_truth": "42"},
    {"data_source": "arithmetic", "solution_str": "48", "ground_truth": 48},
]

if __name__ == "__main__":
    for row in ROWS:
        print(f"{compute_score(**row, extra_info=None):g}  {row['solution_str']!r}")
