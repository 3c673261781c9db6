"""Pictures and films are made without a display, and show what they should."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mujoco", reason="needs covey[machines]")

from matplotlib.path import Path as Outline
from PIL import Image

from covey_report.machines.drawing import (
    GalleryItem,
    draw_film,
    draw_gallery,
    draw_machine,
    draw_recording,
)
from covey_report.machines.mesh import (
    ALONG,
    VIEWS,
    Polygon,
    View,
    from_behind,
    in_view,
    looks_here,
    mesh_of,
    moved,
)
from covey_tasks.machines.design.types import ROOT, Block, Tree
from covey_tasks.machines.physics.simulate import Simulation, outcome, record, simulate

from ...tasks.machines.designs import BAND_CATAPULT, CAR, GALLOWS, ROTOR_CATAPULT, SMALL_CAR, machine


def num_colours(path: Path) -> int:
    return len(Image.open(path).convert("RGB").getcolors(1 << 24) or [])


# ------------------------------------------------------------------------------------------------ geometry


def test_views_are_of_a_left_handed_world() -> None:
    """Looking forward, x is to the right; looking from the right and from above, forward is where it is said to be."""
    point = np.array([[1.0, 2.0, 3.0]])
    seen = {view.name: view.flat(point)[0].tolist() for view in VIEWS.values()}
    assert seen["from behind"] == [1.0, 2.0]
    assert seen["from the right"] == [3.0, 2.0]
    assert seen["from above"] == [1.0, 3.0]
    assert [view.flat(point)[0].tolist() for view in ALONG] == [[3.0, 2.0], [3.0, -1.0]]


@pytest.mark.parametrize("view", [*VIEWS.values(), *ALONG])
def test_the_directions_of_a_view_are_at_right_angles_and_left_handed(view: View) -> None:
    basis = np.array([view.right, view.up, view.into])
    assert basis @ basis.T == pytest.approx(np.eye(3), abs=1e-12)
    assert np.linalg.det(basis) == pytest.approx(1.0)  # right, up, into: as x, y, z


def test_a_cube_shows_one_side_from_behind_and_three_at_an_angle() -> None:
    mesh = mesh_of(machine((ROOT,)))
    assert len(in_view(mesh.polygons, VIEWS["from behind"])) == 1
    assert len(in_view(mesh.polygons, VIEWS["oblique"])) == 3


@pytest.mark.parametrize("tree", [CAR, ROTOR_CATAPULT, BAND_CATAPULT, GALLOWS])
def test_what_is_painted_last_at_a_point_is_nearest_there(tree: Tree) -> None:
    view, polygons = VIEWS["oblique"], mesh_of(machine(tree)).polygons
    order = from_behind(polygons, view)
    seen = [polygon for polygon in polygons if looks_here(polygon, view)]
    flat = [Outline(view.flat(polygon.corners_K3)) for polygon in seen]
    low, high = (edge(np.concatenate([one.vertices for one in flat]), axis=0) for edge in (np.min, np.max))
    num_covered = 0
    for point in np.random.default_rng(0).uniform(low, high, (300, 2)):
        here = [polygon for polygon, one in zip(seen, flat, strict=True) if one.contains_point(point)]
        depths = {polygon.solid: depth_at(polygon, view, point) for polygon in here}
        num_covered += len(depths) > 1
        if depths:
            assert depths[max(depths, key=order.index)] == pytest.approx(min(depths.values()), abs=0.03)
    assert num_covered > 10


def depth_at(polygon: Polygon, view: View, point: np.ndarray) -> float:
    """Where the sight line through a point of the paper meets a polygon's plane."""
    on_paper = point @ np.array([view.right, view.up])
    outward_3, into_3 = polygon.outward_3, np.array(view.into)
    return float((polygon.corners_K3[0] - on_paper) @ outward_3 / (into_3 @ outward_3))


def test_the_polygons_of_a_machine_fill_its_box() -> None:
    built = machine(CAR)
    corners = np.concatenate([polygon.corners_K3 for polygon in mesh_of(built).polygons])
    assert corners.max(axis=0) - corners.min(axis=0) == pytest.approx(built.size)
    assert corners[:, 1].min() == pytest.approx(0.0)


