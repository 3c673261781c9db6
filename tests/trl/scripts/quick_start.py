from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

dataset = Dataset.from_list([{"prompt": f"Write {number} letters:"} for number in range(32)])


def num_unique_letters(completions, **kwargs):
    return [float(len(set(completion))) / 8 for completion in completions]


trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=num_unique_letters,
    args=GRPOConfig(
        output_dir="quick", max_steps=2, per_device_train_batch_size=8, max_completion_length=6, bf16=False
    ),
    train_dataset=dataset,
)
trainer.train()
