"""Pages of environments: machines as drawings, programs with their tests."""

import json
from typing import Any

from covey_report.logs.read import Row, RunFiles, cut

NUM_PROGRAMS, NUM_TESTS = 8, 40
TESTS = ("tests", "test_list", "test", "public_tests", "examples", "assertions")
"""Columns that may hold the tests of a program."""


def environment_of(run: RunFiles) -> dict[str, Any] | None:
    """Build the page of the environment, None if it has none."""
    name = run.settings.get("environment.name")
    made = {"machines": machines_of, "code": programs_of}.get(str(name))
    return (made(run) if made else None) or conversations_of(run)


def conversations_of(run: RunFiles) -> dict[str, Any] | None:
    """Mark a run with conversations, None for single answers.

    The page takes them from the traced groups that it has anyway.
    """
    answers = (one.get("completion") for row in run.traces for one in row.get("rollouts") or [])
    return {"kind": "conversations"} if any(isinstance(text, list) and len(text) > 1 for text in answers) else None


def programs_of(run: RunFiles) -> dict[str, Any] | None:
    """Choose the best and worst programs of the last evaluation."""
    rows = [row for row in run.answers if row.get("greedy")] or run.rollouts
    last = max((row["step"] for row in rows), default=None)
    of_last = sorted((row for row in rows if row["step"] == last), key=lambda row: -float(row.get("reward") or 0))
    half = NUM_PROGRAMS // 2
    chosen = of_last[:half] + of_last[max(half, len(of_last) - half) :]
    return {"kind": "programs", "items": [_program(row) for row in chosen]} if chosen else None


def _program(row: Row) -> Row:
    columns = dict(row.get("columns") or {})
    problem = columns.get("problem")  # in which the code environment has them
    columns |= problem if isinstance(problem, dict) else {}
    tests, verdicts = columns.get("tests"), row.get("verdicts")
    listed = tests if isinstance(tests, list) and all(isinstance(test, dict) for test in tests) else []
    return {
        "entry": cut(columns.get("entry_point") or "f", 100),
        "cases": [_case(test) for test in listed[:NUM_TESTS]],
        "num_cases": len(listed),
        "verdicts": [cut(kind, 40) for kind in verdicts[:NUM_TESTS]] if isinstance(verdicts, list) else [],
        "failure": cut(row.get("first_failure"), 600),
        "id": row.get("prompt_id"),
        "prompt": cut(row.get("prompt"), 2000),
        "text": cut(row.get("completion"), 4000),
        "reward": row.get("reward"),
        "parts": row.get("parts") or {},
        "tests": {name: cut(str(columns[name]), 1500) for name in columns if name in TESTS and columns[name] != listed},
    }


def _case(test: Row) -> tuple[str, str]:
    """Write a test's call and expected value as Python."""
    arguments = [repr(value) for value in test.get("args") or []]
    arguments += [f"{name}={value!r}" for name, value in dict(test.get("kwargs") or {}).items()]
    call = ", ".join(arguments) if "args" in test or "kwargs" in test else repr(test)
    return cut(call, 300), cut(repr(test["expected"]), 300) if "expected" in test else ""


NUM_MACHINES = 6
MOTION_BYTES = 60_000
"""Maximum bytes of the motion of one machine."""
EVERY = (2, 4, 8, 16)
"""Looks of the simulation, 0.02 s apart, from one moment to the next: the first that has room is taken."""


def machines_of(run: RunFiles) -> dict[str, Any]:
    """Choose the best machines of a run that have a score."""
    from covey_report.machines.command import ANY_BLOCK, best_of_run, describe
    from covey_report.machines.mesh import FILM, mesh_of
    from covey_tasks.machines.design.place import place
    from covey_tasks.machines.design.types import Invalid

    try:
        best = best_of_run(run.folder, NUM_MACHINES)
    except (ValueError, OSError, LookupError, TypeError):  # what stands in the file may be anything
        best = []
    found = []
    for one in best:
        machine = place(one.tree, ANY_BLOCK)
        if isinstance(machine, Invalid):
            continue
        own = {"score": one.score, "step": one.step, "about": describe(machine)}
        found.append(own | _solids(mesh_of(machine)) | {"motion": motion_of(machine, run)})
    view = {"right": FILM.right, "up": FILM.up, "into": FILM.into}
    return {"kind": "machines", "items": found, "view": view}


def motion_of(machine: Any, run: RunFiles) -> Row | None:
    """Simulate a machine as the run did, None if impossible."""
    from covey_tasks.machines.design.tree import num_boulders
    from covey_tasks.machines.scores import find_score

    task = "catapult" if num_boulders(machine.tree) else "car"
    try:
        from covey_tasks.machines.physics.simulate import record  # needs MuJoCo

        recording = record(machine, find_score(task, str(run.settings.get("environment.score", "strict"))).world)
    except (ImportError, ValueError):
        return None
    trajectory = recording.trajectory
    if trajectory.ending != "complete":
        return None
    # As many moments as there is room for, metres in hundredths and directions in thousandths
    found: Row = {}
    for every in EVERY:
        places = (100 * recording.positions_TB3[::every]).round().astype(int)
        turns = (1000 * recording.rotations_TB33[::every, :, :, :2]).round().astype(int)
        moments = [[*place.ravel().tolist(), *turn.ravel().tolist()] for place, turn in zip(places, turns, strict=True)]
        seconds = every * float(trajectory.times_T[1] - trajectory.times_T[0])
        found = {"seconds": round(seconds, 4), "bodies": places.shape[1], "moments": moments}
        if len(json.dumps(found)) <= MOTION_BYTES:
            break
    return found


def _solids(mesh: Any) -> Row:
    """Return polygons and lines of a mesh, relative to their bodies."""
    import numpy as np

    from covey_tasks.machines.design.blocks import BLOCKS

    solids: dict[int, Row] = {}
    for polygon in mesh.polygons:
        kind = "root" if polygon.type == 0 else BLOCKS[polygon.type].kind
        own = solids.setdefault(polygon.solid, {"kind": kind, "body": polygon.body, "faces": []})
        corners = (polygon.corners_K3 - mesh.pivots_B3[polygon.body]).round(3)
        own["faces"].append([polygon.outward_3.round(3).tolist(), corners.ravel().tolist()])
    lines = [
        [line.kind, list(line.bodies), (np.array(line.points) - mesh.pivots_B3[list(line.bodies)]).round(3).tolist()]
        for line in mesh.lines
    ]
    return {"solids": list(solids.values()), "lines": lines, "pivots": mesh.pivots_B3.round(3).tolist()}
