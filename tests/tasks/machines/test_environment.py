"""The environment: what an answer is worth, in every form and stage, with a simulator that only counts blocks."""

import asyncio
import math
import random
from typing import Any

import pytest

from covey.types import Failure, Prompt, Reward
from covey_tasks.machines.design.stages import STAGES, stage_problems
from covey_tasks.machines.design.tree import write_json
from covey_tasks.machines.design.types import ROOT, Block, Tree
from covey_tasks.machines.environment import Machines, best_of
from covey_tasks.machines.physics.simulators import CachedSimulators
from covey_tasks.machines.physics.throwing import Throw
from covey_tasks.machines.physics.trajectory import Flight, Outcome
from covey_tasks.machines.physics.worlds import World
from covey_tasks.machines.prompts import FORMS, explanation, instruction_of
from covey_tasks.machines.settings import MachinesConfig

CAR: Tree = (ROOT, Block(63, 0, 0), Block(2, 1, 1), Block(2, 1, 4))
CAR_TEXT = "Ba0Wb1Wb4"
OVERLAP = "Ba0Wb1Wb2"


class Counting:
    """A machine drives as many metres as it has blocks; a boulder rises 2 m and flies 10."""

    version = "counting-1"

    def __init__(self) -> None:
        self.seen: list[tuple[Tree, World]] = []
        self.is_closed = False

    async def run(self, tree: Tree, world: World) -> Outcome | Failure:
        self.seen.append((tree, world))
        if any(block.type == 35 for block in tree):
            return Failure("the simulator crashed")
        if any(block.type == 16 for block in tree):
            return Outcome("unstable", 0.0, 0.0, 0.0, None, ())
        throw = Throw(1.0, 4.0, 10.0, 0.2, 0.5, on_ground=True, rise=2.0, distance=10.0)
        flight = Flight(3.0, 5.0, 10.0, 10.0, 10.0, 0.5, True, throw) if any(b.type == 36 for b in tree) else None
        distance = float(len(tree))
        return Outcome("complete", distance, 0.0, distance, flight, ())

    def close(self) -> None:
        self.is_closed = True


def environment(*stages: str, simulator: Counting | None = None, max_blocks: int = 48, **settings: Any) -> Machines:
    stages = stages or ("car",)
    problems = stage_problems(stages, 8, max_blocks, random.Random(0))
    own = {"form": "compact", "stages": list(stages), "num_demonstrations": 30, "max_blocks": max_blocks}
    how = MachinesConfig(**(own | settings))
    simulators = CachedSimulators(simulator or Counting(), 0)
    return Machines({"train": problems, "test": problems[:2]}, simulators, how)


def rewards(of: Machines, *completions: str, index: int = 0) -> list[Reward | Failure]:
    return asyncio.run(of.score(of.prompts("train")[index], completions))


def reward(of: Machines, completion: str, index: int = 0) -> Reward:
    (found,) = rewards(of, completion, index=index)
    assert isinstance(found, Reward)
    return found


# ------------------------------------------------------------------------------------------------ rewards


def test_a_machine_is_worth_its_score() -> None:
    assert reward(environment(), CAR_TEXT) == Reward(
        4.0, {"file_valid": 1.0, "machine_valid": 1.0, "performance": 4.0, "score": 4.0, "nonzero": 1.0}
    )


def test_what_is_no_machine_is_worth_nothing_and_not_simulated() -> None:
    simulator = Counting()
    found = rewards(environment(simulator=simulator), "nonsense", OVERLAP, "Ba0" * 60)
    assert [verdict.value for verdict in found if isinstance(verdict, Reward)] == [0.0, 0.0, 0.0]
    assert [verdict.parts["file_valid"] for verdict in found if isinstance(verdict, Reward)] == [0.0, 1.0, 0.0]
    assert simulator.seen == []


def test_shaping_adds_for_a_tree_and_for_a_machine() -> None:
    shaped = environment(file_reward=0.1, placed_reward=0.2)
    assert reward(shaped, "nonsense").value == 0.0
    assert reward(shaped, OVERLAP).value == pytest.approx(0.1)
    assert reward(shaped, CAR_TEXT).value == pytest.approx(4.3)


@pytest.mark.parametrize(("transform", "value"), [("none", 4.0), ("sqrt", 2.0), ("log1p", math.log(5))])
def test_a_transform_changes_the_reward_and_not_the_score(transform: str, value: float) -> None:
    found = reward(environment(transform=transform), CAR_TEXT)
    assert found.value == pytest.approx(value)
    assert found.parts["score"] == 4.0


def test_the_value_is_the_weighted_sum_of_the_parts() -> None:
    made = environment(file_reward=0.1, placed_reward=0.2, transform="sqrt")
    found = reward(made, CAR_TEXT)
    assert found.value == sum(made.part_weights[name] * value for name, value in found.parts.items())


def test_a_simulator_that_fails_is_a_failure_and_no_reward() -> None:
    made = environment()
    first, second = rewards(made, "Ma0", CAR_TEXT)
    assert first == Failure("the simulator crashed")
    assert isinstance(second, Reward)
    assert made.metrics()["score_mean"] == 4.0


