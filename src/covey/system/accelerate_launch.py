"""Obey or refuse the switches of `accelerate launch`, which starts the processes.

Imports nothing heavy. Switches arrive as environment variables; some do not arrive at all, and are read off the command
line of the launcher, the parent of this process (Linux).
"""

import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

PRECISIONS = {"fp16": "float16", "bf16": "bfloat16"}
OFF = ("", "0", "no", "none", "false")
REFUSED: Mapping[str, tuple[str, str]] = {
    "ACCELERATE_USE_FSDP": ("--use_fsdp", "parallel.strategy=fsdp shards weights"),
    "ACCELERATE_USE_DEEPSPEED": ("--use_deepspeed", "parallel.strategy=fsdp shards weights"),
    "ACCELERATE_USE_MEGATRON_LM": ("--use_megatron_lm", "parallel.strategy=fsdp shards weights"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("--use_parallelism_config", "parallel.strategy=fsdp shards weights"),
    "ACCELERATE_DYNAMO_BACKEND": ("--dynamo_backend", "nothing is compiled by torch"),
    "ACCELERATE_GRADIENT_CLIPPING": ("--gradient_clipping", "optimizer.max_grad_norm clips"),
    "ACCELERATE_DEBUG_MODE": ("--debug", "timeouts.ranks ends a wait for other ranks, and says for what"),
    "ACCELERATE_USE_XPU": ("--use_xpu", "there are CPUs and CUDA GPUs"),
    "ACCELERATE_USE_IPEX": ("--ipex", "there are CPUs and CUDA GPUs"),
    **dict.fromkeys(("XLA_USE_BF16", "XLA_DOWNCAST_BF16"), ("--tpu", "there are CPUs and CUDA GPUs")),
    "ACCELERATE_TORCH_DEVICE": ("with ACCELERATE_TORCH_DEVICE", "model.device chooses"),
    "ACCELERATE_USE_SAGEMAKER": ("on SageMaker", "start covey by torchrun there"),
    "ACCELERATE_CPU_AFFINITY": ("--enable_cpu_affinity", "bind processes with numactl or taskset"),
}
"""Variable -> the switch that sets it, and its counterpart here."""
PLACING = (
    *("--multi_gpu", "--num_processes", "--num_machines", "--machine_rank", "--main_process_ip", "--gpu_ids"),
    *("--main_process_port", "--same_network", "--max_restarts", "--monitor_interval", "--module", "--no_python"),
    *("--num_cpu_threads_per_process", "--mpirun_hostfile", "--mpirun_ccl", "--config_file", "--quiet", "--q"),
    *("--role", "--tee", "--log_dir", "--cpu", "--use_cpu", "--mixed_precision"),
)
"""Switches about which processes run where, and those that `check` reads off the environment."""


KINDS = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TPU")
"""distributed_type of a configuration file that is no placing. On CPUs it arrives nowhere but in the file itself."""


def check(precision: str, device: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Refuse switches that covey would ignore; stay on the CPU if asked.

    `precision` and `device` are the model's. ValueError names the switch and the setting to use.
    """
    typed = _read_words()
    if "ACCELERATE_MIXED_PRECISION" not in environment and not typed:
        return
    wanted = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if wanted not in OFF and PRECISIONS.get(wanted) != precision:
        needed = PRECISIONS.get(wanted, "float32, float16 or bfloat16")
        raise ValueError(
            f"accelerate launch --mixed_precision {wanted} needs model.precision={needed}, got {precision}; leave the "
            "switch out, or set both"
        )
    for variable, (switch, instead) in REFUSED.items():
        if environment.get(variable, "no").lower() not in OFF:
            raise ValueError(f"accelerate launch {switch} is not read: leave it out ({instead})")
    if environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") not in ("1", "auto"):
        raise ValueError(ACCUMULATION)
    for switch, value in _switches(typed):
        if switch == "--gradient_accumulation_steps" and value != "1":
            raise ValueError(ACCUMULATION)
        if switch not in (*PLACING, "--gradient_accumulation_steps") and not switch.startswith("--rdzv"):
            raise ValueError(f"accelerate launch {switch} is not read: leave it out")
    _check_file(dict(_switches(typed)).get("--config_file"))
    if environment.get("ACCELERATE_USE_CPU", "no").lower() not in OFF:
        if device not in ("auto", "cpu"):
            raise ValueError(f"accelerate launch --cpu needs model.device=cpu, got model.device={device}")
        environment["CUDA_VISIBLE_DEVICES"] = ""  # before anything touches CUDA


ACCUMULATION = (
    "accelerate launch --gradient_accumulation_steps is not read: leave it out (groups_per_step is what one update "
    "trains on, micro_batch_tokens what one pass holds)"
)


def _check_file(path: str | None) -> None:
    """Refuse a named configuration file with requests that no variable passes on."""
    if path is None or not Path(path).is_file():
        return
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))  # JSON too
    except (OSError, ValueError, yaml.YAMLError):
        return  # the launcher itself has read another
    kind = str(content.get("distributed_type", "")).upper() if isinstance(content, Mapping) else ""
    if kind in KINDS:
        raise ValueError(
            f"accelerate launch --config_file {path}: distributed_type={kind} is not read: leave it out "
            "(parallel.strategy=fsdp shards weights)"
        )


def _read_words() -> list[str]:
    with suppress(OSError):
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return launcher_words(words, os.path.basename(sys.argv[0]))
    return []


def launcher_words(words: Sequence[str], script: str) -> list[str]:
    """Return the arguments between `accelerate launch` and the script or module.

    >>> launcher_words(["python", "bin/accelerate", "launch", "--cpu", "my/run.py", "--x"], "run.py")
    ['--cpu']
    """
    places = [index for index, word in enumerate(words) if "launch" in os.path.basename(word)]
    if not places or "accelerate" not in "".join(words[: places[0] + 1]):
        return []
    own = list(words[places[0] + 1 :])
    ends = [index for index, word in enumerate(own) if word in ("-m", "--module") or os.path.basename(word) == script]
    return own[: ends[0]] if ends else own


def _switches(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word, after in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            switch = name if name.startswith("-m") else f"--{name.lstrip('-').replace('-', '_')}"
            yield switch, value if equals else after
