"""All sites by name: the places where strangers' bytes come in."""

from typing import Final

from fuzz_datasets import MetaSite, OldMetaSite, RowsSite, VideoSite
from fuzz_pictures import Av1Site, DepthSite, HevcSite, ImageSite, Mp4Site, ReorderedSite
from fuzz_runs import AccountSite, MixedStateSite, MixtureSite, StateSite, StatsSite
from fuzz_servers import HubSite
from fuzz_site import Site

SITES: Final[dict[str, type[Site]]] = {
    "rows": RowsSite,
    "meta": MetaSite,
    "old-meta": OldMetaSite,
    "videos": VideoSite,
    "mp4": Mp4Site,
    "mp4-av1": Av1Site,
    "mp4-hevc": HevcSite,
    "mp4-reordered": ReorderedSite,
    "mp4-depth": DepthSite,
    "image": ImageSite,
    "account": AccountSite,
    "state": StateSite,
    "mixed-state": MixedStateSite,
    "mixture": MixtureSite,
    "stats": StatsSite,
    "hub": HubSite,
}
