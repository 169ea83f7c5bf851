"""`BenchSpec`: what to measure, and for how long."""

import math
from dataclasses import dataclass

from raypipe.errors import ConfigError
from raypipe.plan import DEFAULT_LIVE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSpec:
    """What is the same for all settings."""

    root: str
    batch_size: int = 64
    action_frames: int = 16
    """Length of the action chunk; not used without a feature ``action``."""
    observation_frames: int = 1
    """Frames of every camera in a sample."""
    seconds: float = 20.0
    """Time of a setting's two epochs at the floor's speed: an epoch has the episodes that the floor decodes in half of
    it. A setting takes about three times as long. An epoch stops twice this time after its first batch."""
    live_bytes: int = DEFAULT_LIVE_BYTES
    gpu_samples_per_s: float = 0.0
    """How many samples a GPU takes per second. The table then shows for every setting how many cores feed it; 0: it
    does not."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "action_frames", "observation_frames", "live_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.seconds > 0:
            raise ConfigError(f"seconds must be more than 0, got {self.seconds}")
        if not 0 <= self.gpu_samples_per_s < math.inf:
            raise ConfigError(f"gpu_samples_per_s must be a number from 0 on, got {self.gpu_samples_per_s}")
