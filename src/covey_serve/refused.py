"""The error of a request that is refused at once."""


class RequestRefused(ValueError):
    """A request without effect, answered by a status and one line."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(" ".join(reason.split())[:MOST])
        self.status = status


MOST = 300
"""Characters of a reason: it may quote what a client sent."""
