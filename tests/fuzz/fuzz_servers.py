"""A server that speaks the Hub's API, and the cache beside it, as a site."""

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch
from urllib.request import urlopen

from fuzz_mutations import mutate_bytes, mutate_json, mutate_value
from fuzz_site import LENGTHS, RIGHT, Damage, Site, WrongData
from hub_server import HubServer

from raypipe.dataset import download_dataset
from raypipe.errors import RaypipeError
from raypipe.storage import resolve as hub_resolve
from raypipe.storage.hub.files import _open_files
from raypipe.testing import SynthSpec, write_dataset


class HubSite(Site):
    """A server that speaks the Hub's API and answers one kind of request as it should not; and a forged cache."""

    weight = 1
    kinds = ("refs", "revision", "tree", "resolve", "lfs", "cache")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "hub")
        self.root = write_dataset(folder / "arm", SynthSpec(cameras=(), lengths=LENGTHS))
        self.cache = folder / "cache"
        self.hub = HubServer()
        self.hub.__enter__()
        self.hub.add_repo("lab/arm", self.root, tags=("v3.0",))
        self.sound = self._record()

    def _record(self) -> dict[str, bytes]:
        api = f"{self.hub.endpoint}/api/datasets/lab/arm"
        commit = self.hub.repos["lab/arm"].tags["v3.0"]
        told = {
            "refs": f"{api}/refs",
            "revision": f"{api}/revision/v3.0",
            "tree": f"{api}/tree/{commit}?recursive=true",
        }
        return {kind: urlopen(url).read() for kind, url in told.items()}

    def draw(self, rng: random.Random) -> Damage:
        kind = rng.choice(self.kinds)
        if kind in self.sound:
            return Damage(kind, mutate_json(self.sound[kind], rng), _odd_headers(rng))
        if kind == "cache":
            return Damage(rng.choice(("trees", "refs")), mutate_bytes(self._listing(rng), rng), kind)
        path = rng.choice(("meta/info.json", "meta/tasks.parquet", "data/chunk-000/file-000.parquet"))
        return Damage(path, mutate_bytes((self.root / path).read_bytes(), rng), _odd_headers(rng))

    def _listing(self, rng: random.Random) -> bytes:
        commit = self.hub.repos["lab/arm"].tags["v3.0"]
        told = {"format_version": 1, "files": {"meta/info.json": {"size": 1, "blob_id": commit}}}
        return json.dumps(mutate_value(told, rng)).encode() if rng.random() < 0.7 else commit.encode()

    @contextmanager
    def damaged(self, damage: Damage) -> Iterator[None]:
        shutil.rmtree(self.cache, ignore_errors=True)
        self.hub.reset()
        if damage.use == "cache":
            self._forge(damage)
        else:
            told = json.loads(damage.use)
            asked = {"path": "" if damage.file in self.sound else damage.file, "times": 9, "headers": told["headers"]}
            kind = damage.file if damage.file in self.sound else ""
            self.hub.fail(**asked, kind=kind, status=told["status"], content=damage.content)
        waits = {"FIRST_WAIT_S": 0.0, "TRIES": 2, "MOST_WAIT_S": 0.05}
        with self.hub.as_hub(self.cache, timeout_s=5), patch.multiple("raypipe.storage.hub.client", **waits):
            _open_files.cache_clear()
            yield

    def _forge(self, damage: Damage) -> None:
        repo = self.cache / "datasets--lab--arm"
        commit = self.hub.repos["lab/arm"].tags["v3.0"]
        name = f"trees/{commit}.json" if damage.file == "trees" else "refs/v3.0"
        for path, content in {
            f"trees/{commit}.json": b"{}",
            "refs/v3.0": commit.encode(),
            name: damage.content,
        }.items():
            (repo / path).parent.mkdir(parents=True, exist_ok=True)
            (repo / path).write_bytes(content)

    def use(self, damage: Damage) -> str:
        hub_resolve("lab/arm")
        download_dataset("lab/arm")
        got = {path.name: path.read_bytes() for path in self.cache.rglob("info.json")}
        want = (self.root / "meta/info.json").read_bytes()
        if got and got != {"info.json": want}:
            raise WrongData("another info.json than the Hub's came")
        return RIGHT

    def names(self, error: RaypipeError, _: Damage) -> bool:
        return "lab/arm" in str(error) or self.hub.endpoint in str(error)


def _odd_headers(rng: random.Random) -> str:
    odd = ("0", "1", "-1", "²", "1e999", "nan", "Wed, 99 Foo 9999 99:99:99 GMT", "Wed, 21 Oct 2015 07:28:00 GMT", "")
    waits = {"Retry-After": rng.choice(odd)} if rng.random() < 0.5 else {"RateLimit": f'"api";r=0;t={rng.choice(odd)}'}
    status = rng.choice((0, 0, 0, 0, 204, 206, 301, 302, 400, 403, 404, 410, 418, 429, 500, 503))
    headers = {key: value.encode("latin-1", "replace").decode("latin-1") for key, value in waits.items()}
    if rng.random() < 0.3:
        headers["Location"] = rng.choice(
            ("", "/", "//", "http://", "ftp://x", "/datasets/lab/arm/resolve/v3.0/x", "http://[", "\x80")
        )
    return json.dumps({"status": status, "headers": headers})
