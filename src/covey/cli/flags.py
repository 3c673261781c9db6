"""Flags of verbs that have no settings, or flags of their own besides."""

from collections.abc import Collection, Mapping, Sequence


def split_flags(
    words: Sequence[str], with_value: Mapping[str, str], alone: Collection[str]
) -> tuple[list[str], dict[str, str]]:
    """Split words into those that are none of these flags, in order, and the flags with their values.

    `with_value` says of each flag what it needs, as in "a value"; flags that stand alone have an empty value.
    ValueError for a flag without its value.

    >>> split_flags(["run", "--out=page.html", "--text"], {"--out": "a value"}, ["--text"])
    (['run'], {'--out': 'page.html', '--text': ''})
    """
    rest, others, given = list(words), [], {}
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag in with_value:
            if not equals and not rest:
                raise ValueError(f"{flag} needs {with_value[flag]}")
            given[flag] = value if equals else rest.pop(0)
        elif word in alone:
            given[word] = ""
        else:
            others.append(word)
    return others, given


def refuse_flags(others: Sequence[str], known: Collection[str]) -> None:
    """Refuse words that look like flags. Raises ValueError with those there are."""
    for word in others:
        if word.startswith("-"):
            raise ValueError(f'no flag "{word.partition("=")[0]}"; flags: {", ".join(known)}')


def refuse_no_folder(verb: str, folders: Sequence[object]) -> None:
    """Refuse (ValueError) a verb that is given no run folder."""
    if not folders:
        raise ValueError(f"covey {verb} needs a run folder, such as covey {verb} outputs/DATE/TIME")
