"""What settings of TorchRL's and verl's GRPO scripts are called here, by their full names and with their values.

The last parts of names, and those of TRL and transformers, are in `covey.config.names`.
"""

from collections.abc import Mapping

from covey.config.counterparts import (
    Answer,
    Counterpart,
    choice,
    device,
    epochs,
    groups_of_turns,
    loggers,
    none,
    off_below_1,
    reference,
    same,
    steps,
    switch,
    targets,
    whole,
)
from covey.policy.models.naming import ONE_DEVICE

LORA = "model.lora_rank=0"
MICRO = "micro_batch_tokens bounds the memory of a pass, and never changes the update"
MINI = "of an optimiser step, a multiple of group_size; micro_batch_tokens bounds the memory of a pass"
SAMPLES_AS_TRAINED = "what samples has the weights, precision and attention of what is trained"
REFERENCE = (
    "the reference is the policy as it began (with LoRA: its base), in model.precision; "
    "algorithm.reference_model names another"
)
COMPILES = "models are not compiled by torch.compile; model.kernels=auto has kernels where they pay"
COMPARES = "with algorithm.kl_coef above 0"
NEEDS_RAY = "with source=ray"
OF_BOTH = "of prompt and completion together; prompts are never cut"
VERL_STEPS = "trainer.total_training_steps counts where it is set; verl leaves out a last batch that is not full"
TRL_STEPS = "max_steps counts where it is above 0; TRL leaves out the last batch of a pass that is not full"
PER_REPEATS = "completions / env.repeats (16 by default)"
PLACES = "devices.trainer, devices.sampler and Ray's cluster (RAY_ADDRESS) say what runs where"
NO_CRITIC = "GRPO has no critic"

TORCHRL: dict[str, Counterpart] = {
    "mode": choice(sync="source=local", **{"async": "source=ray max_staleness=2"}),
    "env.dataset": choice(**{name: f"recipe={name}" for name in ("gsm8k", "ifeval", "math", "countdown")}),
    "env.num_envs": same("engine.max_rows={}", note="rows that are sampled at a time"),
    "env.repeats": same("group_size={}"),
    "env.seed": same("seed={}"),
    "env.reasoning": none("environment.scheme and environment.instruction say how an answer is asked for"),
    "env.max_steps": none("environments that reply have as many turns as their limit says"),
    "model.compile": switch(off="", note=COMPILES),
    "policy.kl_coef": same("algorithm.kl_coef={}"),
    "train.sync": switch("source=local", "source=ray max_staleness=2"),
    "train.sync_iter": switch("max_staleness=0", "source=ray max_staleness=1"),
    "train.total_dialog_turns": Counterpart(computed=whole("total_rollouts")),
    "train.dialog_turns_per_batch": Counterpart(computed=groups_of_turns, note=PER_REPEATS),
    "train.steps_per_batch": Counterpart(computed=groups_of_turns, note=PER_REPEATS),
    "train.buffer_size": none("with source=ray (max_staleness + 1) x groups_per_step groups are held, none otherwise"),
    "train.empty_replay_buffer": switch("", note="a group is trained on in its step, and in no other"),
    "train.epochs": same("updates_per_batch={}"),
    "train.optim_batch_size": same("mini_batch_rollouts={}", note=MINI),
    "train.gradient_accumulation_steps": none(MICRO),
    "train.checkpoint_frequency": same("output.save_every={}"),
    "train.logging_frequency": none("every step is logged"),
    "train.mixed_precision": switch("model.precision=bfloat16", "model.precision=float32"),
    "train.kl_to_ref_coeff": same("algorithm.kl_coef={}"),
    "train.use_kl_to_ref": switch("", "algorithm.kl_coef=0"),
    "train.kl_to_inference_coeff": same("algorithm.sampler_kl_coef={}"),
    "train.kl_coef_in_loss": switch("algorithm.kl_in=loss", "algorithm.kl_in=reward"),
    "train.entropy_coeff": same("algorithm.entropy_coef={}"),
    "train.weight_update_frequency": same("publish_every={}", note=NEEDS_RAY),
    "train.packing": switch("packing=packed", "packing=padded"),
    "train.exp_name": same("hydra.run.dir=outputs/{}"),
    "train_model.num_devices": same("devices.trainer={}", note=NEEDS_RAY),
    "train_model.gradient_checkpointing": same("model.gradient_checkpointing={}"),
    "train_model.lora.enabled": switch("", LORA),
    "train_model.lora.r": same("model.lora_rank={}"),
    "train_model.lora.alpha": same("model.lora_alpha={}"),
    "train_model.lora.dropout": same("model.lora_dropout={}"),
    "train_model.quantization.enabled": same("model.load_in_4bit={}"),
    "train_model.torch_dtype": same("model.precision={}"),
    "train_model.attn_implementation": choice("model.attention=auto takes the fastest", sdpa="model.attention=sdpa"),
    "inference_model.num_devices": same("devices.sampler={}", note=NEEDS_RAY),
    "inference_model.gpu_memory_utilization": same("engine=vllm", "engine.gpu_memory_utilization={}"),
    "inference_model.temperature": same("sampling.temperature={}"),
    "inference_model.top_p": same("sampling.top_p={}"),
    "inference_model.top_k": same("sampling.top_k={}"),
    "inference_model.max_tokens": same("sampling.max_tokens={}"),
    "inference_model.max_model_len": same("sampling.max_total_tokens={}", note=OF_BOTH),
    **dict.fromkeys(
        ("inference_model.torch_dtype", "inference_model.attn_implementation", "inference_model.quantization.enabled"),
        none(SAMPLES_AS_TRAINED),
    ),
    "ref_model.name": same("algorithm.reference_model={}", note=COMPARES),
    "ref_model.num_devices": same("devices.reference={}", note=NEEDS_RAY),
    "optimizer.clip_grad_norm": same("optimizer.max_grad_norm={}"),
    "logging.experiment_name": same("hydra.run.dir=outputs/{}"),
    "logging.checkpoint_dir": none("checkpoints are in the run folder, which hydra.run.dir names"),
    "logging.checkpoint_frequency": same("output.save_every={}"),
}
"""Settings of `grpo-sync.py` and `grpo-async.py`."""

