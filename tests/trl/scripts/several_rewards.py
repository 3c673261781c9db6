from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def length_reward(completion_ids, **kwargs):
    return [len(ids) / 8 for ids in completion_ids]


async def vowels(completions, **kwargs):
    return [sum(text.count(vowel) for vowel in "aeiou") / 8 for text in completions]


def only_even(prompts, completions, number, log_metric=None, **kwargs):
    log_metric("seen", float(len(completions)))
    return [0.5 if n % 2 == 0 else None for n in number]


config = GRPOConfig(
    output_dir="several",
    max_steps=3,
    num_generations=4,
    generation_batch_size=8,
    per_device_train_batch_size=8,
    max_completion_length=6,
    reward_weights=[1.0, 0.5, 0.2],
    multi_objective_aggregation="normalize_then_sum",
    num_iterations=3,
    epsilon_high=0.28,
    logging_steps=1,
    bf16=False,
)
trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=[length_reward, vowels, only_even],
    args=config,
    train_dataset=Dataset.from_list([{"prompt": f"say {n}:", "number": n} for n in range(10)]),
)
trainer.train()
assert "rewards/vowels/mean" in trainer.state.log_history[-1], trainer.state.log_history[-1]
