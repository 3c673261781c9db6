from trl import GRPOConfig, GRPOTrainer

SEEN = []


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


class Shop:
    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, thing, **row) -> str:
        self.thing = thing
        return f" There are {thing}s."

    def buy(self, thing: str) -> str:
        """
        Buy a thing.

        Args:
            thing: Which one.
        """
        return "sold" if thing == self.thing else "none left"

    def get_reward(self) -> float:
        return 0.5


def length(completions, environments, thing, **kwargs):
    SEEN.append((completions, [type(shop).__name__ for shop in environments], thing))
    return [float(len(messages[-1]["content"])) for messages in completions]


trainer = GRPOTrainer(
    MODEL,
    reward_funcs=length,
    args=GRPOConfig(
        output_dir="shop",
        max_steps=2,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        max_tool_calling_iterations=3,
        bf16=False,
        report_to="none",
        logging_steps=1,
    ),
    train_dataset=[
        {"prompt": [{"role": "user", "content": f"Buy number {n}."}], "thing": name}
        for n, name in enumerate(["cow", "hen", "ox", "pig"])
    ],
    tools=[multiply],
    environment_factory=Shop,
)
trainer.train()
