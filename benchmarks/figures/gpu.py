"""The figure of what one GPU does in a training step, by kernels that a profile names."""

from collections.abc import Mapping
from typing import Any

from benchmarks.figures.measured import read
from benchmarks.figures.svg import Drawing

KINDS = {
    "products": (("nvjet", "cutlass"), "cool"),
    "attention": (("flash", "sdpa"), "good"),
    "norms, gates, positions": (("rms_norm", "swiglu", "rope", "triton_red_fused__to_copy"), "warm"),
    "casts, sums, copies": (("elementwise", "reduce_kernel", "Memcpy"), "bad"),
    "softmax of the head": (("triton_", "Soft"), "muted"),
    "AdamW": (("Adam",), "ink"),
}
"""What a kernel is for, by a part of its name."""
SHORT = "shorter kernels"


def gpu() -> Drawing:
    """Return the milliseconds of one training step of 1.5B weights, by torch alone and fused, by kind of kernel."""
    parts = read("gpu")["parts"]
    shown = {"torch alone": parts["training without Liger"], "fused": parts["training"]}
    profiles = {name: _by_kind(part["profile"]) for name, part in shown.items()}
    drawing = Drawing(980, 250, "A training step on an H100: what the GPU does")
    drawing.text(
        30, 32, "A training step of 1.5B weights on an H100, ms of kernels", size=17, anchor="start", weight=600
    )
    scale = 700 / max(sum(kinds.values()) for kinds in profiles.values())
    for place, (name, kinds) in enumerate(profiles.items()):
        x, y = 150.0, 56.0 + 62 * place
        drawing.text(136, y + 26, name, size=15, anchor="end", weight=600)
        for kind, spent in kinds.items():
            colour = KINDS[kind][1] if kind in KINDS else "line"
            drawing.rect(x, y, max(2.0, scale * spent - 2), 40, colour, colour)
            x += scale * spent
        drawing.text(x + 10, y + 26, f"{sum(kinds.values()):,.0f} ms", size=15, anchor="start")
    for place, kind in enumerate([*KINDS, SHORT]):
        row, column = divmod(place, 4)
        x, y = 150.0 + 200 * column, 204.0 + 24 * row
        colour = KINDS[kind][1] if kind in KINDS else "line"
        drawing.rect(x, y - 11, 14, 14, colour, colour)
        drawing.text(x + 22, y + 1, kind, size=13, anchor="start", colour="muted")
    return drawing


def _by_kind(profile: Mapping[str, Any]) -> dict[str, float]:
    """Add up the longest kernels by what they are for; what is left of the whole is shorter ones."""
    found = dict.fromkeys(KINDS, 0.0)
    for name, _, spent in profile["longest"]:
        kind = next(kind for kind, (marks, _) in KINDS.items() if any(mark in name for mark in marks))
        found[kind] += spent
    return found | {SHORT: profile["ms"] - sum(found.values())}
