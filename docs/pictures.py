"""Draws the pictures of the README and of the site, from a real plan: ``python docs/pictures.py``.

Every coloured square is a frame where the plan has put it.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from raypipe.plan import (
    BatchSpec,
    OrderSpec,
    SelectionSpec,
    WorldPlan,
    index_episodes,
    plan_epoch,
    plan_world,
    resume,
    start,
    state_after,
)

ASSETS = Path(__file__).parent / "pages" / "assets"
LENGTHS = (14, 20, 11, 17, 22, 13, 18, 15)
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#d4a72c", "#3aa6a0")
INK, DIM, LINE = "#24292f", "#57606a", "#c4cad0"
SPEC = OrderSpec(seed=3, live_spans=6, clip_frames=2)
INDEX = index_episodes(
    "robot", np.arange(len(LENGTHS)), np.array(LENGTHS), fingerprint="drawn", selection=SelectionSpec()
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A square of the drawing: a frame."""

    x: float
    y: float
    episode: int
    frame: int


def draw_flow() -> str:
    """Return episodes on disk at the left, and the batches of their frames at the right."""
    parts = [_text(20, 26, "Episodes as recorded", size=15, weight=600)]
    parts.append(_text(20, 45, "parquet rows and mp4 videos, read in place", colour=DIM))
    for episode, length in enumerate(LENGTHS):
        y = 62 + 25 * episode
        parts += [_cell(Cell(20 + 13 * frame, y, episode, frame), 13, 20) for frame in range(length)]
    parts += _arrow(322, 162, 392, 162)
    parts += [_text(357, 148, "the plan", anchor="middle", weight=600), _text(357, 182, "seed 3", DIM, "middle")]
    parts += [_text(410, 26, "Batches, in the order that you train on", size=15, weight=600)]
    parts += [
        _text(
            410,
            45,
            "each frame exactly once, in an order that the seed decides",
            colour=DIM,
        )
    ]
    world = _first_leg(1, 8)
    for step in range(world.num_steps):
        frames = world.frames_at(step, 0)
        pairs = zip(frames.episode.tolist(), frames.frame.tolist(), strict=True)
        parts += [_cell(Cell(410 + 34 * step, 62 + 25 * place, *one), 27, 20) for place, one in enumerate(pairs)]
    parts.append(_text(20, 286, "Colour: the episode. Number: the frame. Drawn from raypipe's own plan.", colour=DIM))
    return _svg(1000, 300, parts, "Frames of eight episodes, spread evenly over the batches of an epoch")


def draw_words() -> str:
    """Return a picture of span, clip, lane and leg."""
    parts = [_text(20, 28, "In an episode", size=15, weight=600)]
    parts += [_cell(Cell(20 + 40 * frame + 4 * (frame // 2), 76, 0, frame), 38, 28) for frame in range(14)]
    told = "span: a run of frames of one episode, by default all of it. Its rows are read together."
    parts += _bracket(20, 602, 64, told)
    parts += _bracket(188, 266, 116, "clip: a few neighbouring frames. They are decoded together, once.", is_below=True)
    parts.append(_text(20, 192, "In an epoch", size=15, weight=600))
    first, second = _two_legs()
    for rank in range(2):
        parts += _lane(first, rank, 108, 232 + 34 * rank)
    end = 108 + 25 * 28 / 2
    for rank in range(3):
        parts += _lane(second, rank, end + 150, 232 + 34 * rank)
    parts += [_line(end + 40, 222, end + 40, 300, "5 4"), _text(end + 40, 214, "checkpoint", DIM, "middle")]
    parts += _bracket(108, end, 312, "leg: the part of an epoch that runs on one number of GPUs", is_below=True)
    parts += _bracket(end + 150, end + 500, 340, "the next leg: what is left of the epoch", is_below=True)
    parts += [_text(20, 216, "lane: a queue of frames; a GPU serves one lane or several")]
    return _svg(1000, 374, parts, "Span, clip, lane and leg, drawn from a plan")


def _first_leg(world_size: int, batch_size: int) -> WorldPlan:
    begin = start(SPEC, world_size=world_size)
    plan = plan_epoch(INDEX, begin.spec, epoch=0, legs=begin.legs)
    return plan_world(plan, world_size=world_size, batch=BatchSpec(size=batch_size))


def _two_legs() -> tuple[WorldPlan, WorldPlan]:
    """Return an epoch on 2 ranks, and its rest on 3."""
    first, num_steps = _first_leg(2, 7), 2
    again = resume(state_after(first, num_steps), INDEX, SPEC, world_size=3)
    plan = plan_epoch(INDEX, again.spec, epoch=0, legs=again.legs)
    return first, plan_world(plan, world_size=3, batch=BatchSpec(size=7))


def _lane(world: WorldPlan, rank: int, x: float, y: float) -> list[str]:
    parts = [_text(x - 8, y + 17, f"lane {rank}", DIM, "end")]
    place = 0
    for step in range(2):
        frames = world.frames_at(step, rank)
        for one in zip(frames.episode.tolist(), frames.frame.tolist(), strict=True):
            parts.append(_cell(Cell(x + 24 * place + 7 * step, y, *one), 23, 24))
            place += 1
    return parts


def _cell(cell: Cell, width: float, height: float) -> str:
    place = f'x="{cell.x:g}" y="{cell.y:g}" width="{width - 1:g}" height="{height:g}"'
    box = f'<rect {place} rx="2" fill="{COLOURS[cell.episode]}"/>'
    if width < 20:
        return box
    middle = f'x="{cell.x + (width - 1) / 2:g}" y="{cell.y + height / 2 + 4:g}"'
    return f'{box}<text {middle} font-size="11" fill="#fff" text-anchor="middle">{cell.frame}</text>'


def _text(
    x: float, y: float, text: str, colour: str = INK, anchor: str = "start", *, size: int = 13, weight: int = 400
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" stroke="{DIM}" fill="none"{dashed}/>'


def _arrow(x: float, y: float, to_x: float, to_y: float) -> list[str]:
    ends = f"M{to_x - 9:g} {to_y - 5:g} L{to_x:g} {to_y:g} L{to_x - 9:g} {to_y + 5:g}"
    head = f'<path d="{ends}" stroke="{DIM}" fill="none"/>'
    return [_line(x, y, to_x, to_y), head]


def _bracket(x: float, to_x: float, y: float, text: str, *, is_below: bool = False) -> list[str]:
    tick = -6 if is_below else 6
    shape = f'<path d="M{x:g} {y + tick:g} V{y:g} H{to_x:g} V{y + tick:g}" stroke="{DIM}" fill="none"/>'
    return [shape, _text(x, y + 18 if is_below else y - 8, text)]


def _svg(width: int, height: int, parts: list[str], title: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
    )
    # A ground of its own: it is read on light and on dark pages.
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff" stroke="{LINE}"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *parts, "</svg>", ""])


PICTURES = {"flow.svg": draw_flow, "words.svg": draw_words}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ASSETS / name).write_text(draw(), encoding="utf-8")
