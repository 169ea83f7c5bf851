"""Runs `raypipe validate` for the page in a separate process, so that a damaged file can crash only that process.

The page stays fast during the check, and Ctrl-C ends both.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final, Literal

from raypipe.dataset import Dataset
from raypipe.text import cut_inside
from raypipe.validate import Finding, Place, fold_findings, is_small

Stage = Literal["waiting", "running", "done", "failed"]

_PROGRAM: Final = ("-m", "raypipe")
_LONGEST_ERROR: Final = 2000
_MOST_DETAILS: Final = 5000
"""Findings of one kind that the page shows with their own text; later episodes show the text of the first."""


class Checks:
    """The findings of a dataset, checked on request; threads may share it."""

    def __init__(self, dataset: Dataset) -> None:
        self._meta = dataset.meta
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False
        self._told: dict[str, Any] = {"stage": "waiting", "error": "", "folds": [], "by_episode": {}}

    @property
    def is_quick(self) -> bool:
        """Whether to check files without a request: they are few, and on this machine."""
        num_files = len(self._meta.episodes) * (1 + len(self._meta.cameras)) if not self._meta.is_packed else 0
        return self._meta.storage.is_local and is_small(self._meta.num_frames, num_files, deep=False)

    def told(self, *, is_asked: bool) -> Mapping[str, Any]:
        """Return what is known now; start the check if it is quick or `is_asked`, and has not started."""
        with self._lock:
            is_started = self._told["stage"] != "waiting"
            if not is_started and (is_asked or self.is_quick) and not self._is_closed:
                self._told = {**self._told, "stage": "running"}
                self._process = _start(self._meta.storage.address)
                threading.Thread(target=self._wait, args=(self._process,), daemon=True).start()
            return self._told

    def close(self) -> None:
        """Stop a running check."""
        with self._lock:
            self._is_closed, process = True, self._process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()

    def _wait(self, process: "subprocess.Popen[str]") -> None:
        out, err = process.communicate()
        try:
            found = _read_findings(json.loads(out))
        except (ValueError, KeyError, TypeError):
            why = err.strip() or f"raypipe validate ended with code {process.returncode}"
            found = {"stage": "failed", "error": cut_inside(why, _LONGEST_ERROR)}
        with self._lock:
            self._told = {**self._told, **found}


def _start(root: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *_PROGRAM, "validate", "--json", "--where", "process", "--", root],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ctrl-C in the terminal goes to the server, which then ends this process.
        start_new_session=True,
    )


def _read_findings(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the findings of a JSON report, alike ones folded together, and the worst severity of every episode."""
    findings = [
        Finding(**{**one, "place": Place(**{**one["place"], "episodes": tuple(one["place"]["episodes"])})})
        for one in report["findings"]
    ]
    by_episode: dict[int, str] = {}
    for finding in findings:
        # The worst come first.
        for number in finding.place.episodes:
            by_episode.setdefault(number, finding.severity)
    folds = [
        {
            "severity": fold.severity,
            "kind": fold.kind,
            "place": fold.place,
            "message": fold.message,
            "remedy": fold.findings[0].remedy,
            "episodes": list(fold.episodes),
            "details": [
                {"episodes": list(one.place.episodes), "message": one.message} for one in fold.findings[:_MOST_DETAILS]
            ],
        }
        for fold in fold_findings(findings)
    ]
    return {"stage": "done", "folds": folds, "by_episode": by_episode, "elapsed_s": report["elapsed_s"]}
