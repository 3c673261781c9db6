"""For each setting another value, what that value changes, and beside which settings it means something."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from covey.algorithm.settings import BY_TURN
from covey.config.schema import Config
from covey.environments.data.settings import DataConfig
from covey.environments.settings import ArithmeticConfig
from covey.rollouts.settings import GroupSizeStep
from covey_tasks.math.settings import Gsm8kConfig

from . import settings_cluster as cluster
from . import settings_code as code
from . import settings_doors as doors
from . import settings_episodes as episodes
from . import settings_ifeval as ifeval
from . import settings_infill as infill
from . import settings_machines as machines
from . import settings_observed as see
from . import settings_watched as watch

Settings = Mapping[str, Any]
Observation = Callable[[Config], Any]


@dataclass(frozen=True)
class Case:
    """`observe` returns something else where the setting has this value."""

    observe: Observation
    value: Any
    context: Settings = field(default_factory=dict)
    """What both runs have."""
    along: Settings = field(default_factory=dict)
    """What only the changed run has: settings that the value asks for."""
    keeps: Observation | None = None
    """What must stay the same nevertheless: the promise of settings about speed and memory."""


@dataclass(frozen=True)
class Refused:
    """The setting has one value; another is refused with a line that names it."""

    value: Any
    line: str


def trains(value: Any, **changes: Any) -> Case:
    """A setting that changes the update. Plain SGD: AdamW and clipping would hide the size of a gradient."""
    along = changes.pop("along", {})
    return Case(see.update, value, SGD | {name.replace("__", "."): v for name, v in changes.items()}, along)


def learns(value: Any, num_steps: int = 1, **changes: Any) -> Case:
    """A setting of teachers and given answers, which read prompts anew."""
    named = {f"algorithm.{name}": changed for name, changed in changes.items()}
    return Case(see.update_on_sums, value, SGD | {"num_steps": num_steps} | named)


def optimizes(value: Any, **changes: Any) -> Case:
    """A setting of the optimizer, with the default one."""
    return Case(see.update, value, {"num_steps": 4} | {f"optimizer.{name}": v for name, v in changes.items()})


def steers(value: Any, **changes: Any) -> Case:
    """A setting that moves a coefficient."""
    context = {"num_steps": 3, **STEERED} | {f"algorithm.{name}": v for name, v in changes.items()}
    return Case(see.coefficients, value, context)


def judges(value: Any, reward: str, **changes: Any) -> Case:
    """A setting of environment=reward_functions."""
    rewards = {"rewards": [f"observed_rewards:{reward}"]}
    return Case(see.verdicts, value, MY_ROWS | rewards | {name.replace("__", "."): v for name, v in changes.items()})


SGD = {"optimizer.name": "sgd", "optimizer.lr": 0.5, "optimizer.max_grad_norm": 0.0}
KL = {"algorithm__kl_coef": 1.0}
TAUGHT: dict[str, Any] = {"teacher": "self", "teacher_shows": ["gold"]}
WARM = {"algorithm.teacher_temperature": 2.0}
APART = {**TAUGHT, "teacher_term": "sampled"}
STEERED = {"algorithm.kl_coef": 0.5, "algorithm.target_kl": 1e-9}
TIS = {"algorithm__correction": "truncate"}
MY_ROWS = {"environment.name": "reward_functions", "data.path": "rows.jsonl", "rewards": ["observed_rewards:varied"]}
HERE = MY_ROWS | {"environment.in_process": True}
ONE_WORKER = MY_ROWS | {"rewards": ["observed_rewards:process"], "environment.num_workers": 1}
WORDS = {"environment.name": "gsm8k", "data.path": "words.jsonl"}
MATHEMATICS = {"environment.name": "math", "data.path": "mathematics.jsonl"}
WORKED = MATHEMATICS | {"environment.answer_column": "none"}
COUNTDOWN = {"environment.name": "countdown", "environment.num_train": 16, "environment.num_test": 8}
SMALL_SUMS = ArithmeticConfig(num_train=8, num_test=4)
MIXED = {"environment.name": "mixture", "environment.parts": {"sums": SMALL_SUMS, "more": SMALL_SUMS}}
CUSTOM = {"environment.name": "custom", "environment.factory": "observed_environments:Numbers"}
MIXED_WORDS = {
    "environment.name": "mixture",
    "environment.parts": {"words": Gsm8kConfig(), "more": Gsm8kConfig()},
    "data.path": "words.jsonl",
}
NEAR = {"curriculum.name": "success", "environment.levels": [1, 2, 3]}
CLIMBING = NEAR | {"curriculum.name": "difficulty", "curriculum.promotion_groups": 4, "curriculum.promote_at": 0.5}
COLD = {
    "cold_start.num_steps": 4,
    "cold_start.check_every": 2,
    "cold_start.num_check_prompts": 4,
    "cold_start.batch_size": 4,
    "cold_start.cache_dir": "cache",
}
LORA = {"model.lora_rank": 2}
ON_RAY = {"source": "ray"}
JUDGED = infill.INFILL | ON_RAY
PREFLIGHT = {"preflight.enabled": True}
COMPILED = {"model.nano_num_heads": 1}
SAVING = HERE | {"num_steps": 3, "output.save_every": 1}

CASES: dict[str, Case | Refused] = {
    **{name: Case(*given) for name, given in infill.CHANGES.items()},
    "seed": Case(see.rollouts, 1),
    "num_steps": Case(see.run_folder, 3),
    "total_rollouts": Case(see.run_folder, 17),
    "num_epochs": Case(see.run_folder, 0.75),
    "groups_per_step": Case(see.rollouts, 3),
    "group_size": Case(see.rollouts, 3),
    "group_size_schedule": Case(see.run_folder, [GroupSizeStep(step=1, group_size=3)]),
    "updates_per_batch": trains(2),
    "mini_batch_groups": trains(1),
    "mini_batch_rollouts": trains(4),
    "streaming": Case(see.streams, True, keeps=see.update),
    "micro_batch_tokens": Case(see.work, 12, keeps=see.update),
    "packing": Case(see.work, "padded", keeps=see.update),
    "logprob_chunk": Case(see.work, 3, keeps=see.update),
    "max_staleness": Case(cluster.published, 1, ON_RAY),
    "source": Case(cluster.started, "ray"),
    "publish_every": Case(cluster.published, 2, ON_RAY),
    "devices.trainer": Case(cluster.ranks, 3, ON_RAY),
    "devices.gpus_per_trainer": Case(cluster.ranks, 1.0, ON_RAY | {"devices.trainer": 2}),
    "devices.sampler": Case(cluster.started, 2, ON_RAY),
    "devices.gpus_per_sampler": Case(cluster.started, 0.5, ON_RAY),
    "devices.cpus_per_sampler": Case(cluster.started, 2, ON_RAY),
    "devices.groups_per_sampler": Case(cluster.most_under_way, 1, ON_RAY),
    "devices.reference": Case(cluster.started, 1, ON_RAY | {"algorithm.kl_coef": 1.0}),
    "devices.gpus_per_reference": Case(
        cluster.started, 1.0, ON_RAY | {"algorithm.kl_coef": 1.0, "devices.reference": 1}
    ),
    "devices.judge": Case(cluster.started, 1, JUDGED),
    "devices.gpus_per_judge": Case(cluster.started, 0.5, JUDGED | {"devices.judge": 1}),
    "devices.python": Case(cluster.interpreter, "other/bin/python", ON_RAY),
    "devices.address": Case(cluster.started, "10.0.0.1:6379", ON_RAY),
    "timeouts.samplers": Case(cluster.patience, 60.0, ON_RAY),
    "shuffle": Case(see.rollouts, False),
    "curriculum.name": Case(see.order, "difficulty", {"environment.levels": [1, 2, 3]}),
    "curriculum.options": Case(see.order, {"position": 2}, {"curriculum.name": "covey.rollouts.stream:PromptStream"}),
    "curriculum.window": Case(see.order, [0.8, 1.0], NEAR),
    "curriculum.per": Case(see.order, "difficulty", NEAR),
    "curriculum.decay": Case(see.order, 0.9, NEAR),
    "curriculum.explore": Case(see.order, 0.9, NEAR),
    "curriculum.promote_at": Case(see.order, 0.9, CLIMBING),
    "curriculum.promotion_groups": Case(see.order, 3, CLIMBING),
    "curriculum.demote_below": Case(see.order, 0.45, CLIMBING),
    "curriculum.earlier_share": Case(see.order, 0.5, CLIMBING),
    "resume": Case(see.resumed_from, "stopped", {"num_steps": 4}),
    "resume_changes": Case(see.resumed_rate, ["optimizer.lr"], {"resume": "stopped"}),
    "trust_run": Case(see.followed_links, True, {"resume": "stopped"}),
    "rewards": Case(see.rollouts, ["observed_rewards:length"], HERE),
    "reward_weights": Case(see.rollouts, [0.5], HERE),
    # ---------------------------------------------------------------------------------------------- model
    "model.name": Case(see.policy, "policy"),
    "model.kind": Refused("masked", "model.name=nano needs model.kind=causal, got model.kind=masked"),
    "model.revision": Case(see.policy, "other", {"model.name": "some/one"}),
    "model.code": Case(see.policy, "observed_rewards:bigrams", {"model.name": "policy"}),
    "model.precision": Case(see.policy, "bfloat16"),
    "model.chat_template_kwargs": Refused(
        {"enable_thinking": False},
        "model.chat_template_kwargs.enable_thinking is set, but the chat template of nano never reads it; "
        "it reads none",
    ),
    "model.load_in_4bit": Case(see.policy, True, {"model.name": "policy", **LORA}),
    "model.load_in_8bit": Case(see.policy, True, {"model.name": "policy", **LORA}),
    "model.lora_rank": Case(see.policy, 2),
    "model.lora_alpha": trains(64.0, model__lora_rank=2),
    "model.lora_dropout": trains(0.5, model__lora_rank=2),
    "model.lora_targets": Case(see.policy, ["q_proj"], LORA),
    "model.kernels": Case(see.kernels, "torch", {"model.nano_num_heads": 1}),
    "model.gradient_checkpointing": Case(see.work, True, keeps=see.update),
    "model.attention": Case(see.attention, "sdpa", {"model.nano_num_heads": 1}),
    "model.activation_offload": Refused(True, "model.activation_offload=true needs a GPU, got model.device=cpu"),
    "model.deterministic": Refused(True, "model.deterministic=true is for GPUs, a CPU repeats bit for bit without it"),
    "model.device": Refused("nowhere", "model.device must be auto, cpu, cuda or cuda:N, got nowhere"),
    "model.nano_architecture": Case(see.policy, "llama"),
    "model.nano_hidden_size": Case(see.policy, 32),
    "model.nano_num_layers": Case(see.policy, 2),
    "model.nano_num_heads": Case(see.policy, 1),
    # ---------------------------------------------------------------------------------------------- environment
    "environment.name": Case(see.prompts, "reward_functions", along=MY_ROWS),
    "environment.levels": Case(see.prompts, [1]),
    "environment.num_train": Case(see.prompts, 17),
    "environment.num_test": Case(see.prompts, 9),
    "environment.problem_seed": Case(see.prompts, 1),
    "environment.scheme": Case(see.verdicts, "verl_strict", WORDS),
    "environment.format_reward": Case(see.verdicts, 0.3, WORDS),
    "environment.factory": Case(see.prompts, "observed_environments:Squares", CUSTOM),
    "environment.options": Case(see.prompts, {"count": 3}, CUSTOM),
    "environment.parts": Case(see.prompts, {"sums": SMALL_SUMS, "others": SMALL_SUMS}, MIXED),
    "environment.weights": Case(see.order, {"sums": 2.0}, MIXED),
    "environment.data": Case(see.prompts, {"more": DataConfig("words.jsonl", max_rows=3)}, MIXED_WORDS),
    "environment.instruction": Case(see.prompts, "", WORDS),
    "environment.problem_column": Case(see.prompts, "other", MATHEMATICS),
    "environment.answer_column": Case(see.prompts, "other", MATHEMATICS),
    "environment.solution_column": Case(see.prompts, "other", WORKED),
    "environment.max_turns": Case(episodes.limits, 3, episodes.GUESS),
    "environment.max_context": Case(episodes.limits, 64, episodes.GUESS),
    "environment.turn_timeout": Case(episodes.limits, 2.0, episodes.GUESS),
    "environment.history": Case(episodes.limits, "template", episodes.GUESS),
    "environment.tools": Case(doors.shown, ["observed_tools:double"], doors.TOOLS),
    "environment.toolset": Case(doors.shown, "observed_tools:Shelf", doors.TOOLS),
    "environment.servers": Case(
        doors.shown, [doors.SERVED], doors.TOOLS | {"environment.tools": ["observed_tools:double"]}
    ),
    "environment.server_sessions": Case(doors.heard_twice, "shared", doors.WITH_SERVER),
    "environment.tool_timeout": Case(doors.heard, 0.001, doors.TOOLS),
    "environment.max_tool_calls": Case(doors.heard, 3, doors.TOOLS),
    "environment.tool_role": Case(doors.heard, "user", doors.TOOLS),
    "environment.program": Case(doors.called, "observed_tools:other_agent", doors.AGENT),
    "environment.command": Case(doors.called, [sys.executable, "observed_agent.py", "Stay."], doors.AGENT_OF_COMMAND),
    "environment.program_sampling": Case(doors.called, "override", doors.AGENT_OTHERWISE),
    "environment.protocol": Case(doors.heard, "textarena", doors.STEPS),
    "environment.url": Case(doors.served, "http://words", doors.OPENENV),
    "environment.observation_field": Case(doors.served, "row", doors.OPENENV),
    "environment.describe_actions": Case(doors.served, False, doors.OPENENV),
    "environment.server_timeout": Case(doors.served, 1e-4, doors.OPENENV),
    "environment.id": Case(doors.loaded, "others", doors.VERIFIERS),
    "environment.python": Case(doors.loaded, "/nowhere/python", doors.VERIFIERS),
    "environment.load_timeout": Case(doors.loaded, 1e-3, doors.VERIFIERS),
    "environment.dataset": Case(see.prompts, "leg_counting", doors.REASONS),
    "environment.highest": Case(see.prompts, 15, episodes.GUESS),
    "environment.halving_reward": Case(episodes.heard, 0.5, episodes.GUESS),
    "environment.shuffled": Case(episodes.heard, True, episodes.GUESS),
    "environment.demonstration_errors": Case(episodes.shown, 0.0, episodes.GUESS),
    "environment.num_keys": Case(see.prompts, 5, episodes.LOOKUP),
    "environment.digits": Case(see.prompts, 2, episodes.CALCULATOR),
    "environment.num_numbers": Case(see.prompts, [2], COUNTDOWN),
    "environment.max_number": Case(see.prompts, 9, COUNTDOWN),
    "environment.max_target": Case(see.prompts, 20, COUNTDOWN),
    "environment.operators": Case(see.prompts, ["+"], COUNTDOWN),
    "environment.uses": Case(see.prompts, "at_most", COUNTDOWN),
    "environment.answer_form": Case(see.prompts, "plain", COUNTDOWN),
    "environment.timeout": judges(0.2, "slow", environment__num_workers=1),
    "environment.num_workers": Case(see.processes, 1, MY_ROWS),
    "environment.start_timeout": judges(1e-3, "varied", environment__num_workers=1),
    "environment.worker_calls": Case(see.workers_needed, 1, ONE_WORKER),
    "environment.worker_bytes": Case(see.workers_needed, 1, ONE_WORKER),
    "environment.in_process": judges(True, "process"),
    "environment.max_failure_rate": judges(0.9, "half", environment__in_process=True),
    "environment.measure_weights": Case(ifeval.rewards, [1.0, 0.0, 0.0, 0.0], ifeval.TORCHRL),
    "environment.answer_bonus": Case(ifeval.rewards, 0.0, ifeval.TORCHRL),
    "environment.think_bonus": Case(ifeval.rewards, 0.0, ifeval.TORCHRL),
    "environment.min_words": Case(ifeval.rewards, 12, ifeval.IFEVAL),
    "environment.benchmark": Case(see.prompts, "instructions.jsonl", ifeval.ROWS | {"data.path": None}),
    "environment.style": Case(see.prompts, "short", ifeval.FEW),
    "environment.kinds": Case(see.prompts, ["startend:quotation"], ifeval.IFEVAL),
    "environment.max_instructions": Case(see.prompts, 2, {"environment.name": "ifeval"}),
    "environment.problem": Case(see.prompts, "steps", code.CODE),
    "environment.difficulty": Case(see.prompts, 4, code.CODE | {"environment.problem": "fizzbuzz"}),
    "environment.partial_weight": Case(code.rewards, 1.0, code.CODE),
    "environment.tests_per_problem": Case(code.tests, 4, code.CODE),
    "environment.test_packages": Case(see.prompts, [], code.ROWS),
    "environment.isolation": Case(code.isolation, "unsafe_no_isolation", code.CODE),
    "environment.num_slots": Case(see.processes, 1, code.CODE),
    "environment.total_seconds": Case(code.slow, 1.0, code.HASTY),
    "environment.cpu_seconds": Case(code.busy, 1, code.PATIENT),
    "environment.memory_bytes": Case(code.large, 64 << 20, code.CODE),
    "environment.output_bytes": Case(code.told, 1000, code.CODE | {"environment.max_turns": 2}),
    "environment.cache_size": Case(code.counts, 0, code.CODE),
    "environment.recheck_rate": Case(code.counts, 1.0, code.CODE),
    "environment.stages": Case(see.prompts, ["valid"], machines.MACHINES),
    "environment.form": Case(see.prompts, "global", machines.MACHINES),
    "environment.score": Case(machines.throws, "paper", machines.THROWING),
    "environment.transform": Case(machines.rewards, "sqrt", machines.COMPACT),
    "environment.file_reward": Case(machines.rewards, 0.5, machines.COMPACT),
    "environment.placed_reward": Case(machines.rewards, 0.5, machines.COMPACT),
    "environment.max_blocks": Case(see.prompts, 6, machines.MACHINES),
    "environment.demonstrations": Case(
        machines.demonstrations, "designs.jsonl", machines.COMPACT, along={"environment.num_demonstrations": 1500}
    ),
    "environment.num_demonstrations": Case(machines.demonstrations, 11, machines.COMPACT),
    "environment.family_share": Case(machines.demonstrations, 0.0, machines.COMPACT),
    "environment.demonstration_cap": Case(machines.demonstrations, 0.5, machines.COMPACT),
    "data.path": Case(see.prompts, "more.jsonl", HERE),
    "data.subset": Case(see.prompts, "small", HERE | {"data.path": "some/rows"}),
    "data.train_split": Case(see.prompts, "extra", HERE | {"data.path": "splits"}),
    "data.test_split": Case(see.prompts, "extra", HERE | {"data.path": "splits"}),
    "data.test_fraction": Case(see.prompts, 0.5, HERE),
    "data.prompt_column": Case(see.prompts, "other", HERE),
    "data.answer_column": Case(
        see.prompts, "gold", HERE | {"data.path": "begun.jsonl", "data.prefill": True}, {"data.prefill": False}
    ),
    "data.prefill": Case(
        see.prompts,
        True,
        HERE | {"data.path": "begun.jsonl", "data.answer_column": "gold"},
        {"data.answer_column": None},
    ),
    "data.max_rows": Case(see.prompts, 3, HERE),
    "data.shuffle_rows": Case(see.prompts, False, HERE | {"data.max_rows": 3}),
    "data.bad_rows": Case(see.prompts, "skip", HERE | {"data.path": "broken.jsonl"}),
    # ---------------------------------------------------------------------------------------------- sampling
    "engine.name": Case(see.rollouts, "fake"),
    "engine.cache_bytes": Case(see.rows_at_once, 4000, keeps=see.rollouts),
    "engine.max_rows": Case(see.rows_at_once, 3, keeps=see.rollouts),
    "engine.speculation": Case(
        see.drafts, "on", COMPILED | {"sampling.max_tokens": 24, "sampling.temperature": 0.1}, keeps=see.rollouts
    ),
    "engine.weights": Case(see.sampled_logprobs, "int8", COMPILED),
    "engine.url": Refused(
        "http://127.0.0.1:8000",
        "engine.url=http://127.0.0.1:8000 needs engine.name = vllm, got engine.name=native",
    ),
    "engine.gpu_memory_utilization": Refused(
        0.5, "engine.gpu_memory_utilization=0.5 needs engine.name = vllm, got engine.name=native"
    ),
    "engine.sleep": Refused(1, "engine.sleep=1 needs engine.name = vllm, got engine.name=native"),
    "engine.deadline": Refused(60.0, "engine.deadline=60.0 needs engine.name = vllm, got engine.name=native"),
    "engine.update": Refused(
        "wait", "engine.update=wait needs engine.name = vllm or source = ray, got engine.name=native, source=local"
    ),
    "sampling.temperature": Case(see.rollouts, 0.5),
    "sampling.top_k": Case(see.rollouts, 2),
    "sampling.top_p": Case(see.rollouts, 0.5),
    "sampling.min_p": Case(see.rollouts, 0.5),
    "sampling.max_tokens": Case(see.rollouts, 3),
    "sampling.max_total_tokens": Case(see.rollouts, 9),
    "sampling.stop": Case(see.rollouts, [chr(code) for code in range(32, 127)]),
    # ---------------------------------------------------------------------------------------------- algorithm
    "algorithm.advantage": trains("group_center"),
    "algorithm.advantage_options": trains({"ddof": 0}),
    "algorithm.advantage_clip": trains(0.1),
    "algorithm.shaping": trains({"soft_overlong": {"max_len": 6, "cache": 4}}),
    "algorithm.selection": trains("top_k", along={"algorithm.selection_options": {"k": 2}}),
    "algorithm.selection_options": trains(
        {"k": 3}, algorithm__selection="top_k", algorithm__selection_options={"k": 2}
    ),
    "algorithm.length_normalizer": trains(1.0),
    "algorithm.group_filter": Case(see.rollouts, "zero_std"),
    "algorithm.group_filter_options": Case(see.rollouts, {"low": -1.0}, {"algorithm.group_filter": "mean_bounds"}),
    "algorithm.group_filter_rounds": Case(see.rollouts, 1, {"algorithm.group_filter": "zero_std"}),
    "algorithm.loss": trains("cispo", updates_per_batch=3),
    "algorithm.loss_options": trains({"eps_low": 1e-3, "eps_high": 1e-3}, updates_per_batch=3),
    "algorithm.ratio": trains("sequence"),
    "algorithm.ratio_denominator": trains("behaviour"),
    "algorithm.log_ratio_clamp": trains(1e-3, updates_per_batch=3),
    "algorithm.aggregation": trains("seq_mean"),
    "algorithm.norm_length": trains(9, algorithm__aggregation="seq_mean_token_sum_norm"),
    "algorithm.count_empty": trains(True, algorithm__aggregation="seq_mean"),
    "algorithm.kl_coef": trains(1.0),
    "algorithm.kl_estimator": trains("k1", **KL, algorithm__kl_gradient="naive"),
    "algorithm.kl_gradient": trains("naive", **KL),
    "algorithm.kl_in": trains("reward", **KL, algorithm__kl_estimator="k1"),
    "algorithm.kl_aggregation": trains("seq_sum", **KL),
    "algorithm.kl_clamp": trains(1e-3, **KL, algorithm__kl_gradient="naive"),
    "algorithm.sampler_kl_coef": trains(1.0),
    "algorithm.sampler_kl_estimator": trains("k1_forward", algorithm__sampler_kl_coef=1.0),
    "algorithm.router_aux_loss_coef": trains(1.0, model__name="mixture"),
    "algorithm.target_kl": Case(see.coefficients, 1e-9, {"algorithm.kl_coef": 0.5}),
    "algorithm.kl_controller": steers("doubling"),
    "algorithm.kl_horizon": steers(100),
    "algorithm.kl_coef_min": steers(0.45, target_kl=1e9, kl_controller="doubling"),
    "algorithm.kl_coef_max": steers(0.6, kl_controller="doubling"),
    "algorithm.reference_model": trains("policy", **KL),
    "algorithm.reference_revision": trains("other", **KL, algorithm__reference_model="some/one"),
    "algorithm.reference_refresh_on_best": Case(
        see.kept_of_the_reference, True, {"algorithm.kl_coef": 1.0, "evaluation.every": 1}
    ),
    "algorithm.reference_refresh_every": trains(1, **KL, num_steps=3),
    "algorithm.reference_refresh_alpha": trains(0.5, **KL, num_steps=3, algorithm__reference_refresh_every=1),
    "algorithm.correction": trains("truncate"),
    "algorithm.correction_level": trains("sequence", **TIS),
    "algorithm.correction_min": trains(0.95, **TIS),
    "algorithm.correction_max": trains(1.05, **TIS),
    "algorithm.correction_self_normalize": trains(True, **TIS),
    "algorithm.rejection": trains("token_k1", along={"algorithm.rejection_thresholds": "0.9_1.1"}),
    "algorithm.rejection_thresholds": trains(
        "0.9_1.1", algorithm__rejection="token_k1", algorithm__rejection_thresholds="0.8_1.2"
    ),
    "algorithm.off_policy_mask_delta": trains(0.01),
    "algorithm.m2po_threshold": trains(0.01),
    "algorithm.entropy_coef": trains(1.0),
    "algorithm.entropy_aggregation": trains("seq_mean_token_mean", algorithm__entropy_coef=1.0),
    "algorithm.target_entropy": Case(see.coefficients, 10.0),
    "algorithm.mask_truncated": trains(True),
    "algorithm.drop_void_turns": Case(see.update_by_turns, True, SGD),
    "algorithm.turn_credit": Case(see.update_by_turns, "discounted", SGD),
    "algorithm.turn_credit_options": Case(
        see.update_by_turns, {"weight": 0.3}, SGD | {"algorithm.turn_credit": "turn_mixed"}
    ),
    "algorithm.high_entropy_fraction": trains(0.3),
    "algorithm.teacher": trains("policy"),
    "algorithm.teacher_shows": learns(["gold"], teacher="self", teacher_temperature=1.0),
    "algorithm.teacher_template": learns("{text} ", **TAUGHT),
    "algorithm.teacher_selection": learns({"threshold": 2.0}, teacher="self", teacher_shows=["solution"]),
    "algorithm.gold_column": learns("level", **TAUGHT),
    "algorithm.teacher_weights": learns("live", **TAUGHT, num_steps=3),
    "algorithm.teacher_rate": learns(0.5, **TAUGHT, num_steps=3, teacher_weights="ema"),
    "algorithm.teacher_term": learns("divergence", **TAUGHT),
    "algorithm.teacher_options": learns({"clip": 0.01}, **TAUGHT),
    "algorithm.teacher_coef": learns(0.5, **TAUGHT),
    "algorithm.teacher_mix": learns("convex", **APART, teacher_coef=0.5),
    "algorithm.teacher_max_ratio": learns(0.5, **APART),
    "algorithm.teacher_denominator": learns("teacher_tokens", **APART | {"teacher_shows": ["solution"]}),
    "algorithm.teacher_temperature": learns(0.5, **TAUGHT),
    "algorithm.reward_weight": learns(0.0, **TAUGHT),
    "algorithm.sft_coef": learns(1.0),
    "algorithm.sft_answers": learns("best", sft_coef=1.0),
    "algorithm.sft_threshold": learns(2.0, sft_coef=1.0, sft_answers="best"),
    "algorithm.sft_skip_first": learns(1, sft_coef=1.0),
    # ---------------------------------------------------------------------------------------------- optimizer
    "optimizer.name": optimizes("sgd"),
    "optimizer.lr": optimizes(2e-2),
    "optimizer.betas": optimizes([0.5, 0.9]),
    "optimizer.eps": optimizes(1e-2),
    "optimizer.weight_decay": optimizes(0.5),
    "optimizer.schedule": optimizes("linear"),
    "optimizer.warmup_steps": optimizes(3),
    "optimizer.min_lr_ratio": optimizes(0.5, schedule="cosine"),
    "optimizer.max_grad_norm": optimizes(1e-3, name="sgd"),
    "optimizer.max_nonfinite_steps": Case(see.steps_until_stopped, 3),
    # ---------------------------------------------------------------------------------------------- cold start
    "cold_start.enabled": Case(see.run_folder, True, COLD),
    "cold_start.num_steps": Case(see.warm_up, 5, COLD),
    "cold_start.target_accuracy": Case(see.warm_up, 0.0, COLD),
    "cold_start.check_every": Case(see.warm_up, 3, COLD),
    "cold_start.num_check_prompts": Case(see.warm_up, 5, COLD),
    "cold_start.batch_size": Case(see.warm_up, 5, COLD),
    "cold_start.all_weights": Case(see.warm_up, True, COLD | {"model.name": "policy", **LORA}),
    "cold_start.lr": Case(see.warm_up, 1e-2, COLD),
    "cold_start.warmup_steps": Case(see.warm_up, 1, COLD),
    "cold_start.cache_dir": Case(see.warm_up, "another", COLD),
    # ---------------------------------------------------------------------------------------------- evaluation, output
    "evaluation.every": Case(see.run_folder, 1),
    "evaluation.num_prompts": Case(see.evaluation, 3),
    "evaluation.num_samples": Case(see.evaluation, 3),
    "evaluation.k": Case(see.evaluation, [2]),
    "evaluation.correct_above": Case(see.evaluation, 0.25, HERE),
    "evaluation.confidence": Case(see.evaluation, 0.5),
    "output.journal": Case(see.has_journal, False, SAVING | {"output.save_every": 2}),
    "output.save_every": Case(see.run_folder, 1),
    "output.keep_last": Case(see.run_folder, 1, SAVING),
    "output.keep_best": Case(
        see.run_folder,
        False,
        SAVING | {"rewards": ["observed_rewards:fading"], "evaluation.every": 1, "output.keep_last": 1},
    ),
    "output.rollouts_per_step": Case(see.run_folder, 1),
    "output.answers_per_evaluation": Case(see.run_folder, 1),
    "output.show_rollouts": Case(see.run_folder, 1),
    "output.max_rollout_rows": Case(see.run_folder, 3),
    "output.report": Case(see.has_report, False),
    "output.traces": Case(see.run_folder, False),
    "output.trace_every": Case(see.run_folder, 3, {"num_steps": 6}),
    "output.traced_groups": Case(see.run_folder, 1),
    "output.max_trace_bytes": Case(see.run_folder, 1000),
    "output.trackers": Case(see.run_folder, ["tensorboard"]),
    "output.wandb_project": Case(see.wandb_project, "mine", {"output.trackers": ["wandb"]}),
    "output.callbacks": Case(see.number_of_callbacks, ["observed_rewards:hearing"]),
    "output.progress": Case(see.run_folder, True),
    "output.on_write_error": Case(watch.lost_file, "continue"),
    "output.shutdown_timeout": Case(watch.end_of_a_stop, 0.2),
    # ---------------------------------------------------------------------------------------------- around a run
    "doctor.enabled": Case(
        see.warnings_of_the_doctor, False, context={"doctor.enabled": True, "output.progress": True}
    ),
    "doctor.stop_on": Case(
        see.warnings_of_the_doctor, ["D34"], context={"doctor.enabled": True, "output.progress": True}
    ),
    "parallel.strategy": Case(watch.layout_of_weights, "fsdp"),
    "preflight.enabled": Case(see.run_folder, True, {"preflight.enabled": False}),
    "preflight.num_prompts": Case(watch.checks, 3, PREFLIGHT),
    "preflight.max_tokens": Case(watch.checks, 2, PREFLIGHT),
    "preflight.logprob_tolerance": Case(watch.checks, 1e-3, PREFLIGHT),
    "preflight.gradient_tolerance": Case(watch.checks, 1e-3, PREFLIGHT),
    "timeouts.loading": Case(watch.waits, 3000.0),
    "timeouts.cold_start": Case(watch.waits, 3000.0, COLD | {"cold_start.enabled": True}),
    "timeouts.sampling": Case(watch.waits, 3000.0),
    "timeouts.scoring": Case(watch.waits, 3000.0),
    "timeouts.update": Case(watch.waits, 3000.0),
    "timeouts.saving": Case(watch.waits, 3000.0),
    "timeouts.ranks": Case(watch.patience_with_ranks, 3000.0),
    "timeouts.tracker": Case(watch.patience_with_trackers, 0.1, {"output.trackers": ["tensorboard"]}),
}

SECOND_READERS: dict[str, Case] = {
    "environment.scheme": Case(see.verdicts, "torchrl", MATHEMATICS),
    "environment.instruction": Case(see.prompts, "", COUNTDOWN),
    "environment.timeout of code": Case(code.slow, 0.1, code.CODE),
    "environment.timeout of machines": Case(machines.rewards, 1e-4, machines.COMPACT),
    "environment.cache_size": Case(machines.simulated, 0, machines.COMPACT),
    "environment.num_workers": Case(see.processes, 1, MATHEMATICS | {"environment.scheme": "math_verify"}),
    "algorithm.kl_aggregation": trains("seq_sum", algorithm__sampler_kl_coef=1.0),
    "algorithm.kl_clamp": trains(1e-3, algorithm__sampler_kl_coef=1.0),
    "algorithm.log_ratio_clamp": trains(1e-3, **TIS, algorithm__loss="reinforce"),
    "algorithm.count_empty": trains(True, **KL, algorithm__kl_aggregation="seq_mean", algorithm__kl_gradient="naive"),
}
"""Settings that another part reads too: they are no less accepted, and read, where only that part is there."""

OFF: dict[str, Settings] = {
    "parallel.strategy = ddp": {"parallel.strategy": "fsdp", "model.name": "policy", **LORA},
    "updates_per_batch = 1": {"updates_per_batch": 2},
    "mini_batch_groups = null and mini_batch_rollouts = null": {"mini_batch_groups": 1},
    "mini_batch_groups = null": {"mini_batch_groups": 1},
    "total_rollouts = null": {"total_rollouts": 4},
    "curriculum.name = none": {"curriculum.name": "success"},
    "group_size_schedule = []": {"group_size_schedule": [GroupSizeStep(step=1, group_size=3)]},
    "model.lora_dropout = 0": {**LORA, "model.lora_dropout": 0.1},
    "an algorithm.advantage of a group alone": {"algorithm.advantage": "reinforce_plus_plus"},
    "algorithm.advantage_options.post_normalize = none": {
        "algorithm.advantage": "leave_one_out",
        "algorithm.advantage_options": {"post_normalize": "batch_zscore"},
    },
    "algorithm.length_normalizer = null": {"algorithm.length_normalizer": 0.5},
    "a built-in algorithm.aggregation, whose count is known": {
        "algorithm.aggregation": "tests.guarantees.test_streaming:evenly"
    },
    "an engine that leaves the device to training: engine.name = native or fill, or source = ray": {
        "engine.name": "vllm"
    },
    BY_TURN[0].condition: {"algorithm.advantage": "passk", "algorithm.advantage_options": {"k": 2}},
    "algorithm.teacher_shows to name something": {"algorithm.teacher": "self", **WARM},
    "model.lora_rank = 0 (the mean of adapters is no adapter)": {"algorithm.teacher": "self", **WARM, **LORA},
    "algorithm.teacher = self": {"algorithm.teacher": "policy"},
    "algorithm.teacher_term = sampled or divergence": {"algorithm.teacher": "self", **WARM},
    "algorithm.sft_answers = best": {"algorithm.sft_coef": 1.0},
    "algorithm.selection = null": {"algorithm.selection": "top_k", "algorithm.selection_options": {"k": 2}},
    "data.path set": {"environment.name": "countdown"},
    "environment.form = tree or global": machines.COMPACT,
    "environment=reward_functions": WORDS,
    "model.lora_rank = 0 (adapters can only be copied)": {
        **LORA,
        "algorithm.kl_coef": 1.0,
        "algorithm.reference_refresh_every": 5,
    },
    "packing = shared or packed": {"packing": "padded"},
    "algorithm.kl_in = loss": {"algorithm.kl_coef": 1.0, "algorithm.kl_in": "reward", "algorithm.kl_estimator": "k1"},
    "a sampled algorithm.kl_estimator such as k3": {"algorithm.kl_coef": 1.0, "algorithm.kl_estimator": "full"},
    "a KL penalty with an exponential (k3 or is_weighted)": {
        "algorithm.kl_coef": 1.0,
        "algorithm.kl_estimator": "k1",
        "algorithm.sampler_kl_coef": 1.0,
        "algorithm.sampler_kl_estimator": "k1_forward",
    },
    "algorithm.kl_controller = proportional": {**STEERED, "algorithm.kl_controller": "doubling"},
    "algorithm.loss = clip, cispo, sapo or module:function": {"algorithm.loss": "reinforce"},
    "a loss with an importance ratio": {"algorithm.loss": "reinforce"},
    "a loss with an importance ratio, or a correction": {
        "algorithm.loss": "dro",
        "algorithm.loss_options": {"beta": 0.1},
    },
    "a loss that reads advantages": {"algorithm.loss": "nll"},
    "a loss that reads advantages, or a selection": {
        "algorithm.loss": "nll",
        "algorithm.kl_coef": 1.0,
        "algorithm.kl_estimator": "k1",
    },
    "model.name = nano": {"model.name": "policy"},
    "saved weights, or a cold start that saves some": LORA,
    "saved weights": LORA,
    "an engine that samples": {"engine.name": "fake"},
    "engine.name = native": {"engine.name": "fake"},
    "model.precision = float32, bfloat16 or float16": {"model.precision": "float64"},
    "source = local": {"engine.name": "vllm", "source": "ray", "devices.python": "python"},
    "engine.url = null": {"engine.name": "vllm", "engine.url": "http://127.0.0.1:8000"},
    "engine.gpu_memory_utilization = null": {
        "engine.name": "vllm",
        "engine.gpu_memory_utilization": 0.5,
        "source": "ray",
        "devices.python": "python",
    },
    "devices.sampler > 0": ON_RAY | {"devices.sampler": 0},
    "evaluation.every > 0": {"algorithm.kl_coef": 1.0, "evaluation.every": 0},
    "a reference that is not refreshed": ON_RAY | {"algorithm.kl_coef": 1.0, "algorithm.reference_refresh_every": 2},
    "algorithm.kl_estimator other than full": ON_RAY | {"algorithm.kl_coef": 1.0, "algorithm.kl_estimator": "full"},
    "model.lora_rank = 0": {"engine.name": "vllm", "engine.url": "http://127.0.0.1:8000", **LORA},
    "model.load_in_8bit = false": {"model.load_in_8bit": True, "model.lora_rank": 2, "model.name": "policy"},
    "model.load_in_4bit = false": {"model.load_in_4bit": True, "model.lora_rank": 2, "model.name": "policy"},
    "sampling.top_p = 1": {"sampling.top_p": 0.9},
    "sampling.min_p = 0 or sampling.top_p = 1": {"sampling.min_p": 0.1, "sampling.top_p": 0.9},
    **infill.OFF,
    "data.path = a folder or a hub name": HERE,
    "data.max_rows set": HERE,
    "optimizer.warmup_steps < num_steps": {"optimizer.warmup_steps": 2},
    "optimizer.name = adamw or adamw8bit": {"optimizer.name": "sgd"},
    "output.rollouts_per_step > 0 or output.answers_per_evaluation > 0": {
        "output.rollouts_per_step": 0,
        "output.answers_per_evaluation": 0,
    },
    "output.traces = true": {"output.traces": False},
    "doctor.enabled = true": {"doctor.enabled": False},
    "environment.scheme = covey or values": WORDS | {"environment.scheme": "trl"},
    "a scheme that asks math-verify": MATHEMATICS,
    "environment.servers set": doors.TOOLS,
    "environment.protocol other than skyrl": doors.STEPS_OF_ROWS,
    "data.path = null": {"environment.name": "countdown", "data.path": "targets.jsonl"},
    "environment.in_process = false": HERE,
    "environment.scheme = torchrl": ifeval.IFEVAL,
    "a scheme other than torchrl": ifeval.TORCHRL,
    "data.path = null, so that prompts are generated": ifeval.ROWS,
    "environment.benchmark = null": {"environment.name": "ifeval", "environment.benchmark": "instructions.jsonl"},
    "problems made up, data.path = null": {"environment.name": "code", "data.path": "words.jsonl"},
    "problems made up (data.path = null), or environment.tests_per_problem set": {
        "environment.name": "code",
        "data.path": "words.jsonl",
    },
    "tasks made up, data.path = null": {"environment.name": "machines", "data.path": "words.jsonl"},
    "designs made up, environment.demonstrations = null": machines.OWN_DESIGNS,
    "tasks or designs made up, one of both files = null": machines.OWN_DESIGNS | {"data.path": "words.jsonl"},
}
"""Where a condition beside a field does not hold; the others do not by default."""
