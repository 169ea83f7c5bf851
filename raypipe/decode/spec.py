"""What a user decides about decoding: where it runs, when, at what size. Never what value a pixel has."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from raypipe.errors import ConfigError, suggest
from raypipe.metadata import Feature

Where = Literal["auto", "rank", "cluster"]
When = Literal["block", "exit"]
CameraDtype = Literal["uint8", "float32"]

ORIGINAL_SIZE: Final = "original"
ASSIGNED_CPUS: Final = "assigned"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpec:
    """Where, when and how pixels are decoded."""

    where: Where = "auto"
    """``rank``: threads of the training process; no pixel crosses the object store, and it costs least per frame.
    ``cluster``: a Ray Data map on any node with CPUs; scales past the machine of the GPUs. ``auto``: ``cluster`` where
    the cluster has nodes with CPUs and no GPU while ranks run on nodes with GPUs, else ``rank``."""

    when: When = "block"
    """``block``: a span is decoded once, in one pass, when it arrives. ``exit`` (rank only): rows alone are kept, and
    the frames of a batch are decoded as it leaves; for little memory or sparse sampling, at several times the cost."""

    resize: tuple[int, int] | Literal["original"] = ORIGINAL_SIZE
    """Height and width of every decoded frame; done by FFmpeg, before anything is copied."""

    num_threads: int | Literal["assigned"] = ASSIGNED_CPUS
    """Decoding threads of a rank: the CPUs that Ray assigned to its process, at least 1. In a process that Ray has not
    started, its share of the machine's: all of them, or what torchrun's processes leave to each."""

    camera_dtype: CameraDtype = "uint8"
    """``float32`` gives [0, 1]; converted on the device, after the copy."""

    device: str = "cpu"
    """``cuda`` lets torchcodec decode on the rank's GPU."""

    open_videos: int = 32
    """Videos kept open per thread. An open decoder holds 3 to 5 MB."""

    def __post_init__(self) -> None:
        for name, choices in (("where", Where), ("when", When), ("camera_dtype", CameraDtype)):
            value = getattr(self, name)
            if value not in get_args(choices):
                raise ConfigError(f"decode {name} is {value!r}{suggest(value, get_args(choices))}")
        if self.where == "cluster" and self.when == "exit":
            raise ConfigError("decode when='exit' runs on the rank; use where='rank', or when='block'")
        if self.where == "cluster" and self.device != "cpu":
            raise ConfigError(f"decode device={self.device!r} needs where='rank': the tasks of a cluster have no GPU")
        if self.resize != ORIGINAL_SIZE and (len(self.resize) != 2 or min(self.resize) < 1):
            raise ConfigError(f"decode resize is {self.resize!r}; give (height, width) or {ORIGINAL_SIZE!r}")
        if self.num_threads != ASSIGNED_CPUS and self.num_threads < 1:
            raise ConfigError(f"decode num_threads must be at least 1 or {ASSIGNED_CPUS!r}, got {self.num_threads}")
        if self.open_videos < 1:
            raise ConfigError(f"decode open_videos must be at least 1, got {self.open_videos}")

    def frame_shape(self, feature: Feature) -> tuple[int, int, int]:
        """Return ``(height, width, channels)`` of a camera's decoded frames."""
        _, height, width = feature.shape
        if self.resize != ORIGINAL_SIZE:
            height, width = self.resize
        return height, width, 1 if feature.is_depth else 3


def check_decodable(feature: Feature, root: str) -> None:
    """Raise a `ConfigError` for a camera that cannot be decoded without loss of what it holds."""
    if feature.is_depth and feature.kind == "video":
        raise ConfigError(
            f"camera {feature.name!r} of {root!r} is a depth video of 12 bits, which torchcodec gives only as 8 bits. "
            f"Leave it out with cameras=[...]."
        )


def check_device(device: str) -> None:
    """Raise a `ConfigError` for a device that is not there."""
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}, and torch finds no CUDA device here; use device='cpu'")
