from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

judge = AutoModelForSequenceClassification.from_pretrained(JUDGE, num_labels=1)
judge_tokenizer = AutoTokenizer.from_pretrained(JUDGE)


def short(completions, **kwargs):
    return [-len(text) / 8 for text in completions]


trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=[JUDGE, judge, short],
    reward_processing_classes=[None, judge_tokenizer, None],
    args=GRPOConfig(
        output_dir="judged",
        max_steps=1,
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=6,
        logging_steps=1,
        bf16=False,
    ),
    train_dataset=Dataset.from_list([{"prompt": f"why {n}? "} for n in range(10)]),
)
trainer.train()
