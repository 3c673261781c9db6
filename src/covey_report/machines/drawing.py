"""Draw machines without a display: four views, paths, a gallery."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from covey_report.machines.mesh import ALONG, FILM, VIEWS, Mesh, Polygon, View, box, in_view, mesh_of, moved
from covey_tasks.machines.design.blocks import BLOCKS, BOULDER, TABLE, Kind
from covey_tasks.machines.design.types import Machine
from covey_tasks.machines.physics.trajectory import Array, Recording
from covey_tasks.machines.physics.worlds import WORLDS, Wall

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from PIL import Image  # matplotlib brings it
except ImportError as error:
    raise ValueError("drawing machines needs matplotlib: pip install 'covey[machines]'") from error

MARGIN = 0.6
"""Metres around a machine."""
LONG_WALL, HIGH_WALL = 10.0, 2.0
"""Metres."""
ROOT_COLOUR, WALL_COLOUR, GROUND, PATH, THROW = "#2a9d8f", "#d9d9d9", "#6b705c", "#2a9d8f", "#9d4edd"
COLOURS: dict[Kind, str] = {kind: row["colour"] for kind, row in TABLE["kinds"].items()}
HEAVY, HEAVY_COLOUR = 35, "#4a4e69"


@dataclass(frozen=True, slots=True)
class GalleryItem:
    """One machine of a gallery."""

    machine: Machine
    caption: str


def draw_machine(machine: Machine, path: Path, title: str) -> None:
    """Draw three views and an oblique one, as PNG."""
    figure = Figure(figsize=(9.0, 8.0), layout="constrained")
    figure.suptitle(title)
    for axes, view in zip(figure.subplots(2, 2).flat, VIEWS.values(), strict=True):
        paint(axes, mesh_of(machine), view)
        name_axes(axes, view)
    figure.savefig(path, dpi=110)


def draw_recording(recording: Recording, path: Path, title: str) -> None:
    """Draw a machine's views, and below its and the boulder's paths."""
    figure = Figure(figsize=(13.0, 10.5), layout="constrained")
    figure.suptitle(title)
    mesh = mesh_of(recording.machine)
    grid = figure.add_gridspec(3, 4, height_ratios=(3.0, 3.4, 2.6))
    for column, view in enumerate(VIEWS.values()):
        axes = figure.add_subplot(grid[0, column])
        paint(axes, mesh, view)
        name_axes(axes, view)
    for row, view in enumerate(ALONG, start=1):
        axes = figure.add_subplot(grid[row, :])
        paint_way(axes, recording, view)
        name_axes(axes, view)
        if row == 1 and recording.trajectory.ending == "complete":
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def draw_gallery(items: Sequence[GalleryItem], path: Path, title: str) -> None:
    columns = min(4, len(items))
    rows = -(-len(items) // columns)
    figure = Figure(figsize=(3.4 * columns, 3.2 * rows + 0.6), layout="constrained")
    figure.suptitle(title)
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in places:
        axes.set_axis_off()
    for axes, exhibit in zip(places, items, strict=False):
        paint(axes, mesh_of(exhibit.machine), VIEWS["oblique"])
        axes.set_title(exhibit.caption, fontsize=9)
    figure.savefig(path, dpi=110)


def paint(axes: Axes, mesh: Mesh, view: View) -> None:
    corners = np.concatenate([view.flat(polygon.corners_K3) for polygon in mesh.polygons])
    add_mesh(axes, mesh, view)
    add_ground(axes, view)
    window(axes, corners, MARGIN)


def paint_way(axes: Axes, recording: Recording, view: View) -> None:
    mesh = mesh_of(recording.machine)
    add_walls(axes, recording, view)
    add_ground(axes, view)
    points = [view.flat(polygon.corners_K3) for polygon in mesh.polygons]
    add_mesh(axes, mesh, view, opacity=0.45)
    trajectory = recording.trajectory
    if trajectory.ending == "complete":
        last = moved(mesh, recording.positions_TB3[-1], recording.rotations_TB33[-1])
        add_mesh(axes, last, view)
        points += [view.flat(polygon.corners_K3) for polygon in last.polygons]
        points += add_ways(axes, recording, view, len(trajectory.times_T))
    window(axes, np.concatenate(points), MARGIN)


def add_ways(axes: Axes, recording: Recording, view: View, num_looks: int) -> list[Array]:
    """Draw the paths of starting block and boulder, and return them (T, 2)."""
    trajectory = recording.trajectory
    root = view.flat(trajectory.root_T3[:num_looks])
    axes.plot(*root.T, color=PATH, lw=1.6, label="starting block")
    if trajectory.boulder_T3 is None:
        return [root]
    boulder = view.flat(trajectory.boulder_T3[:num_looks])
    axes.plot(*boulder.T, color=THROW, lw=1.6, label="boulder")
    if trajectory.landing is not None and trajectory.landing < num_looks:
        axes.plot(*boulder[trajectory.landing], "v", color=THROW, ms=7, label="lands")
    return [root, boulder]


def add_mesh(axes: Axes, mesh: Mesh, view: View, opacity: float = 1.0) -> None:
    """Draw faces towards the viewer, then rubber bands and braces."""
    shown = in_view(mesh.polygons, view)
    faces = [tuple(shade * part for part in to_rgb(colour_of(type_))) for _, shade, type_ in shown]
    rounded = [BLOCKS[type_].kind in ("boulder", "rod") for _, _, type_ in shown]  # of many polygons: no edges
    edges = [face if is_round else "#00000055" for face, is_round in zip(faces, rounded, strict=True)]
    pieces = PolyCollection([corners for corners, _, _ in shown], facecolors=faces, edgecolors=edges, linewidths=0.4)
    pieces.set_alpha(opacity)
    axes.add_collection(pieces)
    ends = [view.flat(np.array(line.points)) for line in mesh.lines]
    colours = [COLOURS[line.kind] for line in mesh.lines]
    axes.add_collection(LineCollection(ends, colors=colours, linewidths=2.0, alpha=opacity))


def colour_of(type_: int) -> str:
    if type_ == HEAVY:
        return HEAVY_COLOUR
    return ROOT_COLOUR if type_ == 0 else COLOURS[BLOCKS[type_].kind]


def add_ground(axes: Axes, view: View) -> None:
    if view.into[1] == 0.0:
        axes.axhline(0.0, color=GROUND, lw=1.2, zorder=0)


def add_walls(axes: Axes, recording: Recording, view: View) -> None:
    walls = [wall for wall in WORLDS[recording.world] if not _hides(wall, view)]
    polygons = [
        Polygon(corners, outward, 0, -1, number) for number, wall in enumerate(walls) for corners, outward in box(wall)
    ]
    seen = [corners for corners, _, _ in in_view(polygons, view)]
    axes.add_collection(PolyCollection(seen, facecolors=WALL_COLOUR, edgecolors="face", linewidths=0.5, zorder=0))


def _hides(wall: Wall, view: View) -> bool:
    """Check whether a wall covers the machine in a view."""
    from_above, from_side = view.into[1] == -1.0, view.into[1] == 0.0
    return not from_above and (wall.half[1] > HIGH_WALL / 2 or (from_side and wall.half[2] > LONG_WALL / 2))


def window(axes: Axes, points_K2: Array, margin: float) -> None:
    low, high = points_K2.min(axis=0) - margin, points_K2.max(axis=0) + margin
    axes.set_xlim(low[0], high[0])
    axes.set_ylim(low[1], high[1])
    axes.set_aspect("equal")


def name_axes(axes: Axes, view: View) -> None:
    axes.set_title(view.name, fontsize=10)
    axes.tick_params(labelsize=8)
    names = {
        (-1.0, 0.0, 0.0): "-x (m)",
        (1.0, 0.0, 0.0): "x (m)",
        (0.0, 1.0, 0.0): "y, up (m)",
        (0.0, 0.0, 1.0): "z, forward (m)",
    }
    if view.right in names and view.up in names:
        axes.set_xlabel(names[view.right], fontsize=8)
        axes.set_ylabel(names[view.up], fontsize=8)
    else:
        axes.set_axis_off()


EVERY = 4
"""Looks from one picture to the next: 0.08 s, which is real time."""
SELDOM = 20
"""Looks between the poses that the pictures surely have room for: 0.4 s."""
WIDTH, HEAD, DPI = 9.0, 0.4, 80
"""Width of a picture and height of its title, in inches; dots per inch."""
NUM_COLOURS = 96
GRID = 5.0
"""Metres between the lines on the ground."""


def draw_film(recording: Recording, path: Path, title: str) -> None:
    """Write a GIF. ValueError for a simulation that was not complete."""
    if recording.trajectory.ending != "complete":
        raise ValueError(f"only a simulation that is complete can be filmed, this one is {recording.trajectory.ending}")
    mesh = mesh_of(recording.machine)
    times = range(0, len(recording.positions_TB3), EVERY)
    low, high = _room(recording, mesh)
    frames = [_frame(recording, mesh, look, (low, high), title) for look in times]
    milliseconds = round(1000 * EVERY * float(recording.trajectory.times_T[1]))
    pauses = [milliseconds] * (len(frames) - 1) + [1500]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=pauses, loop=0, optimize=False)


def _frame(recording: Recording, mesh: Mesh, look: int, room: tuple[Array, Array], title: str) -> Image.Image:
    # Size the picture so that metres are as long in all frames
    size = room[1] - room[0]
    height = max(2.4, min(7.0, WIDTH * float(size[1] / size[0]))) + HEAD
    figure = Figure(figsize=(WIDTH, height), dpi=DPI)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0 - HEAD / height))
    axes.set_axis_off()
    axes.set_title(f"{title}   {recording.trajectory.times_T[look]:.1f} s", fontsize=10, family="monospace")
    forward_T = recording.trajectory.root_T3[:, 2]
    for z in np.arange(np.floor(forward_T.min() / GRID) - 4, np.ceil(forward_T.max() / GRID) + 12) * GRID:
        ends = FILM.flat(np.array([[-12.0, 0.0, z], [12.0, 0.0, z]]))
        axes.plot(*ends.T, color="#e3e3dc", lw=0.8, zorder=-1)
    add_walls(axes, recording, FILM)
    add_ways(axes, recording, FILM, look + 1)
    add_mesh(axes, moved(mesh, recording.positions_TB3[look], recording.rotations_TB33[look]), FILM)
    window(axes, np.array(room), 0.0)
    # Few colours keep the film small
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    return picture.quantize(NUM_COLOURS)


def _room(recording: Recording, mesh: Mesh) -> tuple[Array, Array]:
    trajectory = recording.trajectory
    seldom = range(0, len(recording.positions_TB3), SELDOM)
    poses = [moved(mesh, recording.positions_TB3[look], recording.rotations_TB33[look]) for look in (*seldom, -1)]
    points = [FILM.flat(polygon.corners_K3) for pose in poses for polygon in pose.polygons]
    points.append(FILM.flat(trajectory.root_T3))
    if trajectory.boulder_T3 is not None:
        ways = FILM.flat(trajectory.boulder_T3)
        points += [ways - BLOCKS[BOULDER].size[0] / 2, ways + BLOCKS[BOULDER].size[0] / 2]
    every = np.concatenate(points)
    return every.min(axis=0) - MARGIN, every.max(axis=0) + MARGIN