BOTH_CLIPS = same("algorithm.loss_options.eps_low={}", "algorithm.loss_options.eps_high={}")
KL_ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
AGGREGATIONS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
VERL: dict[str, Counterpart] = {
    "data.train_files": same("data.path={}"),
    "data.val_files": none("held-out rows are data.test_split of data.path, or data.test_fraction of its rows"),
    "data.train_batch_size": same("groups_per_step={}"),
    "data.max_prompt_length": none("prompts are never cut; the preflight names those that the model cannot take"),
    "data.max_response_length": same("sampling.max_tokens={}"),
    "data.prompt_key": same("data.prompt_column={}"),
    "data.shuffle": same("shuffle={}"),
    "data.seed": same("seed={}"),
    "data.filter_overlong_prompts": none("data.bad_rows says what becomes of rows that cannot be used"),
    "data.truncation": none("prompts are never cut"),
    f"{MODEL}.path": same("model.name={}"),
    f"{MODEL}.lora_rank": same("model.lora_rank={}"),
    f"{MODEL}.lora_alpha": same("model.lora_alpha={}"),
    f"{MODEL}.target_modules": Counterpart(computed=targets),
    f"{MODEL}.enable_gradient_checkpointing": same("model.gradient_checkpointing={}"),
    f"{MODEL}.enable_activation_offload": same("model.activation_offload={}"),
    f"{MODEL}.use_remove_padding": switch("", "packing=padded", note="packing=shared, the default, pads nothing"),
    f"{MODEL}.trust_remote_code": switch(off="", note="code of a repository is never run"),
    "actor_rollout_ref.ref.model.path": same("algorithm.reference_model={}", note=COMPARES),
    f"{ACTOR}.strategy": choice(fsdp="parallel.strategy=fsdp", fsdp2="parallel.strategy=fsdp"),
    f"{ACTOR}.optim.lr": same("optimizer.lr={}"),
    f"{ACTOR}.optim.lr_warmup_steps": same("optimizer.warmup_steps={}"),
    f"{ACTOR}.optim.weight_decay": same("optimizer.weight_decay={}"),
    f"{ACTOR}.optim.warmup_style": choice(constant="optimizer.schedule=constant", cosine="optimizer.schedule=cosine"),
    f"{ACTOR}.grad_clip": same("optimizer.max_grad_norm={}"),
    f"{ACTOR}.ppo_mini_batch_size": same("mini_batch_groups={}"),
    **dict.fromkeys((f"{ACTOR}.ppo_micro_batch_size", f"{ACTOR}.ppo_micro_batch_size_per_gpu"), none(MICRO)),
    f"{ACTOR}.ppo_max_token_len_per_gpu": same("micro_batch_tokens={}"),
    f"{ACTOR}.use_dynamic_bsz": none(MICRO),
    f"{ACTOR}.use_torch_compile": switch(off="", note=COMPILES),
    f"{ACTOR}.ppo_epochs": same("updates_per_batch={}"),
    f"{ACTOR}.clip_ratio": BOTH_CLIPS,
    f"{ACTOR}.clip_ratio_low": same("algorithm.loss_options.eps_low={}"),
    f"{ACTOR}.clip_ratio_high": same("algorithm.loss_options.eps_high={}"),
    f"{ACTOR}.clip_ratio_c": same("algorithm.loss_options.dual_clip={}"),
    f"{ACTOR}.use_kl_loss": switch("algorithm.kl_in=loss", "", note="algorithm.kl_coef=0, the default, has no KL"),
    f"{ACTOR}.kl_loss_coef": same("algorithm.kl_coef={}"),
    f"{ACTOR}.kl_loss_type": choice(
        **{name: f"algorithm.kl_estimator={own} algorithm.kl_gradient=naive" for name, own in KL_ESTIMATORS.items()}
    ),
    f"{ACTOR}.entropy_coeff": same("algorithm.entropy_coef={}"),
    f"{ACTOR}.loss_agg_mode": choice(**{mode: f"algorithm.aggregation={mode}" for mode in AGGREGATIONS}),
    f"{ACTOR}.policy_loss.loss_mode": choice(
        vanilla="algorithm.loss=clip",
        gspo="algorithm=gspo",
        gpg="algorithm=gpg",
        clip_cov="algorithm=clip_cov",
        kl_cov="algorithm=kl_cov",
        geo_mean="algorithm=gmpo",
    ),
    f"{ROLLOUT}.name": choice("covey samples by its own engine or by vLLM", vllm="engine=vllm", hf="engine=native"),
    f"{ROLLOUT}.mode": none("source=ray samples while the trainer trains"),
    f"{ROLLOUT}.n": same("group_size={}"),
    f"{ROLLOUT}.temperature": same("sampling.temperature={}"),
    f"{ROLLOUT}.top_p": same("sampling.top_p={}"),
    f"{ROLLOUT}.top_k": Counterpart(computed=off_below_1("sampling.top_k")),
    f"{ROLLOUT}.gpu_memory_utilization": same("engine.gpu_memory_utilization={}", note="with engine=vllm"),
    f"{ROLLOUT}.max_model_len": same("sampling.max_total_tokens={}", note=OF_BOTH),
    f"{ROLLOUT}.max_num_seqs": same("engine.max_rows={}"),
    f"{ROLLOUT}.val_kwargs.n": same("evaluation.num_samples={}"),
    "algorithm.adv_estimator": choice(
        NO_CRITIC,
        grpo="algorithm.advantage=group_zscore",
        rloo="algorithm=rloo",
        opo="algorithm=opo",
        reinforce_plus_plus_baseline="algorithm=reinforce_plus_plus_baseline",
        grpo_passk="algorithm=best_minus_second",
        gpg="algorithm=gpg",
        gigpo="algorithm.turn_credit=anchor_state",
    ),
    "algorithm.gigpo.step_advantage_w": same(
        "algorithm.turn_credit=anchor_state", "algorithm.turn_credit_options.weight={}"
    ),
    "algorithm.gigpo.mode": choice(
        mean_norm="algorithm.turn_credit=anchor_state algorithm.turn_credit_options.scale=none",
        mean_std_norm="algorithm.turn_credit=anchor_state",
    ),
    "algorithm.norm_adv_by_std_in_grpo": switch("", "algorithm.advantage=group_center"),
    "algorithm.use_kl_in_reward": switch("algorithm.kl_in=reward", ""),
    "algorithm.kl_ctrl.kl_coef": same("algorithm.kl_coef={}"),
    "algorithm.kl_ctrl.target_kl": same("algorithm.target_kl={}"),
    "algorithm.kl_ctrl.horizon": same("algorithm.kl_horizon={}"),
    "algorithm.kl_ctrl.type": choice(fixed="", adaptive="", note="algorithm.target_kl adapts the coefficient"),
    **dict.fromkeys(
        ("custom_reward_function.path", "custom_reward_function.name"),
        none("write environment=reward_functions rewards=[MODULE:FUNCTION]"),
    ),
    "trainer.total_epochs": Counterpart(computed=epochs("trainer.total_training_steps"), note=VERL_STEPS),
    "trainer.total_training_steps": Counterpart(computed=steps, note="null leaves it to trainer.total_epochs"),
    "trainer.save_freq": Counterpart(computed=off_below_1("output.save_every")),
    "trainer.test_freq": Counterpart(computed=off_below_1("evaluation.every")),
    "trainer.val_before_train": switch("", note="every run is evaluated before its first step"),
    "trainer.logger": Counterpart(computed=loggers, note="the console and metrics.jsonl are always there"),
    "trainer.project_name": same("output.wandb_project={}", note="with wandb among output.trackers"),
    "trainer.experiment_name": same("hydra.run.dir=outputs/{}"),
    "trainer.default_local_dir": same("hydra.run.dir={}"),
    "trainer.resume_mode": choice("resume=FOLDER resumes a run", auto="resume=latest", disable=""),
    "trainer.n_gpus_per_node": none("torchrun --nproc-per-node=N -m covey train; " + PLACES),
    "trainer.nnodes": none("torchrun --nnodes=N -m covey train; " + PLACES),
}
"""Settings of verl's GRPO scripts."""

