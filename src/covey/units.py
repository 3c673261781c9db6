"""Numbers as people read them."""


def duration(seconds: float) -> str:
    """Three forms by size.

    >>> duration(0.42), duration(42.4), duration(3725)
    ('0.42 s', '42 s', '1:02:05')
    """
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def memory(count: float) -> str:
    """Bytes in binary units.

    >>> memory(1536 * 1024)
    '1.5 MiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} GiB"


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage.

    >>> percent(0.253)
    '25.3 %'
    """
    return f"{100 * share:.{digits}f} %"
