"""Finds the view for anything: `show` in a notebook, and the command ``raypipe show``."""

import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from raypipe.dataset import Dataset
from raypipe.errors import ConfigError, suggest
from raypipe.mixture import Mixture, open_dataset
from raypipe.plan import WorldPlan
from raypipe.storage import take_login
from raypipe.views.batch import view_batch
from raypipe.views.card import view_dataset
from raypipe.views.episode import EpisodeView, open_viewer, save_recording, view_episode
from raypipe.views.mixture import view_mixture
from raypipe.views.plan import view_pipeline, view_world
from raypipe.views.run import Recording, view_run
from raypipe.views.view import View


def show(thing: Any, **options: Any) -> View:
    """Return a view of `thing`: at the end of a notebook cell it shows itself; ``.save(path)`` writes it to a file.

    ::

        rp.show(ds)                  a card: episodes, cameras, tasks, ranges, what is odd
        rp.show(ds, episode=3)       one episode, playable
        rp.show(mixture)             its members, and what an epoch takes of each
        rp.show(pipe)                the plan of an epoch; world_size=8, epoch=1
        rp.show(batch)               pictures and actions of a batch; num_samples=16
        rp.show(loader)              its speed, and what it waits for; over time: views.record

    Args:
        thing: a dataset, a mixture, the root of either, a batch, a `Pipeline`, a plan, a loader or its recording.
        options: passed to the function in `raypipe.views` that makes the view.
    """
    if isinstance(thing, View):
        return thing
    if isinstance(thing, str | Path):
        opened = open_dataset(str(thing))
        if isinstance(opened, Mixture):
            options = {"name": str(thing), **options}
        thing = opened
    makers: dict[type, Callable[..., View]] = {
        Dataset: _view_one_episode if "episode" in options else view_dataset,
        Mixture: view_mixture,
        Recording: Recording.view,
        WorldPlan: view_world,
        Mapping: view_batch,
    }
    for kind, make in makers.items():
        if isinstance(thing, kind):
            return _made(make, thing, options)
    return _show_run(thing, options)


def _made(make: Callable[..., View], thing: Any, options: Mapping[str, Any]) -> View:
    known = list(signature(make).parameters)[1:]
    for name in options:
        if name not in known:
            raise ConfigError(f"show has no option {name!r} for a {type(thing).__name__}{suggest(name, known)}")
    return make(thing, **options)


def _view_one_episode(dataset: Dataset, episode: int, num_frames: int = 8) -> View:
    return view_episode(dataset, episode, num_frames=num_frames)


def _show_run(thing: Any, options: Mapping[str, Any]) -> View:
    """Return the view of a pipeline or a loader; import their classes only here, because they load torch and Ray."""
    from raypipe.loader import RankLoader
    from raypipe.pipeline import Pipeline

    if isinstance(thing, Pipeline):
        return _made(view_pipeline, thing, options)
    if isinstance(thing, RankLoader):
        return _made(view_run, thing, options)
    raise ConfigError(
        f"nothing to show of a {type(thing).__name__}: give a dataset, a mixture, the root of one, a batch, a "
        f"Pipeline, a plan, a loader, or a recording of one"
    )