DOCUMENTS: dict[str, Counterpart] = {
    "credit.turns": same("algorithm.turn_credit={}"),
    "advantage_estimator": Counterpart(choices={"pass@k": ("algorithm=pass_at_k",), "grpo": ("algorithm=grpo",)}),
    "pass_k": same("algorithm.advantage_options.k={}", note="with algorithm=pass_at_k, k below group_size"),
    "kl_penalty_weight": same("algorithm.kl_coef={}"),
    "use_mixed_precision": switch("model.precision=bfloat16", "model.precision=float32"),
    "mixed_precision": choice(
        bf16="model.precision=bfloat16", fp16="model.precision=float16", no="model.precision=float32"
    ),
    "batch_size": same("groups_per_step={}", note="prompts; where it counts completions, divide it by group_size"),
    "train_dataset": same("data.path={}"),
    **dict.fromkeys(("tokenizer", "use_fast", "task_type", "mask_token_id"), none("the model's folder says it")),
    "problem": same("recipe=code", "environment.problem={}"),
    "difficulty": same("environment.difficulty={}"),
    "test_cases": same("environment.tests_per_problem={}"),
    **dict.fromkeys(("training_steps", "steps", "max_iters"), same("num_steps={}")),
    **dict.fromkeys(
        (
            *("max_seq_length", "max_seq_len", "seq_len", "max_length"),
            *("max_model_len", "max_model_length", "vllm_max_model_length"),
        ),
        same("sampling.max_total_tokens={}", note=OF_BOTH),
    ),
    "kl_beta": same("algorithm.kl_coef={}"),
    "generations": same("group_size={}"),
    "mini_batch_size": same("mini_batch_rollouts={}", note=MINI),
    **dict.fromkeys(("clip_range", "clip_epsilon", "eps_clip"), BOTH_CLIPS),
    **dict.fromkeys(
        ("ref_model", "ref_model_path", "ref_model_name_or_path", "reference_model_path"),
        Counterpart(computed=reference, note=f"None is the policy as it began; {COMPARES}"),
    ),
    "trainer.optim.lr": same("optimizer.lr={}"),
    "orchestrator.rollouts_per_example": same("group_size={}"),
    "orchestrator.sampling.max_tokens": same("sampling.max_tokens={}"),
    "orchestrator.sampling.temperature": same("sampling.temperature={}"),
    "device_map": Counterpart(computed=device, note=ONE_DEVICE),
    "reward_fn": same("environment=reward_functions", "rewards=[{}]", note="as MODULE:FUNCTION"),
    "num_train_epochs": Counterpart(computed=epochs("max_steps"), note=TRL_STEPS),
    "max_steps": Counterpart(computed=steps, note="-1 leaves it to num_train_epochs"),
}
"""Words that scripts of other systems have without a section."""

