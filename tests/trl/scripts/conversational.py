from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SYSTEM = "Answer briefly."


def to_messages(example):
    return {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": example["question"]}]}


dataset = Dataset.from_list([{"question": f"What is {n} and {n}?"} for n in range(12)]).map(to_messages)


def brevity(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [-len(content) / 10 for content in contents]


model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[brevity],
    args=GRPOConfig(
        output_dir="chat",
        max_steps=2,
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=6,
        temperature=0.9,
        beta=0.04,
        scale_rewards=False,
        loss_type="dr_grpo",
        bf16=False,
        report_to="none",
    ),
    train_dataset=dataset,
)
trainer.train()
assert trainer.model is model
