"""The output of a run in a notebook, redrawn after each step."""

import math
import sys
from collections import deque
from html import escape
from typing import Any, Self

from covey.run.records.terminal import Panel, Progress, average_bins, make_progress, number_cells, time_left

MAX_MESSAGES = 50
"""Lines kept in view below the numbers."""
WIDTH, HEIGHT = 360, 60
"""Size of the curve, in pixels."""


def is_notebook() -> bool:
    """Return True in the kernel of a notebook, which shows HTML."""
    if "ipykernel" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    return hasattr(get_ipython(), "kernel")


def progress_of(num_steps: int, *, shows: bool) -> Progress:
    """Make the display: a cell's output in a notebook, else the terminal."""
    return NotebookProgress(num_steps) if shows and is_notebook() else make_progress(num_steps, shows)


class NotebookProgress(Panel):
    """Bar, numbers, reward curve and last messages in a cell's output."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(num_steps)
        self._messages: deque[str] = deque(maxlen=MAX_MESSAGES)
        self._handle: Any = None

    def message(self, text: str) -> None:
        self._new_at = self._clock()
        self._messages.append(text)
        self._draw()

    def __enter__(self) -> Self:
        from IPython.display import HTML, display

        self._handle = display(HTML(self.html()), display_id=True)
        return self

    def html(self) -> str:
        left = time_left(self._pace.seconds_left)
        bar = f'<progress value="{self._step}" max="{self._pace.num_steps}" style="width:{WIDTH}px"></progress>'
        lines = [f"<div>step {self._step}/{self._pace.num_steps} {bar} {left}</div>"] if self._step else []
        cells, rewards = number_cells(self._metrics), [reward for reward in self._rewards if math.isfinite(reward)]
        lines += [f"<div>{escape('   '.join(cells))}</div>"] if cells else []
        lines += [curve(rewards)] if len(rewards) > 1 else []
        lines += [f"<div>{escape(self._evaluation)}</div>"] if self._evaluation else []
        lines += [f"<div>{escape(self._waiting)}</div>"] if self._waiting else []
        lines.append(f"<pre>{escape(chr(10).join(self._messages))}</pre>")
        return f'<div style="font-family:monospace">{"".join(lines)}</div>'

    def _draw(self) -> None:
        if self._handle is not None:
            from IPython.display import HTML

            self._handle.update(HTML(self.html()))


def curve(values: list[float], width: int = WIDTH, height: int = HEIGHT) -> str:
    """Draw a line through the values, or through means, as SVG.

    >>> curve([0.0, 1.0])[:24]
    '<svg width="360" height='
    """
    low, high = min(values), max(values)
    scale = (height - 4) / (high - low) if high > low else 0.0
    drawn = average_bins(values, width)
    step = (width - 4) / max(1, len(drawn) - 1)
    points = " ".join(f"{2 + i * step:.1f},{height - 2 - (v - low) * scale:.1f}" for i, v in enumerate(drawn))
    label = f"reward from {values[0]:.3f} to {values[-1]:.3f}, between {low:.3f} and {high:.3f}"
    return (
        f'<svg width="{width}" height="{height}" role="img" aria-label="{label}"><title>{label}</title>'
        f'<polyline points="{points}" fill="none" stroke="#2a6f97" stroke-width="2"/></svg>'
    )
