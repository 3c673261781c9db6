"""Numbers, times and messages as people read them."""

from datetime import UTC, datetime
from pathlib import Path


def timestamp() -> str:
    """Return the time in UTC, as 2026-11-22T09:41:44.123+00:00."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def relative(folder: Path) -> str:
    """Return a folder's path, relative if inside the working directory."""
    here, place = Path.cwd(), folder.resolve()
    return str(place.relative_to(here) if place.is_relative_to(here) and place != here else place)


def one_line(text: str) -> str:
    return " ".join(text.split())


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def duration(seconds: float) -> str:
    """Format seconds in one of three forms by size.

    >>> duration(0.42), duration(42.4), duration(59.7), duration(3725)
    ('0.42 s', '42 s', '1:00', '1:02:05')
    """
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def memory(count: float) -> str:
    """Format bytes in binary units.

    >>> memory(1536 * 1024)
    '1.5 MiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} GiB"


def count(number: float) -> str:
    """Format a number with three digits and a unit.

    >>> count(494_032_768), count(7_615_616_512), count(12_345), count(640)
    ('494M', '7.62B', '12.3K', '640')
    """
    for unit in ("", "K", "M"):
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}B"


def number_of(number: int, noun: str) -> str:
    """Count things, of which one has no s.

    >>> number_of(0, "step"), number_of(1, "step"), number_of(1200, "step")
    ('0 steps', '1 step', '1,200 steps')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def three_digits(value: float) -> str:
    """Format a number with three digits, a large one in whole thousands.

    >>> three_digits(0.04567), three_digits(2404.2), three_digits(999.6), three_digits(1234567)
    ('0.0457', '2,404', '1,000', '1,234,567')
    """
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e9 else f"{value:.3g}"


def four_digits(value: float) -> float:
    """Round to four digits, enough to draw.

    >>> four_digits(0.123456)
    0.1235
    """
    return float(f"{value:.4g}")


def percent(share: float, digits: int = 1) -> str:
    """Format a share as a percentage.

    >>> percent(0.253)
    '25.3 %'
    """
    return f"{100 * share:.{digits}f} %"
