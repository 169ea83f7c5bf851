"""One batch as the training loop gets it: its frames, their pictures and actions, and what is padding.

It looks only at the keys, shapes and masks of a batch, so it shows any batch of a loader, also after a transform.
"""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset import DIM_IS_PAD, IS_MISSING
from raypipe.errors import ConfigError
from raypipe.text import count_whole, counted, either, new_figure, page_part, page_table
from raypipe.views.pixels import finite_ends, visible
from raypipe.views.rows import SHOWN_NUMBERS
from raypipe.views.view import (
    Picture,
    View,
    draw_legend,
    draw_picture,
    html_plot,
    html_texts,
    line_colours,
    not_drawn,
    numbers_told,
    short_name,
    shortened,
    spread,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IS_PAD: Final = "_is_pad"
_SHOWN_SLOTS: Final = 3
"""The most frames drawn of a camera's window; of a longer one the first, a middle and the last one."""
_LEAST_SIDE: Final = 8
"""The smallest side of a picture: anything smaller is a matrix of numbers, not a camera."""
_DRAWN_SAMPLES: Final = 64
_DRAWN_PICTURES: Final = 48
"""With this many of each the figure is 94 inches high and 88 wide, less than `MAX_INCHES`."""
_ROW_HEIGHT: Final = 1.45
_TASK_LETTERS: Final = 32
_TASK_LINES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """The numbers of one feature of one sample, over its window."""

    feature: str
    values: NDArray[Any]
    """``(slots, numbers)``, without the numbers that the sample's robot does not have."""
    is_pad: NDArray[np.bool_]
    """``(slots,)``: which slots lie outside the episode."""
    is_missing: bool
    """Whether the sample's robot does not have the feature at all."""
    num_padded: int
    """How many numbers that leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleView:
    """One sample of a batch."""

    label: str
    task: str
    is_repeat: bool
    pictures: tuple[tuple[Picture, str], ...]
    """Every picture with its remark: nothing, ``padding`` or ``missing``."""
    chunk: Chunk | None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BatchView(View):
    """Some samples of a batch."""

    size: int
    num_distinct: int
    samples: tuple[SampleView, ...]
    keys: tuple[tuple[str, str, str], ...]
    totals: tuple[str, ...]
    """In words, how many samples are repeats, padded or without a camera."""

    @property
    def title(self) -> str:
        """The number of samples and of episodes."""
        return f"a batch of {counted(self.size, 'sample')} from {counted(self.num_distinct, 'episode')}"

    def figure(self) -> "Figure":
        """Return a figure with a row for each sample shown: its pictures, then its action."""
        from raypipe.text import boxes_told

        figure = self._draw()
        more = f", {len(self.drawn)} shown" if len(self.drawn) < self.size else ""
        left_out = [shortened(text, 100) for text in self._pictures_left_out()]
        boxes = boxes_told(f"{one.label} {one.task}" for one in self.drawn)
        figure.suptitle("\n".join([f"{self.title}{more}", *left_out, *boxes]), fontsize=11)
        return figure

    @property
    def drawn(self) -> tuple[SampleView, ...]:
        """The samples drawn: the first 64."""
        return self.samples[:_DRAWN_SAMPLES]

    def _pictures_left_out(self) -> list[str]:
        longest = max((one.pictures for one in self.samples), key=len, default=())
        return not_drawn([picture.caption for picture, _ in longest[_DRAWN_PICTURES:]], "picture")

    def _draw(self) -> "Figure":
        columns = min(max((len(one.pictures) for one in self.drawn), default=0), _DRAWN_PICTURES)
        has_chunk = any(one.chunk is not None for one in self.drawn)
        widths = [*[1.7] * columns, *([4.2] if has_chunk else [])] or [1.0]
        figure = new_figure(sum(widths) + 2.2, _ROW_HEIGHT * max(1, len(self.drawn)) + 0.8)
        axes = figure.subplots(
            max(1, len(self.drawn)), len(widths) + 1, squeeze=False, width_ratios=[2.2, *widths], sharex=False
        )
        for place in axes.ravel():
            place.set_axis_off()
        for row, sample in zip(axes, self.drawn, strict=False):
            _draw_label(row[0], sample)
            for place, (picture, mark) in zip(row[1:], sample.pictures[:columns], strict=False):
                _draw_marked(place, picture, mark)
            if sample.chunk is not None:
                _draw_chunk(row[-1], sample.chunk)
        _share_chunks([(row[-1], one.chunk) for row, one in zip(axes, self.drawn, strict=False) if one.chunk])
        return figure

    def parts(self) -> list[str]:
        """Return the view as pieces of HTML."""
        told = html_texts(self.totals, "warning")
        shown = f"{len(self.drawn)} of its {counted(self.size, 'sample')}"
        plot = [html_plot(self._draw(), self.title), *html_texts(self._pictures_left_out())]
        keys = page_table(("key", "type", "shape"), self.keys)
        return [*told, page_part("heading", shown), *plot, *self._tasks(), page_part("heading", "Keys"), keys]

    def _tasks(self) -> list[str]:
        """Return the tasks as text if the picture cannot show their letters."""
        from raypipe.text import has_letters

        if all(has_letters(one.task) for one in self.drawn):
            return []
        rows = [(one.label.replace("\n", ", "), one.task) for one in self.drawn]
        return [page_part("heading", "Tasks"), page_table(("sample", "task"), rows)]


def view_batch(batch: Mapping[str, Any], *, num_samples: int = 8) -> BatchView:
    """Return the view of a batch: its first `num_samples` samples, and the shapes of all its keys."""
    if num_samples < 1:
        raise ConfigError(f"num_samples must be at least 1, got {num_samples}")
    if "episode_index" not in batch or "frame_index" not in batch:
        raise ConfigError(
            f"this is no batch of a loader: it lacks episode_index or frame_index and has the keys "
            f"{', '.join(map(repr, list(batch)[:8]))}"
        )
    arrays = {key: _as_array(value) for key, value in batch.items()}
    size = len(arrays["episode_index"])
    cameras, feature = [key for key in arrays if _is_camera(key, arrays[key])], _pick_chunk(arrays)
    ids = np.stack([arrays.get("dataset_index", np.zeros(size)), arrays["episode_index"]])
    return BatchView(
        size=size,
        num_distinct=np.unique(ids, axis=1).shape[1],
        samples=tuple(_sample(arrays, cameras, feature, number) for number in range(min(size, num_samples))),
        keys=tuple(_describe(key, value) for key, value in batch.items()),
        totals=tuple(_totals(arrays)),
    )


def _as_array(value: Any) -> NDArray[Any]:
    """Return a value of a batch as an array; a tensor may be on any device."""
    if not hasattr(value, "detach"):
        # A transform may have made arrays of tensors, and have added anything.
        return np.asarray(value, dtype=None if hasattr(value, "dtype") else object)
    tensor = value.detach().cpu()
    # numpy has no bfloat16.
    array: NDArray[Any] = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    return array


def _is_camera(key: str, array: NDArray[Any]) -> bool:
    has_sides = array.ndim in (4, 5) and min(array.shape[-2:]) >= _LEAST_SIDE
    return has_sides and array.shape[-3] in (1, 3, 4) and array.dtype.kind in "uf" and not key.endswith(IS_PAD)


def _pick_chunk(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the feature to draw numbers of: the action, else the first of floats with a window, else nothing."""
    if "action" in arrays:
        return "action"
    floats = [key for key, array in arrays.items() if array.dtype.kind == "f" and array.ndim in (2, 3)]
    return max(floats, key=lambda key: arrays[key].ndim, default="")


def _sample(arrays: Mapping[str, NDArray[Any]], cameras: list[str], feature: str, number: int) -> SampleView:
    dataset = f"{arrays['dataset'][number]}\n" if "dataset" in arrays else ""
    place = f"episode {arrays['episode_index'][number]}\nframe {arrays['frame_index'][number]}"
    return SampleView(
        label=f"{dataset}{place}",
        task=str(arrays["task"][number]) if "task" in arrays else "",
        is_repeat=_is_marked(arrays, "is_repeat", number),
        pictures=tuple(one for camera in cameras for one in _pictures(arrays, camera, number)),
        chunk=_chunk(arrays, feature, number) if feature else None,
    )


def _is_marked(arrays: Mapping[str, NDArray[Any]], key: str, number: int) -> bool:
    return key in arrays and bool(arrays[key][number])


def _pictures(arrays: Mapping[str, NDArray[Any]], camera: str, number: int) -> list[tuple[Picture, str]]:
    pixels = arrays[camera][number]
    has_time = pixels.ndim == 4
    slots = pixels if has_time else pixels[None]
    shown = spread(len(slots), _SHOWN_SLOTS)
    padding = arrays.get(f"{camera}{IS_PAD}")
    is_missing = _is_marked(arrays, f"{camera}{IS_MISSING}", number)
    # One scale for the whole batch, so that samples can be compared.
    scale = finite_ends(arrays[camera]) if arrays[camera].shape[-3] == 1 and arrays[camera].dtype.kind == "f" else None
    told = f" {scale[0]:.4g} to {scale[1]:.4g}" if scale is not None else ""
    pictures = []
    for slot in shown:
        is_pad = padding is not None and bool(padding[number][slot])
        caption = short_name(camera) + (f" [{slot}]" if has_time else "") + told
        mark = "missing" if is_missing else "padding" if is_pad else ""
        pictures.append((Picture(visible(slots[slot].transpose(1, 2, 0), scale), caption), mark))
    return pictures


def _chunk(arrays: Mapping[str, NDArray[Any]], feature: str, number: int) -> Chunk:
    values = arrays[feature][number]
    has_window = f"{feature}{IS_PAD}" in arrays
    # Without a window a sample has one slot; a scalar has no axis of its own.
    values = values.reshape(len(values) if has_window else 1, -1)
    unused = arrays.get(f"{feature}{DIM_IS_PAD}")
    kept = ~unused[number] if unused is not None else np.ones(values.shape[1], dtype=np.bool_)
    return Chunk(
        feature=feature,
        values=values[:, kept],
        is_pad=arrays[f"{feature}{IS_PAD}"][number] if has_window else np.zeros(1, dtype=np.bool_),
        is_missing=_is_marked(arrays, f"{feature}{IS_MISSING}", number),
        num_padded=int((~kept).sum()),
    )


def _totals(arrays: Mapping[str, NDArray[Any]]) -> list[str]:
    texts = []
    for key, array in arrays.items():
        if key == "is_repeat" and array.any():
            texts.append(f"{counted(int(array.sum()), 'sample')} repeated: marked in is_repeat")
        elif key.endswith(IS_MISSING) and array.any():
            lacking = counted(int(array.sum()), "sample")
            texts.append(f"{short_name(key.removesuffix(IS_MISSING))} is missing in {lacking}: marked in {key}")
        elif key.endswith(IS_PAD) and not key.endswith(DIM_IS_PAD) and array.any():
            padded = counted(int(array.reshape(len(array), -1).any(axis=1).sum()), "sample")
            texts.append(f"{short_name(key.removesuffix(IS_PAD))} has padding in {padded}: marked in {key}")
    return texts


def _describe(key: str, value: Any) -> tuple[str, str, str]:
    if hasattr(value, "shape"):
        return key, str(value.dtype).removeprefix("torch."), str(tuple(value.shape))
    if not isinstance(value, list | tuple):
        return key, type(value).__name__, ""
    kind = type(value[0]).__name__ if value else "nothing"
    return key, f"list of {kind}", f"({len(value)},)"


def _draw_label(axes: Any, sample: SampleView) -> None:
    task = textwrap.wrap(sample.task, _TASK_LETTERS, max_lines=_TASK_LINES, placeholder=" ...")
    text = "\n".join([sample.label, *task])
    axes.text(0, 0.5, text, fontsize=8, va="center", transform=axes.transAxes)
    if sample.is_repeat:
        axes.text(0, 1, "repeat", fontsize=9, color="#b3261e", va="top", weight="bold", transform=axes.transAxes)


def _draw_marked(axes: Any, picture: Picture, mark: str) -> None:
    draw_picture(axes, picture)
    if not mark:
        return
    colour = "#b3261e" if mark == "missing" else "#b26a00"
    axes.set_title(f"{picture.caption}: {mark}", fontsize=8, color=colour)
    axes.plot([0, 1], [0, 1], color=colour, linewidth=1, transform=axes.transAxes)


def _share_chunks(drawn: list[tuple[Any, Chunk]]) -> None:
    """Give the chunks of all samples one scale, and name the lines once."""
    there = [(axes, chunk) for axes, chunk in drawn if not chunk.is_missing]
    for axes, _ in there[1:]:
        axes.sharey(there[0][0])
    if not there:
        return
    there[0][0].autoscale(axis="y")
    widest, chunk = max(there, key=lambda one: one[1].values.shape[1])
    if len(chunk.values) > 1 and chunk.values.shape[1] > 1:
        draw_legend(widest)


def _draw_chunk(axes: Any, chunk: Chunk) -> None:
    axes.set_axis_on()
    axes.tick_params(labelsize=6)
    values = chunk.values[:, :SHOWN_NUMBERS]
    slots, width = values.shape
    axes.set_prop_cycle(color=line_colours(width if slots > 1 else 1))
    narrow = f", {chunk.num_padded} more {either(chunk.num_padded, 'is', 'are')} padding" if chunk.num_padded else ""
    if chunk.is_missing:
        axes.set_title(f"{chunk.feature}: missing", fontsize=8, color="#b3261e", loc="left")
        return
    if slots > 1:
        axes.plot(np.arange(slots), values, linewidth=1, marker=".", markersize=3, label=list(map(str, range(width))))
        axes.set_xlabel("slot of the window", fontsize=6, labelpad=1)
    else:
        axes.bar(np.arange(width), values[0], color="#3367d6")
        axes.set_xlabel("number", fontsize=6, labelpad=1)
    for slot in np.flatnonzero(chunk.is_pad).tolist():
        axes.axvspan(slot - 0.5, slot + 0.5, color="#f0c890", alpha=0.6, linewidth=0)
    axes.set_xlim(-0.6, (slots if slots > 1 else width) - 0.4)
    count_whole(axes.xaxis)
    num_padded = int(chunk.is_pad.sum())
    padded = f": {num_padded} of {counted(slots, 'slot')} {either(num_padded, 'is', 'are')} padding" * bool(num_padded)
    title = f"{chunk.feature}, {numbers_told(chunk.values.shape[1], width)}{narrow}{padded}"
    axes.set_title(title, fontsize=8, loc="left", color="#b26a00" if padded else "black")
