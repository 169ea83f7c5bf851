"""The command ``raypipe show``: finds what the user means, writes it to a file, and reports it in one line."""

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raypipe.dataset import Dataset
from raypipe.errors import ConfigError, suggest
from raypipe.mixture import Mixture, open_dataset
from raypipe.storage import take_login
from raypipe.views.card import view_dataset
from raypipe.views.episode import EpisodeView, view_episode
from raypipe.views.mixture import view_mixture
from raypipe.views.rerun_log import open_viewer, save_recording
from raypipe.views.view import View

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
    from raypipe.views.browse import Site, serve

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
