"""Many unlike datasets as one: members with weights, one schema that fits them all, and their statistics.

::

    spec.py         what the user asks for                                         MixtureSpec, MemberSpec
    file.py         reads the same from a YAML or TOML file                        read_mixture_file
    members.py      opens all datasets at once and names every bad one             Opened
    offer.py        the features of each member, under the mixture's names
    unify.py        makes unlike features one, or one error with unify_table.py    Unified
    windows.py      seconds or frames at each member's own rate
    mixture.py      puts all of that together                                      Mixture
    open_any.py     opens a dataset or a mixture, by its root                      open_dataset
    stats.py        stats of every member under the mixture's names, and pooled    MixtureStats
    normaliser.py   batch -> batch: scales samples by the stats of their dataset   Normaliser
    stats_json.py   statistics as JSON, without changing a number

Statistics are numpy values, saved as JSON. Only the batches of a `Normaliser` are torch.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.mixture.file import is_mixture_file, read_mixture_file
    from raypipe.mixture.members import NUM_THREADS, MemberNote, Opened, open_members
    from raypipe.mixture.mixture import Member, Mixture, only_members, with_weight
    from raypipe.mixture.normaliser import Normaliser
    from raypipe.mixture.open_any import open_dataset
    from raypipe.mixture.spec import MemberSpec, MixtureSpec
    from raypipe.mixture.stats import MemberStats, MixtureStats, mixture_stats
else:
    __all__, __getattr__ = lazy_names(
        __name__,
        {
            "file": "is_mixture_file read_mixture_file",
            "members": "MemberNote NUM_THREADS Opened open_members",
            "mixture": "Member Mixture only_members with_weight",
            "normaliser": "Normaliser",
            "open_any": "open_dataset",
            "spec": "MemberSpec MixtureSpec",
            "stats": "MemberStats MixtureStats mixture_stats",
        },
    )
