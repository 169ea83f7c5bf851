"""Many unlike datasets as one: members with weights, one schema that fits them all, and their statistics.

The modules, from the bottom up (each may use those above it)::

    spec.py        what the user asks for, in Python or in a YAML or TOML file             MixtureSpec, MemberSpec
    members.py     each member by itself: opened, its features under the mixture's names,  Opened
                   windows at its own rate
    unify.py       finds features that fit all members, or raises one error with a table   unify
    stats.py       stats of every member under the mixture's names, and pooled             MixtureStats
    mixture.py     puts all of that together; opens a dataset or a mixture                 Mixture, open_dataset
    normaliser.py  batch -> batch: scales samples by the stats of their dataset            Normaliser

Statistics are numpy values, saved as JSON. Only the batches of a `Normaliser` are torch.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.mixture.members import NUM_THREADS, MemberNote, Opened, open_members
    from raypipe.mixture.mixture import Member, Mixture, only_members, open_dataset, with_weight
    from raypipe.mixture.normaliser import Normaliser
    from raypipe.mixture.spec import MemberSpec, MixtureSpec, is_mixture_file, read_mixture_file
    from raypipe.mixture.stats import MemberStats, MixtureStats, mixture_stats
else:
    __all__, __getattr__ = lazy_names(__name__)
