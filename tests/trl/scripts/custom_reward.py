import re

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def reward_answer(prompts, completions, ground_truth, **kwargs):
    found = [re.search(r"\d+", completion) for completion in completions]
    return [
        1.0 if match and match[0] == truth else 0.1 * len(text)
        for match, truth, text in zip(found, ground_truth, completions)
    ]


rows = [{"prompt": f"{a}+{b}=", "ground_truth": str(a + b)} for a in range(4) for b in range(4)]
dataset = Dataset.from_list(rows).train_test_split(test_size=4, seed=0)
training_args = GRPOConfig(
    output_dir="custom",
    learning_rate=1e-4,
    num_train_epochs=1,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_generations=4,
    max_completion_length=4,
    logging_steps=2,
    eval_strategy="steps",
    eval_steps=3,
    per_device_eval_batch_size=4,
    save_strategy="no",
    bf16=False,
)
trainer = GRPOTrainer(MODEL, reward_answer, training_args, train_dataset=dataset["train"], eval_dataset=dataset["test"])
result = trainer.train()
trainer.log_metrics("train", result.metrics)
trainer.save_metrics("train", result.metrics)
trainer.save_metrics("eval", trainer.evaluate())
trainer.save_state()
trainer.save_model("custom/final")