PREFIXES: dict[str, str] = {
    "critic.": NO_CRITIC,
    "trainer.critic_warmup": NO_CRITIC,
    "ray.": PLACES,
    **dict.fromkeys(("actor_rollout_ref.ref.", "ref_model."), REFERENCE),
    **dict.fromkeys(
        ("inference_model.", f"{ROLLOUT}."),
        "vLLM is started by covey, with engine.gpu_memory_utilization, or joined by engine.url",
    ),
    f"{ACTOR}.fsdp_config.": "parallel.strategy=fsdp shards weights, gradients and optimiser state",
    "reward_model.": "a reward model is one of rewards: rewards=[{function: reward_model, args: {model: NAME}}]",
    **dict.fromkeys(
        ("actor_rollout_ref.", "trainer.", "env.", "train.", "train_model.", "policy.", "logging."),
        "covey has nothing like it",
    ),
}
"""What is said of any other setting that begins so. The first that fits counts."""

AMBIGUOUS = {"num_devices", "enabled", "r", "n", "name", "path", "type", "mode"}
"""Last parts that say nothing without what stands before them."""
CONFIG_NAMES = {
    "grpo_gsm8k": "recipe=gsm8k",
    "grpo_ifeval": "recipe=ifeval",
    "grpo_math": "recipe=math",
    "grpo_countdown": "recipe=countdown",
    "ppo_trainer": "recipe=gsm8k",
}
"""What --config-name names in TorchRL and verl."""

