"""Files of a remote root, open for reading."""

import io

from raypipe.filecache import HeldFile


class HeldStream(io.BufferedReader):
    """A file of the cache, opened: it stays there as long as it is open."""

    def __init__(self, held: HeldFile) -> None:
        super().__init__(io.FileIO(held.path))
        self._held = held

    def close(self) -> None:
        """Close the file, and let the cache remove it when it needs room."""
        super().close()
        self._held.close()

    def __del__(self) -> None:
        # Readers of parquet keep files open for as long as they live, and do not close them.
        self.close()
