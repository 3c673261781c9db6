"""How long new weights take to reach the samplers, by link: modelled as latency plus bytes over bandwidth."""

from collections.abc import Sequence
from dataclasses import dataclass

GIGABYTE = 1e9


@dataclass(frozen=True)
class Link:
    """A way for bytes; nominal figures of one direction, which no transfer quite reaches."""

    name: str
    bytes_per_second: float
    latency: float


NVLINK = Link("NVLink 4 (450 GB/s)", 450 * GIGABYTE, 1e-5)
PCIE = Link("PCIe 5 x16 (64 GB/s)", 64 * GIGABYTE, 1e-5)
NET_400 = Link("400 Gb/s InfiniBand or Ethernet", 50 * GIGABYTE, 1e-5)
NET_100 = Link("100 Gb/s Ethernet", 12.5 * GIGABYTE, 5e-5)
LINKS = (NVLINK, PCIE, NET_400, NET_100)


@dataclass(frozen=True)
class Model:
    name: str
    num_bytes: float


MODELS = (
    Model("0.5 B bf16, 1 GB", 1 * GIGABYTE),
    Model("7 B bf16, 15 GB", 15 * GIGABYTE),
    Model("70 B bf16, 141 GB", 141 * GIGABYTE),
    Model("671 B fp8, 671 GB", 671 * GIGABYTE),
)


@dataclass(frozen=True)
class Published:
    """A figure of somebody else, over one link or another."""

    name: str
    num_bytes: float
    seconds: float


PUBLISHED = (
    Published("Checkpoint Engine: GLM-4.5-Air (106 B bf16), 8 H800", 212 * GIGABYTE, 3.5),
    Published("Checkpoint Engine: Qwen3-235B bf16, 8 H800", 470 * GIGABYTE, 6.2),
    Published("Checkpoint Engine: DeepSeek-V3.1 (671 B fp8), 256 H20", 671 * GIGABYTE, 11.3),
    Published("Checkpoint Engine: Kimi-K2 (1 T fp8), 256 H20", 1000 * GIGABYTE, 16.0),
    Published("slime: 355 B bf16", 710 * GIGABYTE, 48.0),
    Published("TRL and vLLM: 0.6 B bf16, 1 + 1 H100", 1.2 * GIGABYTE, 0.18),
)


def push_seconds(num_bytes: float, link: Link, receivers: int = 1, bucket_bytes: float = 0.1 * GIGABYTE) -> float:
    """Return the seconds until the last of `receivers` has the weights, passed on from one to the next in buckets.

    Each link carries every bucket once, so another receiver adds one bucket's time and not another copy's.
    """
    bucket = min(bucket_bytes, num_bytes)
    return (
        num_bytes / link.bytes_per_second + (receivers - 1) * bucket / link.bytes_per_second + receivers * link.latency
    )


def one_by_one_seconds(num_bytes: float, link: Link, receivers: int) -> float:
    """Return the seconds where the sender has one link and sends every receiver a copy of its own."""
    return receivers * (num_bytes / link.bytes_per_second + link.latency)


def table(receivers: Sequence[int] = (1, 16, 512)) -> list[str]:
    """Return Markdown rows: seconds by model and link, for each number of receivers."""
    heads = ["weights", *(f"{link.name}" for link in LINKS)]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for model in MODELS:
        cells = [
            " / ".join(f"{push_seconds(model.num_bytes, link, number):.3g}" for number in receivers) for link in LINKS
        ]
        rows.append(f"| {model.name} | {' | '.join(cells)} |")
    return rows


def comparison() -> list[str]:
    """Return Markdown rows: published seconds beside those of one PCIe link, at which weights leave host memory."""
    rows = [
        "| published | seconds | GB/s | one PCIe 5 link, modelled, s | ratio |",
        "|---|---|---|---|---|",
    ]
    for figure in PUBLISHED:
        modelled = push_seconds(figure.num_bytes, PCIE)
        rate = figure.num_bytes / figure.seconds / GIGABYTE
        cells = (
            figure.name,
            f"{figure.seconds:g}",
            f"{rate:.3g}",
            f"{modelled:.2g}",
            f"{figure.seconds / modelled:.2g}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows
