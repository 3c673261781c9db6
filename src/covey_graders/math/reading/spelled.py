"""Numbers in English words: forty-two, two thirds, 3 and a half."""

import re

from covey_graders.tables import table_beside


def in_digits(text: str) -> str:
    """Write a text's leading number word in digits: `forty-two`, `a dozen`."""
    found = _IN_WORDS.match(text)
    if found is None or any(character.isdigit() for character in text):
        return with_parts(text)
    total = current = 0
    for word in re.findall(r"[a-z]+", found["number"].lower()):
        size = SMALL.get(word, LARGE.get(word, 0))
        if word in LARGE and size > 100:
            total, current = total + max(current, 1) * size, 0
        else:
            current = max(current, 1) * size if word in LARGE else current + size
    part = f"/{PARTS[found['part'].lower().rstrip('s')]}" if found["part"] else ""
    rest = text[found.end() :]
    joint = _JOINT.match(rest)
    rest = rest if joint is None else joint[0] + in_digits(rest[joint.end() :])
    return with_parts(f"{'-' if found['sign'] else ''}{total + current}{part}{rest}")


def with_parts(text: str) -> str:
    """Write "3 and a half" as 3 1/2."""
    return _AND_PART.sub(lambda match: f"{match[1]} {SMALL.get(match[2], 1)}/{PARTS[match[3]]}", text)


_TABLE = table_beside(__file__)
SMALL = {word: number for number, word in enumerate(_TABLE["up_to_nineteen"].split())}
SMALL |= {word: 10 * number for number, word in enumerate(_TABLE["tens"].split(), start=2)}
LARGE: dict[str, int] = _TABLE["large"]
PARTS: dict[str, int] = _TABLE["parts"]
_AND_PART = re.compile(r"\b(\d+) +and (a|one|two|three|four)[ -](half|third|quarter|fourth|fifth)s?\b")
_JOINT = re.compile(r"(?:,? (?:or|to)|,) ")
_WORD = "|".join((*SMALL, *LARGE))
_IN_WORDS = re.compile(
    rf"(?P<sign>(?:negative|minus) )?(?P<number>\b(?:{_WORD})\b"
    rf"(?:(?:[ -]|(?:(?<=hundred)|(?<=thousand)|(?<=million)) and )(?:{_WORD})\b)*)"
    rf"(?:[ -](?P<part>{'|'.join(PARTS)})s?\b)?",
    re.IGNORECASE,
)
