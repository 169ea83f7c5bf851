"""What a run leaves and reads, as sites: accounts, states, mixture files, statistics."""

import io
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pyarrow.parquet as pq
import yaml
from account_cases import HandRun
from fuzz_mutations import ODD_VALUES, mutate_bytes, mutate_json, mutate_table, mutate_value
from fuzz_site import CHANGED, LENGTHS, RIGHT, Damage, Site

from raypipe.account.file import dump_account, load_account
from raypipe.account.parts import seal_account
from raypipe.dataset import open_dataset
from raypipe.errors import RaypipeError
from raypipe.mixture import Mixture, MixtureStats, Normaliser
from raypipe.mixture.spec import read_mixture_file
from raypipe.mixture.stats import single_stats
from raypipe.pipeline import Pipeline
from raypipe.plan import OrderSpec, SelectionSpec
from raypipe.testing import SynthSpec, write_dataset
from raypipe.views import describe_mixture
from raypipe.views.account import StepQuery, check_run, locate_recorded, read_frames


class AccountSite(Site):
    """The account of a run, as a checkpoint has it: files of ranks, and the state."""

    weight = 3

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "checkpoint")
        root = write_dataset(folder / "dataset", SynthSpec(cameras=(), lengths=LENGTHS))
        index, axis = read_frames(str(root), SelectionSpec())
        run = HandRun(index, OrderSpec(seed=3, live_spans=2), axis=axis, bad={2})
        run.root = str(root)
        run.start(2, 1)
        run.steps(run.world.num_steps + 1)
        run.write_checkpoint(self.folder)
        files = (path for path in self.folder.rglob("*") if path.is_file())
        self.files = sorted(path.relative_to(self.folder).as_posix() for path in files)
        self.sound = {name: (self.folder / name).read_bytes() for name in self.files}

    def draw(self, rng: random.Random) -> Damage:
        file = rng.choice(self.files)
        content, kind = self.sound[file], rng.random()
        if file.endswith(".json"):
            return Damage(file, mutate_json(content, rng), rng.choice(("check", "where")))
        damaged = mutate_table(content, rng) if kind < 0.5 else _other_header(content, rng)
        return Damage(file, damaged, rng.choice(("check", "check", "where")))

    def use(self, damage: Damage) -> str:
        if damage.use == "where":
            json.dumps(locate_recorded(str(self.folder), StepQuery(step=2, rank=0, epoch=None)).to_json())
            return CHANGED
        checked = check_run(str(self.folder))
        json.dumps(checked.to_json())
        return RIGHT if checked.is_exact else CHANGED

    def names(self, error: RaypipeError, damage: Damage) -> bool:
        # The account may name another dataset now.
        return super().names(error, damage) or "account" in str(error)


def _other_header(content: bytes, rng: random.Random) -> bytes:
    """Return an account whose JSON is another one, in half of the cases with its seal made anew."""
    table = pq.read_table(io.BytesIO(content))
    key = b"raypipe.account"
    told = json.loads(table.schema.metadata[key])
    changed = table.replace_schema_metadata({key: json.dumps(mutate_value(told, rng)).encode("utf-8", "replace")})
    sink = io.BytesIO()
    pq.write_table(changed, sink)
    return _sealed(sink.getvalue()) if rng.random() < 0.5 else sink.getvalue()


def _sealed(content: bytes) -> bytes:
    """Return an account with the digests of what it says now, as a forger would make them; as it is where none can."""
    try:
        with patch("raypipe.account.parts.Account.find_break", lambda _: ""):
            account = load_account(content, "forged")
        return dump_account(seal_account(account.header, account.parts))
    except Exception:
        return content


class StateSite(Site):
    """The state of a loader: from a stranger, or of another run."""

    weight = 3
    is_mixture = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "dataset")
        options = {"batch_size": 2, "seed": 0, "selection": {}} if not self.is_mixture else {"batch_size": 2, "seed": 0}
        if self.is_mixture:
            root: Any = write_mixture(self.folder)
        else:
            root = write_dataset(self.folder, SynthSpec(cameras=(), lengths=LENGTHS))
        self.loader = Pipeline(str(root), **options).loader()  # type: ignore[arg-type]
        for _ in self.loader.steps(2):
            pass
        self.state = json.loads(json.dumps(self.loader.state_dict()))

    def draw(self, rng: random.Random) -> Damage:
        return Damage(
            "state", json.dumps(mutate_value(self.state, rng)).encode(), rng.choice(("load", "load", "go on"))
        )

    @contextmanager
    def damaged(self, _: Damage) -> Iterator[None]:
        # A value, not a file.
        yield

    def use(self, damage: Damage) -> str:
        self.loader.load_state_dict(json.loads(damage.content))
        if damage.use == "go on":
            for _ in self.loader.steps(2):
                pass
            json.dumps(self.loader.state_dict())
        return CHANGED

    def names(self, error: RaypipeError, _: Damage) -> bool:
        return "state" in str(error) or "epoch" in str(error)