@pytest.mark.parametrize("tree", [(ROOT,), (ROOT, Block(2, 0, 3)), (ROOT, Block(36, 0, 4))])
def test_polygons_look_outward(tree: Tree) -> None:
    mesh = mesh_of(machine(tree))
    for polygon in mesh.polygons:
        first, second, third, *_ = polygon.corners_K3
        normal = np.cross(second - first, third - second)
        if np.linalg.norm(normal) > 1e-9:  # at the poles of a sphere two corners are one
            assert abs(normal @ polygon.outward_3) / np.linalg.norm(normal) > 0.98
        assert (polygon.corners_K3.mean(axis=0) - mesh.pivots_B3[polygon.body]) @ polygon.outward_3 > 0.2


def test_a_recording_has_the_bits_of_the_simulation_and_moves_the_mesh_with_it() -> None:
    built = machine(CAR)
    recording = record(built, "car")
    assert (recording.trajectory.root_T3 == simulate(built, "car").root_T3).all()
    start = moved(mesh_of(built), recording.positions_TB3[0], recording.rotations_TB33[0])
    for before, after in zip(mesh_of(built).polygons, start.polygons, strict=True):
        assert after.corners_K3 == pytest.approx(before.corners_K3, abs=1e-12)
    end = moved(mesh_of(built), recording.positions_TB3[-1], recording.rotations_TB33[-1])
    shift = end.polygons[0].corners_K3.mean(axis=0)[2] - start.polygons[0].corners_K3.mean(axis=0)[2]
    assert shift == pytest.approx(outcome(built, "car").forward, abs=0.05)


@pytest.mark.long
def test_rubber_bands_stay_at_their_ends() -> None:
    recording = record(machine(BAND_CATAPULT), "catapult")
    mesh = mesh_of(recording.machine)
    lengths = [
        float(np.linalg.norm(np.subtract(*moved(mesh, position_B3, rotation_B33).lines[0].points)))
        for position_B3, rotation_B33 in zip(recording.positions_TB3, recording.rotations_TB33, strict=True)
    ]
    assert lengths[0] == pytest.approx(lengths[20], rel=0.05)  # not yet switched on
    assert min(lengths) < 0.7 * lengths[0]


# ------------------------------------------------------------------------------------------------ files


@pytest.mark.long
def test_a_machine_is_drawn(tmp_path: Path) -> None:
    draw_machine(machine(ROTOR_CATAPULT), tmp_path / "a.png", "a catapult")
    assert Image.open(tmp_path / "a.png").size[0] > 800
    assert num_colours(tmp_path / "a.png") > 20


@pytest.mark.long
def test_ways_are_drawn_also_of_a_machine_without_an_end(tmp_path: Path) -> None:
    draw_recording(record(machine(ROTOR_CATAPULT), "catapult"), tmp_path / "a.png", "a throw")
    complete = num_colours(tmp_path / "a.png")

    def burst(simulation: Simulation) -> None:
        simulation.data.qvel[:] = 1e12

    trajectory = simulate(machine(CAR), "car", seen=burst)
    assert trajectory.ending == "unstable"
    recording = record(machine(CAR), "car")
    broken = type(recording)(recording.machine, "car", trajectory, recording.positions_TB3, recording.rotations_TB33)
    draw_recording(broken, tmp_path / "b.png", "diverged")
    assert complete > 30
    with pytest.raises(ValueError, match="only a simulation that is complete can be filmed, this one is unstable"):
        draw_film(broken, tmp_path / "b.gif", "diverged")


@pytest.mark.long
def test_a_gallery_has_room_for_any_number(tmp_path: Path) -> None:
    sizes = []
    for count in (1, 4, 5):
        exhibits = [GalleryItem(machine(SMALL_CAR), f"{n}.0") for n in range(count)]
        draw_gallery(exhibits, tmp_path / "a.png", "best")
        sizes.append(Image.open(tmp_path / "a.png").size)
    assert sizes[0][0] < sizes[1][0] == sizes[2][0]
    assert sizes[0][1] == sizes[1][1] < sizes[2][1]
    assert num_colours(tmp_path / "a.png") > 20


def test_a_film_shows_what_moves_at_its_own_speed(tmp_path: Path) -> None:
    draw_film(record(machine(SMALL_CAR), "car"), tmp_path / "a.gif", "a car")
    film = Image.open(tmp_path / "a.gif")
    assert film.n_frames == 63  # 5 s, one in 0.08 s
    assert film.info["duration"] == 80
    frames = []
    for index in (0, 30, 60):
        film.seek(index)
        frames.append(np.asarray(film.convert("RGB"), dtype=int))
    assert (frames[0] != frames[1]).mean() > 0.01
    assert (frames[1] != frames[2]).mean() > 0.01
