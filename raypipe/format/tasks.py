"""The tasks of a dataset: ``task_index`` to text, by the rule of each format version."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from raypipe.errors import LEAVE_OUT, DatasetError
from raypipe.format.tables import check_not_refused, parsing, read_json_lines, read_parquet
from raypipe.storage import Storage
from raypipe.text import span_text

PARQUET = "meta/tasks.parquet"
TASK_LINES = "meta/tasks.jsonl"


@dataclass(frozen=True)
class Tasks:
    """The texts of a dataset's tasks."""

    texts: Mapping[int, str]
    """By ``task_index``."""

    def __len__(self) -> int:
        return len(self.texts)

    def text(self, task_index: int) -> str:
        """Return the text of one task."""
        if task_index not in self.texts:
            known = span_text(min(self.texts), max(self.texts)) if self.texts else "none"
            raise DatasetError(
                f"a row has task_index {task_index}, and the dataset's tasks are {known}; add the task to "
                f"meta/tasks, or {LEAVE_OUT}"
            )
        return self.texts[task_index]

    def named(self, listed: Iterable[object] | None) -> frozenset[str]:
        """Return the texts of the tasks that an episode lists; some datasets list numbers instead of texts."""
        texts = [str(one) for one in listed or ()]
        numbers = {text: int(text) for text in texts if text.isdecimal() and text not in self.indices}
        return frozenset(self.texts.get(numbers[text], text) if text in numbers else text for text in texts)

    @cached_property
    def indices(self) -> dict[str, int]:
        """The ``task_index`` of every text; the lowest if a text occurs twice."""
        return {text: index for index, text in sorted(self.texts.items(), reverse=True)}


def read_tasks(storage: Storage, total_tasks: int) -> Tasks:
    """Return the tasks of a dataset; none if `total_tasks` is 0, whatever files are there."""
    if total_tasks == 0:
        return Tasks({})
    if storage.offers(PARQUET):
        return read_positional(storage, PARQUET, "task_index")
    if storage.offers(TASK_LINES):
        table = read_json_lines(storage, TASK_LINES, ("task_index", "task"))
        numbers = table.column("task_index").to_pylist()
        if not all(isinstance(number, int) for number in numbers):
            raise DatasetError(
                f"{storage.locate(TASK_LINES)!r} has a task_index that is no number: {numbers[:10]}. Correct it."
            )
        return Tasks(dict(zip(numbers, map(str, table.column("task").to_pylist()), strict=True)))
    check_not_refused(storage, (PARQUET, TASK_LINES))
    raise DatasetError(
        f"no tasks at {storage.uri!r}: info.json counts {total_tasks}, and neither {PARQUET} nor {TASK_LINES} "
        f"exists. Fetch the missing file, or set total_tasks to 0."
    )


def read_positional(storage: Storage, name: str, index: str) -> Tasks:
    """Return the texts of a v3.0 file, of tasks or subtasks: LeRobot looks them up by row position, not by `index`."""
    table = read_parquet(storage, name)
    # The text is a pandas index: named "task" by newer writers, unnamed by older ones.
    word, texts = index.removesuffix("_index"), [one for one in table.column_names if one != index]
    column = next((one for one in (word, "__index_level_0__", *texts) if one in texts), "")
    if not column:
        raise DatasetError(
            f"{storage.locate(name)!r} has the columns {table.column_names} and none with the {word}'s text; "
            f"expected {word!r} or '__index_level_0__'. Fetch the file again, or add the column."
        )
    with parsing(storage, name):
        return Tasks({i: str(text) for i, text in enumerate(table.column(column).to_pylist())})
