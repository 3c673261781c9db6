"""Heavy chains of human antibodies, with CDR-H3 as the gap: rows for a masked policy, split by likeness.

    python -m benchmarks.real.antibody_rows FOLDER      # writes train.jsonl and test.jsonl

CDR-H3 is the loop that binds most of the antigen and varies most: V, D and J genes meet there, with random letters
between them. The sequences are test data of the package `abstar` (MIT licence), from its wheel, pinned by SHA-256 and
never installed: 1,000 reads of a human repertoire, and the heavy chains of 221 published antibodies against HIV. Both
are nucleotides; what is left are reads that are one variable domain in one frame, from FR1's cysteine on.
"""

import hashlib
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from benchmarks.real.models import Wheel, fetched

READS = Wheel("abstar==0.8.0", "c3c25dd4c0ebcd8173fdd4737539957dfd2f5ca25a0a71cc7a1f2643cdb898f4")
FILES = ("abstar/test_data/test_1k.fasta", "abstar/test_data/test_hiv_bnab_hcs.fasta")
MASK = "[MASK]"
LIKE = 0.8
"""Two domains this like one another are in the same split, and so are those like either."""
HELD_OUT = 0.5
"""Share of the domains that is held out."""

BASES = "TCAG"
ACIDS = "FFLLSSSSYY**CC*WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG"
CODONS = {
    a + b + c: ACIDS[16 * BASES.index(a) + 4 * BASES.index(b) + BASES.index(c)]
    for a in BASES
    for b in BASES
    for c in BASES
}
FR1 = re.compile(r"[A-Z]{5}C(?=[A-Z]{9,20}W[A-Z][RKHQ])")
"""Ends with the first cysteine of the disulphide bond; behind CDR-H1 follows the tryptophan of FR2."""
FR3 = re.compile(r"(?=[A-Z]{2}[ATGSV][A-Z][YFHLW][YFHCSLNTQ]C)")
"""Seven letters that end with the second cysteine."""
FR4 = re.compile(r"W[GS][A-Z]G[A-Z]{0,3}[VL][TS]VS[SAP]")


@dataclass(frozen=True)
class Domain:
    """A variable domain: `text[start:stop]` is CDR-H3, without the cysteine before it and the tryptophan behind."""

    name: str
    text: str
    start: int
    stop: int

    @property
    def loop(self) -> str:
        return self.text[self.start : self.stop]

    @property
    def row(self) -> dict[str, str]:
        gap = MASK * (self.stop - self.start)
        prompt = self.text[: self.start] + gap + self.text[self.stop :]
        return {"prompt": prompt, "text": self.text, "loop": self.loop, "name": self.name}


def stretches(read: str) -> Iterator[str]:
    """Yield what lies between stops in the three frames of a read, as amino acids; X for a codon that is not clear."""
    for frame in range(3):
        yield from "".join(CODONS.get(read[i : i + 3], "X") for i in range(frame, len(read) - 2, 3)).split("*")


def domain_of(name: str, read: str) -> Domain | None:
    """Find the variable domain of a read. None where a part is not there, or of an unusual length."""
    return next((domain for found in stretches(read.upper()) if (domain := _domain(name, found))), None)


def _domain(name: str, found: str) -> Domain | None:
    begin = FR1.search(found)
    third = [match.start() + 7 for match in FR3.finditer(found)]
    end = FR4.search(found, third[-1]) if third else None
    if begin is None or end is None or begin.start() > third[-1]:
        return None
    text = found[begin.start() : end.end()]
    domain = Domain(name, text, third[-1] - begin.start(), end.start() - begin.start())
    usual = 5 <= len(domain.loop) <= 26 and 90 <= len(text) <= 130
    return domain if usual and "X" not in text else None


def records(fasta: str) -> Iterator[tuple[str, str]]:
    for record in fasta.split(">")[1:]:
        name, _, lines = record.partition("\n")
        yield name.strip(), "".join(lines.split())


def common(masks: Mapping[str, int], length: int, other: str) -> int:
    """Return the length of the longest common subsequence (Hyyrö 2004). `masks`: places of each letter, as bits."""
    full = (1 << length) - 1
    rest = full
    for letter in other:
        kept = rest & masks.get(letter, 0)
        rest = ((rest + kept) | (rest - kept)) & full
    return length - rest.bit_count()


def likeness(texts: Sequence[str]) -> Iterator[tuple[int, int, float]]:
    """Yield pairs with the share of the longer text that both have in one order: at least their identity."""
    places = [
        {letter: sum(1 << i for i, own in enumerate(text) if own == letter) for letter in set(text)} for text in texts
    ]
    for one, two in combinations(range(len(texts)), 2):
        length = len(texts[one])
        yield one, two, common(places[one], length, texts[two]) / max(length, len(texts[two]))


def families(texts: Sequence[str], least: float) -> list[list[int]]:
    """Join texts that are `least` alike, and those that are like either."""
    parent = list(range(len(texts)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = index = parent[parent[index]]
        return index

    for one, two, share in likeness(texts):
        if share >= least:
            parent[root(one)] = root(two)
    found: dict[int, list[int]] = {}
    for index in range(len(texts)):
        found.setdefault(root(index), []).append(index)
    return list(found.values())


def split(domains: Sequence[Domain]) -> dict[str, list[Domain]]:
    """Hold out whole families, in an order that follows from their sequences, until the share is reached."""
    kin = families([domain.text for domain in domains], LIKE)
    by_digest = sorted(kin, key=lambda family: hashlib.sha256(min(domains[i].text for i in family).encode()).digest())
    held: set[int] = set()
    for family in by_digest:
        held |= set(family) if len(held) + len(family) <= HELD_OUT * len(domains) else set()
    return {
        "train": [domain for index, domain in enumerate(domains) if index not in held],
        "test": [domain for index, domain in enumerate(domains) if index in held],
    }


def read_domains(wheel: Path) -> list[Domain]:
    """Return the different domains of the wheel's reads."""
    with zipfile.ZipFile(wheel) as archive:
        reads = [record for file in FILES for record in records(archive.read(file).decode())]
    found = [domain for name, read in reads if (domain := domain_of(name, read)) is not None]
    return list({domain.text: domain for domain in reversed(found)}.values())[::-1]


def write_rows(folder: Path) -> dict[str, int]:
    """Write rows with a gapped `prompt`, the `text`, the `loop` that stood there and a `name`. Returns how many."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        splits = split(read_domains(fetched([READS], Path(scratch))[0]))
    for name, domains in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(domain.row)}\n" for domain in domains))
    return {name: len(domains) for name, domains in splits.items()}


if __name__ == "__main__":
    print(write_rows(Path(sys.argv[1])))
