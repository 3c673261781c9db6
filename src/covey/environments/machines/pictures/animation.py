"""A simulation as a film (GIF): the machine in motion, with the ways of starting block and boulder behind it."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from covey.environments.machines.design.blocks import BLOCKS, BOULDER
from covey.environments.machines.physics.trajectory import Array, Recording
from covey.environments.machines.pictures.drawing import MARGIN, add_mesh, add_walls, add_ways, window
from covey.environments.machines.pictures.mesh import Mesh, View, mesh_of, moved, oblique

EVERY = 4
"""Looks from one picture to the next: 0.08 s, the speed of what happened."""
CAMERA = oblique("film", 76.0, 14.0)
SELDOM = 20
"""Looks between the poses that the pictures surely have room for: 0.4 s."""
WIDTH, HEAD, DPI = 9.0, 0.4, 80
"""Of a picture and of the room for its title, in inches."""
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
    """Draw one picture."""
    size = room[1] - room[0]
    height = max(2.4, min(7.0, WIDTH * float(size[1] / size[0]))) + HEAD
    figure = Figure(figsize=(WIDTH, height), dpi=DPI)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0 - HEAD / height))
    axes.set_axis_off()
    axes.set_title(f"{title}   {recording.trajectory.times_T[look]:.1f} s", fontsize=10, family="monospace")
    _add_grid(axes, recording, CAMERA)
    add_walls(axes, recording, CAMERA)
    add_ways(axes, recording, CAMERA, look + 1)
    add_mesh(axes, moved(mesh, recording.positions_TB3[look], recording.rotations_TB33[look]), CAMERA)
    window(axes, np.array(room), 0.0)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    return picture.quantize(NUM_COLOURS)


def _room(recording: Recording, mesh: Mesh) -> tuple[Array, Array]:
    """Return what the film has to show: corners (2,) of all that is ever seen."""
    trajectory = recording.trajectory
    seldom = range(0, len(recording.positions_TB3), SELDOM)
    poses = [moved(mesh, recording.positions_TB3[look], recording.rotations_TB33[look]) for look in (*seldom, -1)]
    points = [CAMERA.flat(polygon.corners_K3) for pose in poses for polygon in pose.polygons]
    points.append(CAMERA.flat(trajectory.root_T3))
    if trajectory.boulder_T3 is not None:
        ways = CAMERA.flat(trajectory.boulder_T3)
        points += [ways - BLOCKS[BOULDER].size[0] / 2, ways + BLOCKS[BOULDER].size[0] / 2]
    every = np.concatenate(points)
    return every.min(axis=0) - MARGIN, every.max(axis=0) + MARGIN


def _add_grid(axes: Axes, recording: Recording, view: View) -> None:
    """Draw lines across the ground, so that motion is seen."""
    forward_T = recording.trajectory.root_T3[:, 2]
    for z in np.arange(np.floor(forward_T.min() / GRID) - 4, np.ceil(forward_T.max() / GRID) + 12) * GRID:
        ends = view.flat(np.array([[-12.0, 0.0, z], [12.0, 0.0, z]]))
        axes.plot(*ends.T, color="#e3e3dc", lw=0.8, zorder=-1)