ALL = TORCHRL | VERL | DOCUMENTS
LAST_PARTS = {
    name.rpartition(".")[2]: counterpart
    for name, counterpart in reversed(ALL.items())
    if name.rpartition(".")[2] not in AMBIGUOUS
}
"""The same by the last parts of names; TorchRL's count before verl's."""


def answer(name: str, value: str, given: Mapping[str, str]) -> Answer | None:
    """Return what a setting of another system is here, None for a name that none of them has.

    >>> answer("train.sync_iter", "False", {})
    Answer(words=('source=ray', 'max_staleness=1'), note='')
    """
    if (known := ALL.get(name) or LAST_PARTS.get(name)) is not None:
        return known.answer(value, given)
    note = next((note for prefix, note in PREFIXES.items() if name.startswith(prefix)), None)
    return None if note is None else Answer((), note)


def in_a_line(name: str, value: str, found: Answer) -> str:
    """Say in words what a foreign setting is here.

    >>> in_a_line("train.sync_iter", "False", Answer(("source=ray", "max_staleness=1")))
    'train.sync_iter=False is source=ray max_staleness=1 here'
    """
    note = f" ({found.note})" if found.note else ""
    if found.words:
        return f"{name}={value} is {' '.join(found.words)} here{note}"
    return f"{name}={value} is no setting here{note or ' and need not be said'}"