def test_all_forms_of_a_machine_are_worth_the_same() -> None:
    for form in ("tree", "global"):
        text = f"A car.\n```json\n{FORMS[form].write(CAR)}\n```\nDone."
        assert reward(environment(form=form), text).value == 4.0


QWEN = """### Design
A **4-wheel car**: two logs in line, a powered wheel at each corner. My first idea was

```json
[{"type": 0, "id": 0, "parent": -1, "face_id": -1}]
```

but that has no wheels.

### Construction tree
```json
[
  {
    "type": "0",
    "id": 0,
    "parent": -1,
    "face_id": -1
  },
  {"type": 63, "id": 1, "parent": 0, "face_id": 0},
  {"type": 63, "id": 2, "parent": 0, "face_id": 1},
  {"type": "2", "id": "3", "parent": "1", "face_id": "3"},
  {"type": 2, "id": 4, "parent": 1, "face_id": 6},
  {"type": 2, "id": 5, "parent": 2, "face_id": 3},
  {"type": 2, "id": 6, "parent": 2, "face_id": 6}
]
```

### Why it works
1. Wheels at x- and x+ all drive to `z+`.
2. The long base keeps it straight \u2014 it won't tip over.
"""
"""A draft in a first block, indented JSON, numbers as strings, and words after it."""


def test_an_answer_as_a_language_model_writes_it_is_read_and_simulated() -> None:
    pytest.importorskip("mujoco", reason="needs covey[machines]")
    from covey_tasks.machines.physics.simulate import outcome_of

    class Here(Counting):
        async def run(self, tree: Tree, world: World) -> Outcome | Failure:
            return outcome_of(tree, world)

    found = reward(environment(form="tree", simulator=Here()), QWEN)
    assert 30.0 < found.value < 40.0
    without_end = QWEN.partition("### Why")[0].rstrip().removesuffix("```")
    assert reward(environment(form="tree", simulator=Here()), without_end) == found


def test_the_repositorys_spelling_is_scored_too() -> None:
    text = write_json(CAR[:2]).replace('"id"', '"order_id"').replace('"type"', '"id"').replace("face_id", "bp_id")
    assert reward(environment(form="tree"), f"```json\n{text}\n```").value == 2.0


# ------------------------------------------------------------------------------------------------ stages


def test_validity_is_worth_one_for_three_to_five_blocks() -> None:
    simulator = Counting()
    first = environment("valid", simulator=simulator)
    values = [reward(first, text).value for text in ("", "Ba0", "Ba0Wb1", "Ba0Wb1Wb4Bb0", "Ba0Wb1Wb4Bb0Be0", OVERLAP)]
    assert values == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert simulator.seen == []


def test_a_prompt_states_its_budget_and_the_budget_counts() -> None:
    made = environment("budget_car")
    assert [prompt.text for prompt in made.prompts("train")[:2]] == ["budget_car 4:", "budget_car 5:"]
    assert reward(made, "Ba0Wb1Wb4Bb0", index=0).value == 0.0
    assert reward(made, "Ba0Wb1Wb4Bb0", index=1).value == 5.0


def test_an_arm_continues_where_the_prompt_ended() -> None:
    made = environment("arm")
    for prompt, text in made.demonstrations("train"):
        (found,) = asyncio.run(made.score(prompt, [text]))
        assert isinstance(found, Reward | Failure)
        assert isinstance(found, Failure) or found.parts["machine_valid"] == 1.0


def test_in_json_an_arm_must_repeat_what_was_given() -> None:
    made = environment("arm", form="tree")
    assert reward(made, write_json((ROOT, Block(30, 0, 4), Block(36, 1, 0)))).parts["file_valid"] == 0.0
    prompt, text = made.demonstrations("train")[0]
    assert "Begin with exactly these blocks" in prompt.text[-1]["content"]  # type: ignore[index]
    assert text.count("```") == 2


def test_catapults_are_scored_in_their_world() -> None:
    simulator = Counting()
    thrown = "Sa0Cb3Qc0"
    for score, value in (("strict", 20.0), ("paper", 50.0), ("repo", 30.0)):
        assert reward(environment("catapult", simulator=simulator, score=score), thrown).value == value
    assert [world for _, world in simulator.seen] == ["catapult", "catapult", "open"]


def test_text_alone_is_answered_by_the_only_stage() -> None:
    text = Prompt("own", "document", "Build a car to drive far.", {})
    (found,) = asyncio.run(environment().score(text, [CAR_TEXT]))
    assert isinstance(found, Reward)
    assert found.value == 4.0
    assert environment().difficulty(text) == 2
    with pytest.raises(ValueError, match="has no column 'stage'"):
        asyncio.run(environment("car", "valid").score(text, [CAR_TEXT]))


def test_difficulty_is_that_of_the_stage() -> None:
    made = environment("small_car", "catapult", "valid")
    assert [made.difficulty(prompt) for prompt in made.prompts("train")[:3]] == [1, 4, 0]


def test_prompts_have_ids_of_their_own_in_both_splits() -> None:
    made = environment()
    ids = [prompt.id for split in ("train", "test") for prompt in made.prompts(split)]  # type: ignore[arg-type]
    assert len(set(ids)) == len(ids) == 10


