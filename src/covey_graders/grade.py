"""The verdict on one answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grade:
    """Whether an answer is right, and in the requested form.

    >>> Grade(is_right=False, has_form=True).reward(format_reward=0.1)
    0.1
    """

    is_right: bool
    has_form: bool

    def reward(self, format_reward: float = 0.0) -> float:
        """Return 1 for right, `format_reward` for wrong in form, else 0."""
        return 1.0 if self.is_right else format_reward * self.has_form
