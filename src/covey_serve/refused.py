"""Errors of the service: refused at once, or as the result of a promise."""


class Refused(ValueError):
    """A request is answered by a status and one line, and has no effect."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(" ".join(reason.split())[:MOST])
        self.status = status


MOST = 300
"""Characters of a reason: it may quote what a client sent."""
