from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

peft_config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def reward_len(completions, **kwargs):
    return [-abs(4 - len(completion)) for completion in completions]


trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=reward_len,
    args=GRPOConfig(
        output_dir="lora",
        learning_rate=1e-3,
        max_steps=2,
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=6,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        beta=0.01,
        bf16=False,
    ),
    train_dataset=Dataset.from_list([{"prompt": f"say {n}:"} for n in range(10)]),
    peft_config=peft_config,
)
trainer.train()
trainer.save_model("lora/adapter")
