from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(
    output_dir="vllm",
    max_steps=1,
    num_generations=4,
    per_device_train_batch_size=4,
    max_completion_length=6,
    use_vllm=True,
    vllm_mode="server",
    vllm_server_base_url="http://localhost:8000",
    vllm_importance_sampling_mode="token_truncate",
    vllm_importance_sampling_clip_max=2.0,
    bf16=False,
)
trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=lambda completions, **kwargs: [float(len(text)) for text in completions],
    args=args,
    train_dataset=Dataset.from_list([{"prompt": f"say {n}:"} for n in range(10)]),
)
