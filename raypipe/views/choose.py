"""`show`: the one function that finds the view for anything."""

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from raypipe.dataset import Dataset
from raypipe.errors import ConfigError, suggest
from raypipe.mixture import Mixture, open_dataset
from raypipe.plan import WorldPlan
from raypipe.views.batch import view_batch
from raypipe.views.card import view_dataset
from raypipe.views.episode import view_episode
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
    if isinstance(thing, Recording):
        return _made(_view_recording, thing, options)
    if isinstance(thing, Dataset):
        return _made(_view_one_episode if "episode" in options else view_dataset, thing, options)
    if isinstance(thing, Mixture):
        return _made(view_mixture, thing, options)
    if isinstance(thing, WorldPlan):
        return _made(view_world, thing, options)
    if isinstance(thing, Mapping):
        return _made(view_batch, thing, options)
    return _show_run(thing, options)


def _made(make: Callable[..., View], thing: Any, options: Mapping[str, Any]) -> View:
    known = list(signature(make).parameters)[1:]
    for name in options:
        if name not in known:
            raise ConfigError(f"show has no option {name!r} for a {type(thing).__name__}{suggest(name, known)}")
    return make(thing, **options)


def _view_one_episode(dataset: Dataset, episode: int, num_frames: int = 8) -> View:
    return view_episode(dataset, episode, num_frames=num_frames)


def _view_recording(recording: Recording) -> View:
    return recording.view()


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
