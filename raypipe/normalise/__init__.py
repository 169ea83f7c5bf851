"""Statistics of a mixture, and values normalised by them: per dataset, per robot, or over all.

::

    stats of every dataset, in its own names
      | mixture_stats     MixtureStats   in the mixture's names and widths; pooled by robot, and over all
      | Normaliser        batch -> batch each sample by the statistics of its dataset, and back again

Statistics are values: numpy, saved as JSON. Only what is given to a `Normaliser` is torch.
"""

from raypipe.normalise.mixture_stats import MemberStats, MixtureStats, mixture_stats
from raypipe.normalise.normaliser import By, Mode, Normaliser

__all__ = ["By", "MemberStats", "MixtureStats", "Mode", "Normaliser", "mixture_stats"]
