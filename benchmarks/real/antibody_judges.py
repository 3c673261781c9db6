"""What says whether a CDR-H3 is good: judges that learned it, and rules of those who develop antibodies.

A judge is covey's small encoder, trained as `environment=infill` trains its own, on pairs of a loop as nature made it
and one as a policy fills it in. It reads the loop between four letters of the frame on either side. One judge pays; one
trained from another seed on the families held out looks on, and so does a model of counted letters of theirs.

A masked model's own likelihood would be no judge: it ranks its likeliest loop, mostly G and Y, above natural ones.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.real.antibody_rows import MASK

ACIDS = frozenset("ACDEFGHIKLMNPQRSTVWY")
FRAME = 4
"""Letters of the frame that a judge sees on either side."""
LIABILITIES = {
    "glycosylation": re.compile(r"N[^P][ST]"),
    "deamidation": re.compile(r"NG"),
    "isomerisation": re.compile(r"DG"),
}
"""Motifs at which an antibody is altered in the body or on the shelf."""
NUM_READ = 32
"""Loops whose likelihood is measured."""
JUDGE = {"judge_num_steps": 300, "judge_hidden_size": 64, "judge_num_layers": 2, "judge_lr": 2e-3}
TILTS = (0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.5, 2.0, 3.0)
"""Fills drawn of each gap for judges to learn from: how strongly the policy leans to letters drawn by lot, in nats."""


# ------------------------------------------------------------------------------------------------ rewards


def shown(prompt: str, fill: str) -> str:
    """Return a fill between the letters beside its gap."""
    return prompt.partition(MASK)[0][-FRAME:] + fill + prompt.rpartition(MASK)[2][:FRAME]


def is_whole(prompt: str, fill: str) -> bool:
    """Return whether a fill has a letter for each gap, all of them amino acids."""
    return len(fill) == prompt.count(MASK) and set(fill) <= ACIDS


def liabilities(prompt: str, fill: str) -> list[str]:
    """Name what is wrong with a fill to a developer: motifs that it is part of, and a cysteine without a partner."""
    text = shown(prompt, fill)
    inside = range(FRAME, FRAME + len(fill))
    found = [
        name
        for name, motif in LIABILITIES.items()
        if any(match.start() in inside or match.end() - 1 in inside for match in motif.finditer(text))
    ]
    return found + ["free cysteine"] * (fill.count("C") % 2)


def sound(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Return 1 for a whole loop without liabilities."""
    pairs = zip(prompts, completions, strict=True)
    return [float(is_whole(prompt, fill) and not liabilities(prompt, fill)) for prompt, fill in pairs]


class Natural:
    """The probability that a loop is nature's, by a trained judge; 0 where it is not whole."""

    def __init__(self, folder: str, name: str = "natural") -> None:
        self.folder, self.__name__ = folder, name
        self._judge: Any = None

    def prepare(self) -> None:
        """Load the judge."""
        from covey_tasks.infill.judge import Judge
        from covey_tasks.infill.settings import InfillConfig

        self._judge = self._judge or Judge(self.folder, InfillConfig())

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        self.prepare()
        pairs = list(zip(prompts, completions, strict=True))
        scores = self._judge.score([shown(prompt, fill) for prompt, fill in pairs])
        return [score * is_whole(*pair) for score, pair in zip(scores, pairs, strict=True)]


class Counted:
    """Nats a letter under counts of the held-out loops of other families' halves: it learned from no policy."""

    __name__ = "counted"

    def __init__(self, rows: str) -> None:
        """Count loops of rows: of those whose place is even, and of the others."""
        from covey_tasks.infill.build import NgramModel

        found = [row["loop"] for row in read_rows(Path(rows))]
        self._half = {loop: place % 2 for place, loop in enumerate(found)}
        self._models = [NgramModel(found[half::2], order=4) for half in (0, 1)]

    def __call__(self, completions: Sequence[str], loop: Sequence[str], **columns: Any) -> list[float]:
        pairs = zip(completions, loop, strict=True)
        return [self._models[1 - self._half.get(own, 0)].log_prob(fill) for fill, own in pairs]


class Shuffled:
    """The control: what would be paid, dealt anew among the fills of a gap, so that it says nothing of any."""

    __name__ = "shuffled"
    needs_whole_groups = True

    def __init__(self, folder: str, weight: float) -> None:
        self._natural, self._weight = Natural(folder), weight

    def prepare(self) -> None:
        self._natural.prepare()

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        natural = self._natural(prompts, completions)
        paid = [one + self._weight * two for one, two in zip(natural, sound(prompts, completions), strict=True)]
        random.Random("".join(completions)).shuffle(paid)
        return paid


# ------------------------------------------------------------------------------------------------ judges


def read_rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@dataclass(frozen=True)
class Gap:
    """A row with what the untrained policy fills in, as it is and as it might become."""

    row: Mapping[str, str]
    fills: Sequence[str]
    tilted: Sequence[str]
    likeliest: str

    def wrong(self, chance: random.Random) -> str:
        """Return a loop that nature did not make.

        As often as one of the policy's it is one of a policy that leans to some letters: what a policy that is paid
        turns to first. A judge that never saw such takes whatever the untrained one seldom writes for nature's.
        """
        loop, fill = self.row["loop"], chance.choice(self.fills)
        middle = list(loop[2:-2])
        chance.shuffle(middle)
        mixed = "".join(chance.choice(letters) for letters in zip(loop, fill, strict=True))
        others = (chance.choice(self.tilted), f"{loop[:2]}{''.join(middle)}{loop[-2:]}", mixed, self.likeliest)
        found = chance.choices((fill, *others), (8, 8, 2, 2, 1))[0]
        return found if found != loop else self.likeliest


