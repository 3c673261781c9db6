"""Bounds of the service, in bytes, tokens, requests and seconds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Bounds beyond which a request is refused."""

    body_bytes: int = 64 << 20
    """Largest body of a request; the client sends at most 5 MB of data in one."""
    bodies_bytes: int = 256 << 20
    """Largest sum of the bodies that are being received."""
    waiting_bytes: int = 1 << 30
    """Largest sum of the bodies of requests without a result."""
    connections: int = 4096
    head_seconds: float = 20.0
    """Seconds from the first byte of a request to the end of its head."""
    body_seconds: float = 60.0
    idle_seconds: float = 150.0
    """Seconds that a connection stays open between requests."""
    hold_seconds: float = 25.0
    """Seconds that a poll waits for its result: the client polls again without any pause."""
    waiting: int = 16384
    """Most requests without a result."""
    request_values: int = 1 << 23
    """Most tokens of a training request and values of its inputs together."""
    request_tokens: int = 1 << 21
    """Most tokens that a request may sample, each counted K times if it has K alternatives."""
    samples: int = 1024
    """Most samples of a request."""
    top_k: int = 128
    """Most alternatives of a token."""
    sessions: int = 1024
    names: int = 4096
    """Most models and samplers of a session."""
    loaded: int = 8
    """Models in memory at a time; the longest unused is put aside as a snapshot."""
    ahead: int = 4096
    """Requests of a model that may wait for earlier ones."""
    results: int = 32768
    results_bytes: int = 2 << 30
    """Largest sum of results; beyond either bound the oldest are dropped."""
    result_seconds: float = 600.0
    """Seconds that a fetched result is kept, for a client whose answer was lost."""
    session_seconds: float = 7 * 86400.0
    """Seconds without a sign of life after which a session and its models are dropped; checkpoints stay."""
    samplers: int = 2048
    samplers_bytes: int = 8 << 30
    """Largest sum of unnamed sampler weights on disk; beyond either bound the longest unused are dropped."""
    metadata_bytes: int = 1 << 16


class RequestRefused(ValueError):
    """A request without effect, answered by a status and one line."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(" ".join(reason.split())[:MOST])
        self.status = status


MOST = 300
"""Characters of a reason: it may quote what a client sent."""
