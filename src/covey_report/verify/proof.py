"""Write proof.jsonl: small digests of what each step sampled and made.

With it `covey verify` can name the first rollout, token and tensor that another computation finds different, and the
line of a log that was changed. Digests find differences and prove nothing: a forger changes them
with the file, but not what a recomputation finds. docs/trust/verify.md describes the format.
"""

import base64
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import compress
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from covey.config.compose import to_yaml
from covey.policy import sharding
from covey.policy.kernels.compiler import processor
from covey.policy.policy import Policy
from covey.run.build import Run
from covey.run.checkpoints import fingerprint
from covey.run.checkpoints.checkpoint import POLICY
from covey.run.checkpoints.manifest import MANIFEST, digest_of_file
from covey.run.folder import PROOF, ROWS
from covey.run.versions import versions
from covey.system import collectives
from covey.system.jsonl import JsonlWriter, encode_row
from covey.types import Group, Rollout

LOGGER = logging.getLogger(__name__)
FORMAT = 1
DIGITS = 32
"""Digits of a SHA-256 that are kept of a log."""
CHECK = 4
"""Bytes of a check: of a tensor, or of one side of a rollout."""
SIDES = ("tokens", "log-probs", "reward")
"""Sides of a rollout, each with a check, in this order."""
MOST_OF_TENSOR = 4096
"""Elements of a tensor on an accelerator that are looked at; on a CPU all are."""
LOGS = tuple(name for name in ROWS if name != PROOF)

Row = dict[str, Any]

OWN_CODE = "user_code"
"""Entry of a machine: hashes of the user's code (`Run.code`)."""


