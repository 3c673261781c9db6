"""Error replies to a program whose call is refused."""

from typing import Any


class Refused(Exception):  # no error of covey's: the answer to a call
    """Raised where a call is not taken.

    >>> Refused(404, "not found").body
    {'error': {'message': 'not found', 'type': 'invalid_request_error', 'param': None, 'code': None}}
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """Return it as the OpenAI API writes errors."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