def filled(model: str, rows: Sequence[Mapping[str, str]], seed: int) -> Iterator[Gap]:
    """Have the policy fill in every row's gap, as the infill document samples (0.8, top 0.95), with all `TILTS`."""
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForMaskedLM.from_pretrained(model).eval()
    draws = torch.Generator().manual_seed(seed)

    def words(ids: "torch.Tensor") -> str:
        return "".join(tokenizer.convert_ids_to_tokens(ids.tolist()))

    def draw(logits_GV: "torch.Tensor", tilt: float) -> str:
        lean_V = tilt * torch.randn(logits_GV.shape[1], generator=draws)
        lean_V[tokenizer.all_special_ids] = -torch.inf
        chance_GV, order_GV = ((logits_GV + lean_V) / 0.8).softmax(-1).sort(descending=True)
        kept_GV = chance_GV * (chance_GV.cumsum(-1) - chance_GV < 0.95)
        return words(order_GV.gather(1, torch.multinomial(kept_GV, 1, generator=draws))[:, 0])

    ordered = sorted(rows, key=lambda row: len(row["text"]))
    for some in (ordered[start : start + 16] for start in range(0, len(ordered), 16)):
        inputs = tokenizer([row["prompt"] for row in some], return_tensors="pt", padding=True)
        with torch.inference_mode():
            logits = policy(**inputs).logits
        for row, ids, logits_TV in zip(some, inputs["input_ids"], logits, strict=True):
            gaps_GV = logits_TV[ids == tokenizer.mask_token_id]
            drawn = [draw(gaps_GV, tilt) for tilt in TILTS]
            plain = TILTS.count(0.0)
            yield Gap(row, drawn[:plain], drawn[plain:], words(gaps_GV.argmax(-1)))


def train(gaps: Sequence[Gap], seed: int, folder: Path) -> None:
    """Train a judge to tell natural loops from others, and save it."""
    from covey.policy.models.nano import nano_masked_tokenizer
    from covey_tasks.infill.judge_training import Pair, train_judge
    from covey_tasks.infill.settings import InfillConfig

    def draw(count: int, chance: random.Random) -> list[Pair]:
        chosen = [chance.choice(gaps) for _ in range(count)]
        pairs = [(gap.row["prompt"], gap.row["loop"], gap.wrong(chance)) for gap in chosen]
        return [(shown(prompt, loop), shown(prompt, wrong)) for prompt, loop, wrong in pairs]

    tokenizer = nano_masked_tokenizer()
    model, _ = train_judge(InfillConfig(**JUDGE), seed, tokenizer, draw)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def accuracy(folder: Path, gaps: Sequence[Gap]) -> dict[str, float]:
    """Return how often a judge ranks the natural loop above each kind of other one."""
    judge = Natural(str(folder))
    prompts = [gap.row["prompt"] for gap in gaps]
    chance = random.Random(0)
    kinds = {"fill": [gap.fills[0] for gap in gaps], "likeliest": [gap.likeliest for gap in gaps]}
    kinds["of a leaning policy"] = [chance.choice(gap.tilted) for gap in gaps]
    natural = judge(prompts, [gap.row["loop"] for gap in gaps])
    return {
        kind: sum(real > other for real, other in zip(natural, judge(prompts, loops), strict=True)) / len(gaps)
        for kind, loops in kinds.items()
    }


def own_likelihood(model: str, gaps: Sequence[Gap]) -> dict[str, float]:
    """Return nats a letter that the untrained policy gives loops in two passes, each with every second letter masked.

    Why its likelihood is no reward: what it finds likeliest it finds likelier than nature's.
    """
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForMaskedLM.from_pretrained(model).eval()

    def of(prompt: str, loop: str) -> float:
        text_T = tokenizer(prompt.replace(MASK * len(loop), loop), return_tensors="pt")["input_ids"][0]
        first = 1 + len(prompt.partition(MASK)[0])
        found = []
        for half in (0, 1):
            hidden = torch.arange(first + half, first + len(loop), 2)
            with torch.inference_mode():
                masked_T = text_T.scatter(0, hidden, tokenizer.mask_token_id)
                logprob_TV = policy(masked_T[None]).logits[0].log_softmax(-1)
            found += logprob_TV[hidden, text_T[hidden]].tolist()
        return sum(found) / len(found)

    kinds = {"natural": [gap.row["loop"] for gap in gaps], "fill": [gap.fills[0] for gap in gaps]}
    kinds["likeliest"] = [gap.likeliest for gap in gaps]
    prompts = [gap.row["prompt"] for gap in gaps]
    return {kind: sum(map(of, prompts, loops)) / len(gaps) for kind, loops in kinds.items()}


def make_judges(model: str, rows: Path, folder: Path) -> dict[str, dict[str, float]]:
    """Train the judge that pays on the training families, and the one that looks on on those held out.

    Returns the accuracy of each on the families of the other, and the policy's own likelihood of some loops.
    """
    gaps = {name: list(filled(model, read_rows(rows / f"{name}.jsonl"), 0)) for name in ("train", "test")}
    for seed, name in enumerate(gaps):
        train(gaps[name], seed, folder / name)
    found = {"train": accuracy(folder / "train", gaps["test"]), "test": accuracy(folder / "test", gaps["train"])}
    return {**found, "own_likelihood": own_likelihood(model, gaps["test"][:: len(gaps["test"]) // NUM_READ])}
