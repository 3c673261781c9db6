from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StopAfterThree(TrainerCallback):
    def __init__(self):
        self.rewards = []
        self.saved = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            self.rewards.append(logs["reward"])

    def on_save(self, args, state, control, **kwargs):
        self.saved.append(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= 3:
            control.should_training_stop = True
        return control


callback = StopAfterThree()
trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=lambda completions, **kwargs: [float("a" in text) for text in completions],
    args=GRPOConfig(
        output_dir="callbacks",
        max_steps=10,
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=6,
        logging_steps=1,
        logging_first_step=True,
        save_steps=2,
        save_total_limit=1,
        bf16=False,
    ),
    train_dataset=Dataset.from_list([{"prompt": f"say {n}:"} for n in range(10)]),
    callbacks=[callback],
)
trainer.train()
assert trainer.state.global_step == 3
assert len(callback.rewards) == 3
assert callback.saved == [2, 3]
