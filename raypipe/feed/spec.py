"""`FeedSpec`: how blocks travel."""

from dataclasses import dataclass
from typing import Final, Literal

from raypipe.errors import ConfigError

BY_SIZE: Final = "by_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSpec:
    """How blocks travel. Nothing here changes the order."""

    spans_per_block: int | Literal["by_size"] = BY_SIZE
    """Consecutive spans of a rank that share a block. A block costs Ray 20 to 40 ms of CPU, however small, so the
    default packs up to 8 MB into one. The local feed reads one span at a time unless you give a number."""

    ranks_per_split: int = 16
    """Ranks that share one Ray Dataset; one executor does 50 to 100 blocks/s."""

    blocks_per_chapter: int = 5000
    """Blocks per execution of a Ray Dataset."""

    prefetch_blocks: int = 4
    """Blocks that a rank fetches ahead of the one it opens."""

    def __post_init__(self) -> None:
        for name in ("spans_per_block", "ranks_per_split", "blocks_per_chapter", "prefetch_blocks"):
            if getattr(self, name) != BY_SIZE and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
