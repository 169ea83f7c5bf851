"""A dataset whose reads take unlike times: what a busy storage or a busy cluster does to read tasks."""

import sys
import time
import zlib
from dataclasses import dataclass, fields, replace

from ray import cloudpickle

from raypipe.dataset import Dataset
from raypipe.format import DatasetMeta

# The workers of Ray cannot import modules of the tests: what is defined here travels to them whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass(frozen=True, kw_only=True)
class SlowMeta(DatasetMeta):
    """Metadata that waits before it says where the rows of an episode are, which a read task asks for every span."""

    salt: int

    def data_file(self, row):
        time.sleep(zlib.crc32(f"{self.salt}:{row}".encode()) % 200 / 1000)
        return super().data_file(row)


def slowed(dataset: Dataset, salt: int) -> Dataset:
    """Return the dataset with waits of up to 0.2 s that differ by episode and `salt`."""
    meta = {field.name: getattr(dataset.meta, field.name) for field in fields(dataset.meta)}
    return replace(dataset, meta=SlowMeta(**meta, salt=salt))