WHOLE = -1
"""Instead of an episode's number: the whole dataset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowRequest:
    """What to show, and where to write it."""

    root: str
    """The root of a dataset, or a mixture file."""
    member: str = ""
    """The name of one dataset of a mixture; empty for the whole mixture."""
    episode: int = WHOLE
    out: str = ""
    """The file to write; empty for a page in a new temporary folder."""
    with_rerun: bool = False
    port: int | None = None
    """Serve a page to browse the dataset on this port until Ctrl-C; None serves no page."""

    def __post_init__(self) -> None:
        if self.episode < WHOLE:
            raise ConfigError(f"the episode must be at least 0, got {self.episode}")
        if self.port is not None and (self.out or self.with_rerun or self.episode != WHOLE):
            raise ConfigError("--serve shows the whole dataset in the browser: leave out --out, --rerun and --episode")
        if self.out:
            self._check_out()

    def _check_out(self) -> None:
        """Raise if the file cannot be written, before reading anything."""
        suffix, is_episode = Path(self.out).suffix, self.episode != WHOLE
        allowed = (".rrd",) if self.with_rerun else (".html", ".png", *((".mp4",) if is_episode else ()))
        if suffix in allowed:
            return
        hints = {
            ".mp4": "a video is of one episode, say which with --episode; ",
            ".rrd": "a recording for Rerun wants --rerun; ",
        }
        hint = "" if self.with_rerun else hints.get(suffix, "")
        raise ConfigError(f"cannot write {self.out!r}: {hint}give a file that ends in {', '.join(allowed)}")


def show_root(request: ShowRequest, tell: Callable[[str], object]) -> None:
    """Show what the request asks for, and tell in one line which file was written, or where the page is."""
    with warnings.catch_warnings():
        # The card lists what is left out.
        warnings.simplefilter("ignore", UserWarning)
        opened = _member(open_dataset(request.root), request)
    if request.port is not None:
        _serve(_single(opened, request), request.port, tell)
    elif request.with_rerun:
        tell(_show_in_rerun(opened, request))
    else:
        tell(_save(opened, request))


def _serve(dataset: Dataset, port: int, tell: Callable[[str], object]) -> None:
    from raypipe.views.server import serve
    from raypipe.views.site import Site

    with warnings.catch_warnings():
        # The page shows what is odd.
        warnings.simplefilter("ignore", UserWarning)
        serve(Site(dataset), port, lambda url: tell(f"{dataset.meta.root} is at {url} until Ctrl-C"))


def _save(opened: Dataset | Mixture, request: ShowRequest) -> str:
    view = _view(opened, request)
    path = view.save(request.out or _new_page(request))
    made = f" ({view.clip.told})" if isinstance(view, EpisodeView) and path.suffix == ".mp4" else ""
    return f"wrote {path}: {view.title}{made}"


def _member(opened: Dataset | Mixture, request: ShowRequest) -> Dataset | Mixture:
    """Return the member that the request asks for, or what was opened."""
    if not request.member:
        return opened
    if isinstance(opened, Dataset):
        raise ConfigError(f"--member {request.member!r} is of a mixture, and {request.root!r} is one dataset")
    for member in opened.members:
        if member.name == request.member:
            return member.dataset
    raise ConfigError(f"{request.root!r} has no member {request.member!r}{suggest(request.member, opened.names)}")


def _view(opened: Dataset | Mixture, request: ShowRequest) -> View:
    if request.episode != WHOLE:
        return view_episode(_single(opened, request), request.episode)
    return view_mixture(opened, request.root) if isinstance(opened, Mixture) else view_dataset(opened)


def _single(opened: Dataset | Mixture, request: ShowRequest) -> Dataset:
    if isinstance(opened, Dataset):
        return opened
    raise ConfigError(
        f"{request.root!r} is a mixture, and an episode is of one dataset: say which with --member, one of "
        f"{', '.join(map(repr, opened.names[:20]))}"
    )


def _show_in_rerun(opened: Dataset | Mixture, request: ShowRequest) -> str:
    dataset = _single(opened, request)
    # Rerun shows one episode: by default the first.
    episode = int(dataset.meta.episodes.episode_index[0]) if request.episode == WHOLE else request.episode
    if request.out:
        told = save_recording(dataset, episode, request.out).told
        return f"wrote {request.out}: {told}; open it: rerun {request.out}"
    return f"the Rerun viewer shows {open_viewer(dataset, episode).told}"


def _new_page(request: ShowRequest) -> Path:
    name = Path(take_login(request.root).rstrip("/")).stem or "dataset"
    parts = [name, request.member, f"episode-{request.episode}" if request.episode != WHOLE else ""]
    return Path(tempfile.mkdtemp(prefix="raypipe-")) / f"{'-'.join(filter(None, parts))}.html"