class MixedStateSite(StateSite):
    """The state of a loader of a mixture."""

    weight = 2
    is_mixture = True


def write_mixture(folder: Path) -> Path:
    """Write two datasets and the file of a mixture of them, with all that such a file may say."""
    for name, lengths in (("small", (3, 2)), ("large", (4, 3))):
        write_dataset(folder / name, SynthSpec(cameras=(), lengths=lengths, extra_features=("next.done",)))
    path = folder / "mix.yaml"
    path.write_text(
        "datasets:\n"
        "  small: {root: small, rename: {next.done: done}, selection: {exclude: [1], every: 1}}\n"
        "  large: {root: large, weight: 2.5, rename: {next.done: done}, robot_type: arm}\n"
        "temperature: 2\n"
    )
    return path


class MixtureSite(Site):
    """A mixture file, as YAML or TOML."""

    weight = 5

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "mixture")
        self.folder.mkdir()
        write_mixture(self.folder)
        self._make_sound()
        self.value = yaml.safe_load((self.folder / "mix.yaml").read_text())
        toml = '[datasets.small]\nroot = "small"\n[datasets.large]\nroot = "large"\nweight = 2.5\n'
        (self.folder / "mix.toml").write_text(toml)

    def _make_sound(self) -> None:
        path = self.folder / "mix.yaml"
        for line in (", robot_type: arm", ", rename: {next.done: done}"):
            try:
                read_mixture_file(str(path))
            except RaypipeError:
                path.write_text(path.read_text().replace(line, ""))
        read_mixture_file(str(path))

    def draw(self, rng: random.Random) -> Damage:
        use = rng.choice(("read", "read", "open", "info"))
        file = rng.choice(("mix.yaml", "mix.yaml", "mix.toml"))
        content = (self.folder / file).read_bytes()
        if file == "mix.yaml" and rng.random() < 0.7:
            changed = mutate_value(self.value, rng) if rng.random() < 0.9 else rng.choice(ODD_VALUES)
            text = yaml.safe_dump(changed) if rng.random() < 0.5 else json.dumps(changed)
            return Damage(file, text.encode("utf-8", "surrogatepass"), use)
        if rng.random() < 0.15:
            return Damage(file, rng.choice(_ODD_YAML), use)
        return Damage(file, mutate_bytes(content, rng), use)

    def use(self, damage: Damage) -> str:
        path = str(self.folder / damage.file)
        if damage.use == "read":
            read_mixture_file(path)
        elif damage.use == "info":
            json.dumps(describe_mixture(path).to_json())
        else:
            Mixture(path).index()
        return CHANGED


_ODD_YAML: Final = (
    *(
        b"",
        b"---",
        b"--- a\n--- b\n",
        b"a: &a [*a]",
        b"&a [*a]",
        b"? [a]\n: b\n",
        b"? {a: b}\n: c\n",
        b"!!python/none x",
    ),
    *(b"datasets: !!set {a, b}", b"datasets: !!binary aGk=", b"datasets: 2020-01-01", b"datasets: 2020-13-99"),
    *(b"datasets: !!float x", b"datasets: !!int x", b"datasets: !!timestamp x", b"datasets: !!bool x", b"? \n? \n"),
    *(b"[" * 3000, b"{" * 3000, b"- " * 3000, b"a: " * 50, b"&a a: *a", b"<<: 1", b"<<: [1]", b"{<<: {a: b}}"),
    *(b"datasets: 0x", b"datasets: 0o9", b"datasets: 1:99:99", b"datasets: 0b", b"1: 2", b"null: 1", b"[1]: 2"),
    *(
        b"datasets: !!omap [a]",
        b"datasets: !!pairs [a]",
        b"%YAML 9.9\n---\na",
        b"%TAG ! !\n--- !x",
        b"\x00",
        b"\xff\xfe",
    ),
    *(b"datasets: {small: &a {root: small, selection: *a}}", b"datasets: &a {a: *a}", b"datasets: 9" + b"9" * 5000),
)


class StatsSite(Site):
    """Statistics and a normaliser, as JSON files."""

    weight = 4

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "stats")
        root = write_dataset(folder / "dataset", SynthSpec(cameras=(), lengths=LENGTHS))
        self.folder.mkdir()
        stats = single_stats(open_dataset(str(root)).stats)
        stats.save(self.folder / "stats.json")
        Normaliser(stats).save(self.folder / "normaliser.json")

    def draw(self, rng: random.Random) -> Damage:
        file = rng.choice(("stats.json", "normaliser.json"))
        return Damage(file, mutate_json((self.folder / file).read_bytes(), rng), "load")

    def use(self, damage: Damage) -> str:
        kind: Any = MixtureStats if damage.file == "stats.json" else Normaliser
        repr(kind.load(self.folder / damage.file))
        return CHANGED
