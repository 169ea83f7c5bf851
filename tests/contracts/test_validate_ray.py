"""validate on Ray says what it says in one process, and outlives a video that kills its worker."""

import os
import shutil
import signal
import sys
from dataclasses import dataclass, replace

import pytest
from damages import DAMAGES, base_spec
from ray import cloudpickle

from raypipe.storage import Storage, open_storage
from raypipe.testing import write_dataset
from raypipe.validate import validate_dataset
from raypipe.validate.outline import plan_units, read_outline
from raypipe.validate.run import _run_units

pytestmark = pytest.mark.usefixtures("ray_cluster")

# The workers of Ray cannot import modules of the tests: what is defined here travels to them whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A sound dataset with a file per episode; copy it."""
    return write_dataset(tmp_path_factory.mktemp("validated") / "dataset", base_spec("v2.1"))


def test_findings_on_ray_are_those_of_one_process(base, tmp_path):
    root = shutil.copytree(base, tmp_path / "dataset")
    for name in ("inf-state", "short-video", "drifted-timestamps", "wrong-stats", "zero-byte-parquet", "index-gap"):
        DAMAGES[name].apply(root)

    here = validate_dataset(str(root), where="process", deep=True)
    on_ray = validate_dataset(str(root), where="ray", deep=True)

    assert on_ray.findings == here.findings
    assert on_ray.counts == here.counts
    assert len(here.tally) == 6


@dataclass(frozen=True)
class DeadlyStorage(Storage):
    """Storage with a file that kills whoever opens it."""

    deadly: str = ""

    def __getstate__(self):
        return {"uri": self.uri, "deadly": self.deadly}

    def open_file(self, name):
        if name == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().open_file(name)


def test_a_video_that_kills_its_worker_is_a_finding_and_the_others_are_checked(base):
    outline = read_outline(open_storage(str(base)))
    units = [unit for unit in plan_units(outline)[0] if unit.name.endswith(".mp4") and unit.rows[0] in (1, 2)]
    deadly = next(unit for unit in units if unit.rows == (2,))
    meta = replace(outline.meta, storage=DeadlyStorage(outline.meta.storage.uri, deadly=deadly.name))

    results = _run_units(replace(outline, meta=meta), units, lambda _: None, on_ray=True)

    found = [finding for result in results for finding in result.findings]
    assert [(finding.kind, finding.place.episodes) for finding in found] == [("video-crash", (2,))]
    assert {result.unit for result in results} == set(units)
