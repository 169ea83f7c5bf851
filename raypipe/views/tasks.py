"""The tasks of a dataset for its card: counts the episodes of each task from the rows, and draws the counts."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from raypipe.errors import DatasetError
from raypipe.format import INDEX_FEATURES, DatasetMeta, Feature, column_values, open_parquet, read_parquet
from raypipe.text import counted
from raypipe.views.view import shortened

_MOST_FILES: Final = 1000
"""The most data files to count rows of: about two seconds. With more, or with remote ones, the episode table counts."""

TASKS_SHOWN: Final = 12
_TASK_LETTERS: Final = 44


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCounts:
    """The number of episodes of each task."""

    counts: tuple[tuple[str, int], ...]
    """Texts and numbers of episodes, the most frequent first."""
    is_of_rows: bool = True
    """False if the counts come from the episode table instead of the rows."""
    contradicted: tuple[int, ...] = ()
    """Episodes with a task in their rows that the episode table does not list for them."""
    errors: tuple[str, ...] = ()
    """The errors of unreadable data files; the counts of their episodes come from the table."""


def count_tasks(meta: DatasetMeta) -> TaskCounts:
    """Return every task with the number of episodes that have rows of it; reads one column of the data files.

    If the files are remote or very many, it reads none and takes the tasks from the episode table.
    """
    found = [meta.tasks.named(texts) for texts in meta.episodes.tasks.to_pylist()]
    files: dict[str, list[int]] = defaultdict(list)
    for row in range(len(meta.episodes)):
        files[meta.data_file(row)].append(row)
    is_of_rows = meta.storage.is_local and len(files) <= _MOST_FILES and len(meta.tasks) > 0
    contradicted, errors, known = [], [], set(meta.tasks.texts.values())
    for name, rows in files.items() if is_of_rows else ():
        try:
            # The check of the file list reports missing files.
            tasks = _read_tasks(meta, name, rows) if meta.storage.exists(name) else {}
        except DatasetError as error:
            errors.append(str(error))
            continue
        for row, texts in tasks.items():
            if found[row] and found[row] <= known and not texts <= found[row]:
                contradicted.append(int(meta.episodes.episode_index[row]))
            found[row] = texts
    counts = Counter(dict.fromkeys(meta.tasks.texts.values(), 0))
    counts.update(text for texts in found for text in texts)
    return TaskCounts(
        counts=tuple(counts.most_common()),
        is_of_rows=is_of_rows,
        contradicted=tuple(contradicted),
        errors=tuple(errors),
    )


def _read_tasks(meta: DatasetMeta, name: str, rows: Sequence[int]) -> dict[int, frozenset[str]]:
    """Return the tasks of a data file's episodes, by row of the episode table; none if it lacks the column.

    Raises:
        DatasetError: the file is missing or damaged.
    """
    with open_parquet(meta.storage, name) as parquet:
        columns = [one for one in ("episode_index", "task_index") if parquet.schema_arrow.names.count(one) == 1]
    if "task_index" not in columns or ("episode_index" not in columns and len(rows) > 1):
        return {}
    table = read_parquet(meta.storage, name, columns)
    index = {one: np.asarray(column_values(table, _index_feature(one), repr(name))) for one in columns}
    numbers = meta.episodes.episode_index[list(rows)]
    episode = index.get("episode_index", np.full(len(table), numbers[0]))
    pairs = np.stack([episode, index["task_index"]])
    # Keep only rows where a value changes: of millions, few are left to sort.
    is_new = np.append(True, (np.diff(pairs, axis=1) != 0).any(axis=0))[: pairs.shape[1]]
    pairs = np.unique(pairs[:, is_new], axis=1)
    texts: dict[int, set[str]] = defaultdict(set)
    for number, task in pairs.T.tolist():
        texts[number].add(meta.tasks.texts.get(task, f"task {task}"))
    return {row: frozenset(texts[number]) for row, number in zip(rows, numbers.tolist(), strict=True) if texts[number]}


def _index_feature(name: str) -> Feature:
    return Feature(name=name, kind="vector", dtype=INDEX_FEATURES[name], shape=(1,))


def is_drawn_whole(task: str) -> bool:
    """Return whether a picture can show the whole text of a task: it is short, and the font has its letters."""
    from raypipe.text import has_letters

    return len(task) <= _TASK_LETTERS and has_letters(task)


def draw_tasks(axes: Any, tasks: Sequence[tuple[str, int]], source: str) -> None:
    """Draw the number of episodes of the most frequent tasks; `source` follows the count of tasks in the title."""
    from matplotlib.ticker import MaxNLocator

    from raypipe.text import boxes_told

    shown = tasks[:TASKS_SHOWN]
    more = f", the {len(shown)} most frequent" if len(tasks) > len(shown) else ""
    title = f"{counted(len(tasks), 'task')}{source}{more}"
    axes.set_title("; ".join([title, *boxes_told(text for text, _ in shown)]), fontsize=9, loc="left")
    if not shown:
        axes.set_axis_off()
        return
    places = np.arange(len(shown))
    bars = axes.barh(places, [count for _, count in shown], color="#9db7ee")
    axes.bar_label(bars, padding=2, fontsize=7)
    axes.set_yticks(places, [shortened(text or "(no text)", _TASK_LETTERS) for text, _ in shown], fontsize=7)
    axes.set_ylim(max(len(shown), 6) - 0.5, -0.5)
    axes.set_xlabel("episodes")
    axes.margins(x=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(axis="x", labelsize=7)
