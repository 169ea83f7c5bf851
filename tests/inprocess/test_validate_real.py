"""Real datasets: every finding was checked by hand against a plain reading of the files."""

from pathlib import Path

import pytest

from raypipe.validate import validate_dataset

REAL_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

pytestmark = pytest.mark.skipif(not REAL_DATA.exists(), reason="the real datasets are not part of the project")

EXPECTED = {
    # Timestamps are wall clock: seven episodes drift by 0.2 to 2.1 s, one by 30 ms.
    "cr5_v21": {"timestamp-drift": 7, "timestamp-jitter": 1},
    # Timestamps start one frame late, and info.json is that of a larger dataset.
    "groot_simpnp_v20": {
        "camera-missing": 1,
        "timestamp-offset": 5,
        "column-derived": 1,
        "constant": 2,
        "action-constant": 1,
        "count-mismatch": 2,
        "split-invalid": 1,
        "video-gop": 5,
    },
    # Their statistics say that no pixel ever changes.
    "piper_v30": {"stats-flat": 2},
    "so_front_v30": {"stats-flat": 1},
    # Simulated: states and actions never change.
    "so101_wrist_v30": {"constant": 1, "action-constant": 1, "stats-flat": 1},
    # Row groups of 1,000 rows, no video, and no success.
    "pusht_v30_novid": {"camera-missing": 1, "row-groups": 1, "constant": 1},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_findings_on_a_real_dataset_are_the_true_ones(name):
    report = validate_dataset(str(REAL_DATA / name), where="process")

    assert report.tally == EXPECTED[name]
    assert report.severity != "error"