class ProofLog:
    """Writes a run's digests; every rank has one, rank 0's writes."""

    def __init__(self, folder: Path, run: Run, prompts: str) -> None:
        self._folder, self._run = folder, run
        self._logs = {name: LogDigest(folder / name) for name in LOGS}
        is_new = run.config.resume is None
        began = weight_checks(run.policy, trained=True) if is_new else b""
        self._begin: Row = {
            "settings": to_yaml(run.config),
            "prompts": prompts,
            "machine": machine(run.policy) | {OWN_CODE: run.code},
            "frozen": total(weight_checks(run.policy, trained=False)),
            **({"weights": total(began), "tensors": pack(began)} if is_new else {}),
        }
        self._file: JsonlWriter | None = None
        self._left = 0

    def step(self, step: int, groups: Sequence[Group]) -> None:
        """Write a finished step, as much as it has room for. Collective."""
        weights = weight_checks(self._run.policy, trained=True)
        found = [row for of_rank in collectives.all_gather([group_row(group) for group in groups]) for row in of_rank]
        if not collectives.is_main_process():
            return
        self._open(step - 1)
        whole = "".join(row["checks"] for row in found).encode()
        row = {
            "kind": "train",
            "step": step,
            "rollouts": total(whole),
            "weights": total(weights),
            "logs": self._digest_logs(),
        }
        without = [{name: value for name, value in one.items() if name != "ids"} for one in found]
        more = {"tensors": pack(weights)}
        room = self._left // max(1, self._run.config.num_steps - step + 1)
        forms = (row | more | {"groups": found}, row | more | {"groups": without}, row | more, row)
        self._write(next((one for one in forms if len(encode_row(one)) <= room), row))

    def cover_evaluation(self, step: int) -> None:
        if not collectives.is_main_process():
            return
        self._open(step)
        self._write({"kind": "evaluate", "step": step, "logs": self._digest_logs()})

    def note_checkpoint(self, checkpoint: Path, step: int) -> None:
        """Note which weights a checkpoint holds."""
        self._open(step)
        found = b"".join(check for _, check in saved_checks(checkpoint))
        self._write(
            {"kind": "save", "step": step, "manifest": digest_of_file(checkpoint / MANIFEST), "tensors": pack(found)}
        )

    def _open(self, step: int) -> None:
        if self._file is None:
            path, output = self._folder / PROOF, self._run.config.output
            self._file = JsonlWriter(path, wait=output.on_write_error == "continue")
            self._left = output.max_trace_bytes - path.stat().st_size
            self._write({"format": FORMAT, "kind": "begin", "step": step, **self._begin, "logs": self._digest_logs()})

    def _write(self, row: Row) -> None:
        assert self._file is not None, "opened before"
        line = encode_row(row)
        self._left -= len(line)
        self._file.write_line(line)

    def _digest_logs(self) -> dict[str, list[Any]]:
        return {name: found for name, log in self._logs.items() if (found := log.so_far())[0]}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class LogDigest:
    """The SHA-256 of a growing file, read once."""

    def __init__(self, path: Path) -> None:
        self._path, self._digest, self._size, self._lines = path, hashlib.sha256(), 0, 0

    def so_far(self) -> list[Any]:
        """Return the number of lines, and their digest."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._size)
            while block := file.read(1 << 20):
                self._digest.update(block)
                self._size += len(block)
                self._lines += block.count(b"\n")
        return [self._lines, self._digest.hexdigest()[:DIGITS]]


def machine(policy: Policy) -> dict[str, Any]:
    """Return the facts that decide last bits, besides settings."""
    device = policy.device
    of_gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    named = [line.partition(":")[2].strip() for line in processor().splitlines() if line.startswith("model name")]
    return {
        **versions(),
        "processor": named[0] if named else processor()[:200],
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "device": device.type,
        "ranks": collectives.world_size(),
        "threads": torch.get_num_threads(),
        **of_gpu,
    }


def weight_checks(policy: Policy, *, trained: bool) -> bytes:
    """Return a check of each trained (or other) weight. Collective where sharded."""
    found = b"".join(tensor_check(tensor) for _, tensor in weights_of(policy, trained=trained))
    of_ranks = collectives.all_gather(found) if policy.sharded else [found]
    if len(of_ranks) == 1:
        return found
    return b"".join(check_of(b"".join(own)) for own in zip(*map(split, of_ranks), strict=True))


def weights_of(policy: Policy, *, trained: bool) -> list[tuple[str, Tensor]]:
    """Return weights by name, in order."""
    found = [(name, own) for name, own in policy.model.named_parameters() if own.requires_grad == trained]
    return sorted(found, key=lambda pair: pair[0])


def tensor_check(tensor: Tensor) -> bytes:
    """Return a check of a tensor, of a rank's shard alone."""
    own: Any = tensor.detach()
    own = own.to_local() if sharding.is_shard(tensor) else own
    flat = own.flatten()
    if flat.device.type != "cpu":
        flat = flat[:: max(1, flat.numel() // MOST_OF_TENSOR)].cpu()
    # An array keeps its storage from being freed, which FSDP does after each gathering
    plain = flat.clone() if collectives.is_distributed() else flat.contiguous()
    return check_of(plain.view(torch.uint8).numpy().data) if flat.numel() else bytes(CHECK)


def saved_checks(checkpoint: Path) -> Iterator[tuple[str, bytes]]:
    """Return names and checks of a saved policy's tensors, in order."""
    return ((name, tensor_check(tensor)) for name, tensor in saved_tensors(checkpoint / POLICY))


def saved_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a saved policy, in order."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            yield from ((name, opened.get_tensor(name)) for name in sorted(opened.keys()))


def group_row(group: Group) -> Row:
    """Describe a trained group by checks, and low bytes of its tokens."""
    ((_, content),) = fingerprint.of_prompts([group.prompt])
    checks = b"".join(check_of(side) for rollout in group.rollouts for side in sides_of(rollout))
    ids = bytes(token & 255 for rollout in group.rollouts for token in compress(rollout.target_ids, rollout.loss_mask))
    lengths = [rollout.num_loss_tokens for rollout in group.rollouts]
    row = {"prompt": group.prompt.id, "content": content, "checks": pack(checks), "lengths": lengths, "ids": pack(ids)}
    return row | ({"failures": len(group.failures)} if group.failures else {})


def sides_of(rollout: Rollout) -> tuple[bytes, bytes, bytes]:
    """Return tokens, log-probs and reward of a rollout as bytes."""
    tokens = json.dumps([rollout.input_ids, rollout.target_ids, [int(own) for own in rollout.loss_mask]])
    reward = json.dumps([rollout.reward.value, sorted(rollout.reward.parts.items())])
    return tokens.encode(), json.dumps(rollout.sampler_logprobs).encode(), reward.encode()


def check_of(content: Any) -> bytes:
    """Return CHECK bytes of XXH3."""
    return xxhash.xxh3_64_digest(content)[:CHECK]


def total(content: bytes) -> str:
    """Return one digest of all checks."""
    return xxhash.xxh3_128_hexdigest(content)


def pack(content: bytes) -> str:
    """Return bytes as text."""
    return base64.b64encode(content).decode()


def split(content: bytes, size: int = CHECK) -> list[bytes]:
    """Cut bytes into parts of one size.

    >>> split(b"abcdef", 4)
    [b'abcd', b'ef']
    """
    return [content[start : start + size] for start in range(0, len(content), size)]


def unpack(text: Any) -> bytes:
    """Return the bytes of `pack`. ValueError for other text."""
    return base64.b64decode(str(text), validate=True)


def facts_that_differ(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List what another machine has in another version."""
    names = [name for name in (*then, *now) if then.get(name) != now.get(name) and name != OWN_CODE]
    return [f"{name} was {then.get(name, 'absent')}, is {now.get(name, 'absent')}" for name in dict.fromkeys(names)]
