"""Whether a peer goes on exactly: frames that came twice or not at all, from the batches themselves. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Batches = Sequence[Sequence[int]]
"""Frame numbers of every batch."""


@dataclass(frozen=True, kw_only=True)
class Count:
    """Frames of an epoch, against those of the dataset."""

    num_frames: int
    repeated: int
    """Times that a frame came again."""
    missing: int

    @property
    def is_exact(self) -> bool:
        """Whether every frame came once."""
        return not self.repeated and not self.missing

    def __str__(self) -> str:
        if self.is_exact:
            return "exactly once"
        return f"{self.repeated} twice, {self.missing} missing of {self.num_frames}"

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {**asdict(self), "text": str(self)}


def count_frames(parts: Iterable[Batches], num_frames: int) -> Count:
    """Return how often the frames ``0 .. num_frames - 1`` came in all parts together."""
    seen = Counter(number for batches in parts for batch in batches for number in batch)
    strange = [number for number in seen if not 0 <= number < num_frames]
    assert not strange, f"frames that the dataset does not have: {strange[:5]}"
    return Count(num_frames=num_frames, repeated=seen.total() - len(seen), missing=num_frames - len(seen))


def judge_resume(whole: Batches, part: Batches, rest: Batches, num_frames: int) -> dict[str, Any]:
    """Return whether a run that was stopped and went on gave what an uninterrupted one gives."""
    count = count_frames([part, rest], num_frames)
    joined = [list(batch) for batch in (*part, *rest)]
    is_same = joined == [list(batch) for batch in whole]
    text = "exact: same batches" if is_same else f"{count}, other batches"
    return {**count.to_json(), "is_same": is_same, "text": text}