# ------------------------------------------------------------------------------------------------ demonstrations


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stage", STAGES)
def test_demonstrations_are_valid_answers_to_their_prompts(stage: str, form: str) -> None:
    made = environment(stage, form=form)
    shown = made.demonstrations("train")
    assert len(shown) > 25
    for prompt, text in shown[:10]:
        assert prompt.id.startswith("demonstration-")
        (found,) = asyncio.run(made.score(prompt, [text]))
        assert isinstance(found, Failure) or found.parts["machine_valid"] == 1.0


def test_the_cap_leaves_out_what_scores_best() -> None:
    every, fewer = (environment(demonstration_cap=cap).demonstrations("train") for cap in (1.0, 0.5))
    texts = {text for _, text in fewer}
    left_out = [text for _, text in every if text not in texts]
    assert 5 < len(left_out) <= 20
    assert len(max(left_out, key=len)) >= len(max(texts, key=len))


def test_an_explanation_says_what_each_block_is_for() -> None:
    assert explanation(CAR, "car") == (
        "A car of 4 blocks, built in this order.\n"
        "1: Log on face 0 (Front) of block 0, faces z+.\n"
        "2: Powered Wheel on face 1 (Left) of block 1, faces x-: drives to z+.\n"
        "3: Powered Wheel on face 4 (Right) of block 1, faces x+: drives to z+."
    )


def test_the_instruction_lists_the_allowed_blocks_and_their_faces() -> None:
    problem = stage_problems(["car"], 1, 48, random.Random(0))[0]
    text = instruction_of(problem.rules, "tree")
    assert "\n1 Wooden Block, 1x1x2, 0.5 kg; 0 Front z 2; 1, 2 Left z 0.5, 1.5; 3, 4 Right z 0.5, 1.5; " in text
    assert "\n9 Rubber Band, linear, 0.4 kg: pulls its two ends together\n" in text
    assert "Boulder" not in text.partition("Blocks (type")[2].partition("Answer")[0]
    assert len(text) < 6000


def test_an_instruction_of_ones_own_takes_its_place() -> None:
    prompt = environment(form="tree", instruction="Be brief.").prompts("train")[0]
    assert prompt.text[0] == {"role": "system", "content": "Be brief."}
    assert len(environment(form="tree", instruction="").prompts("train")[0].text) == 1


# ------------------------------------------------------------------------------------------------ metrics


def test_metrics_tell_validity_in_space_and_how_many_machines_differ() -> None:
    made = environment()
    rewards(made, CAR_TEXT, CAR_TEXT, "Ba0", OVERLAP, "nonsense")
    found = made.metrics()
    assert found["score_mean"] == pytest.approx(2.0)
    assert found["score_max"] == 4.0
    assert found["unique_machines"] == 2.0
    assert found["spatial_validity"] == 0.75
    assert (found["invalid/overlap"], found["invalid/shape"]) == (0.2, 0.2)
    assert made.metrics() == {}


def test_a_simulation_that_diverges_scores_0_and_is_counted_by_its_name() -> None:
    made = environment()
    found = rewards(made, "Pa0", CAR_TEXT, OVERLAP, CAR_TEXT)
    assert [one.value for one in found if isinstance(one, Reward)] == [0.0, 4.0, 0.0, 4.0]
    metrics = made.metrics()
    assert (metrics["invalid/unstable"], metrics["invalid/overlap"]) == (0.25, 0.25)
    rewards(made, CAR_TEXT)
    assert "invalid/unstable" not in made.metrics()


def test_a_machine_built_in_another_order_is_no_other_machine() -> None:
    made = environment()
    rewards(made, CAR_TEXT, "Ba0Wb4Wb1", "Wa2Ba0")
    assert made.metrics()["unique_machines"] == 2.0


def test_the_best_of_n_is_the_bootstraps_expectation() -> None:
    assert best_of([0.0, 4.0], 1) == 2.0
    assert best_of([0.0, 4.0], 2) == 3.0
    scores = [1.0, 5.0, 2.0, 8.0]
    generator = random.Random(0)
    drawn = [max(generator.choices(scores, k=3)) for _ in range(20_000)]
    assert best_of(scores, 3) == pytest.approx(sum(drawn) / len(drawn), abs=0.05)


def test_the_best_of_n_is_logged_up_to_the_size_of_a_group() -> None:
    made = environment()
    rewards(made, *[CAR_TEXT] * 3, "nonsense")
    rewards(made, "nonsense")
    best = {name: value for name, value in made.metrics().items() if name.startswith("best_at")}
    assert list(best) == ["best_at_1", "best_at_2", "best_at_4"]
    assert best["best_at_1"] == pytest.approx(3.0)


def test_the_record_says_what_scores_depend_on() -> None:
    assert environment("car", "catapult").facts() == {
        "physics_version": "counting-1",
        "scores": {"car": "car_paper", "catapult": "catapult_strict"},
    }


def test_closing_it_closes_the_simulators() -> None:
    simulator = Counting()
    environment(simulator=simulator).close()
    assert simulator.is_closed
