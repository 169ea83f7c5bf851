"""Statistics of a made dataset, as LeRobot stores them: by episode, and over all episodes.

Those of rows are exact. Those of cameras come from at most 4 frames an episode, drawn again, before coding loss.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypipe.testing.pixels import draw_frames
from raypipe.testing.rows import EpisodeRange, row_columns
from raypipe.testing.spec import SynthSpec

MadeStats = dict[str, NDArray[Any]]

_QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
_FRAMES_PER_EPISODE = 4


def episode_stats(spec: SynthSpec, episodes: EpisodeRange) -> list[dict[str, MadeStats]]:
    """Return the statistics of each of the episodes, by feature; strings have none."""
    columns = row_columns(spec, episodes)
    stats = []
    start = 0
    for episode in range(episodes.start, episodes.stop):
        rows = slice(start, start + spec.lengths[episode])
        found = {name: _describe(values[rows]) for name, values in columns.items() if values.dtype != object}
        for number, camera in enumerate(spec.cameras):
            found[camera.name] = _describe_camera(spec, number, episode)
        stats.append(found)
        start = rows.stop
    return stats


def combine_stats(stats: list[dict[str, MadeStats]]) -> dict[str, MadeStats]:
    """Return the statistics of a dataset from those of its episodes.

    Min, max, mean and std are exact. Quantiles are the widest of the episodes', as in LeRobot since 2026.
    """
    return {name: _combine([episode[name] for episode in stats]) for name in stats[0]}


def plain_stats(stats: dict[str, MadeStats], *, with_quantiles: bool, with_count: bool) -> dict[str, Any]:
    """Return statistics as nested lists for JSON and parquet."""
    left_out = set() if with_quantiles else set(_QUANTILES)
    left_out |= set() if with_count else {"count"}
    return {
        feature: {name: values.tolist() for name, values in found.items() if name not in left_out}
        for feature, found in stats.items()
    }


def _describe(values: NDArray[Any]) -> MadeStats:
    if values.ndim == 1:
        values = values[:, None]
    numbers = values.astype(np.float64)
    found = {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": numbers.mean(axis=0),
        "std": numbers.std(axis=0),
        "count": np.array([len(values)]),
    }
    return found | dict(zip(_QUANTILES, np.quantile(numbers, list(_QUANTILES.values()), axis=0), strict=True))


def _describe_camera(spec: SynthSpec, camera_number: int, episode: int) -> MadeStats:
    length = spec.lengths[episode]
    chosen = np.unique(np.linspace(0, length - 1, min(length, _FRAMES_PER_EPISODE)).astype(np.int64))
    camera = spec.cameras[camera_number]
    # As in LeRobot, take every n-th pixel: here about 75 x 75 of them.
    step = max(1, min(camera.height, camera.width) // 75)
    frames = draw_frames(spec, camera_number, episode, chosen)[..., ::step, ::step]
    is_depth = camera.is_depth
    channels = 1 if is_depth else 3
    pixels = frames.reshape(len(chosen), channels, -1).transpose(0, 2, 1).reshape(-1, channels)
    found = _describe(pixels if is_depth else pixels / 255)
    shaped = {name: values.reshape(channels, 1, 1) for name, values in found.items() if name != "count"}
    return shaped | {"count": np.array([len(chosen)])}


def _combine(stats: list[MadeStats]) -> MadeStats:
    columns = {name: np.stack([found[name] for found in stats]) for name in stats[0]}
    counts = columns["count"].reshape(-1, *[1] * (columns["mean"].ndim - 1))
    mean = (columns["mean"] * counts).sum(axis=0) / counts.sum()
    variance = ((columns["std"] ** 2 + (columns["mean"] - mean) ** 2) * counts).sum(axis=0) / counts.sum()
    combined = {
        "min": columns["min"].min(axis=0),
        "max": columns["max"].max(axis=0),
        "mean": mean,
        "std": np.sqrt(variance),
        "count": columns["count"].sum(axis=0),
    }
    for name, quantile in _QUANTILES.items():
        combined[name] = columns[name].min(axis=0) if quantile <= 0.5 else columns[name].max(axis=0)
    return combined
