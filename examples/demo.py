"""Write a small dataset, and see what raypipe reads from it. Run by ``make demo``."""

import shutil
from pathlib import Path

from rich.console import Console

import raypipe as rp
from raypipe.info import describe, info_table
from raypipe.testing import SynthSpec, read_stamp, write_dataset


def main() -> None:
    root = Path("demo-data")
    shutil.rmtree(root, ignore_errors=True)
    write_dataset(root, SynthSpec())
    console = Console()
    console.print(f"wrote a LeRobot dataset to {root}/, and this is what it holds:\n")
    console.print(info_table(describe(str(root))))

    dataset = rp.open_dataset(str(root)).windowed({"action": [i / 10 for i in range(4)]})
    sample = dataset[len(dataset) // 2]
    console.print(f"\nsample {len(dataset) // 2} of {len(dataset)}, with a window of 4 actions:\n")
    for key, value in sample.items():
        text = repr(value) if isinstance(value, str) else f"{value.dtype} {tuple(value.shape)}"
        console.print(f"  {key:32} {text}", highlight=False)
    stamp = read_stamp(sample[dataset.spec.cameras[0]])
    console.print(
        f"\nits picture says episode {stamp.episode}, frame {stamp.frame}; its row says episode "
        f"{sample['episode_index']}, frame {sample['frame_index']}"
    )


if __name__ == "__main__":
    main()
