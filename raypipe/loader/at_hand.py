"""What a rank has at hand for its batches: the rows of live spans, and clips requested ahead.

Rows lie in one pool per column, so a batch takes one indexed copy per column::

    admit(arrival 5)    rows -> free places of the pool
    take_rows(batch)    pool[places of (span, row), ...]
    retire(arrival 2)   its places are free again

`BatchClips` joins the plan, which says when a frame leaves, with the store, which has it decoded by then. It requests
clips ahead of the batch being assembled, as far as memory allows. `FileFetcher` fetches their files before.
"""

import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.decode import ClipExecutor, ClipKey, ClipStore, OpenedClip
from raypipe.errors import RaypipeError
from raypipe.feed import BlockContext, SpanBlock, SpanRequest, as_objects, clip_request, shown_frames, span_request
from raypipe.plan import Batch, Ints, RankPlan, clip_bound, unclipped_frames

_FIRST_CAPACITY: Final = 1024

_SPARE_BYTES: Final = 1 << 29
"""Resident memory beyond what the C library has handed out; code and other libraries are some 300 MB of it."""

_FETCH_THREADS: Final = 8
"""Threads that request the next files; threads of the cache download the bytes. For a video cached in parts they first
read its index, one request after the other, and mostly wait. So there may be more of them than cores."""

_MOST_FETCHES: Final = 4096
"""Fetches to remember; older ones are done by then."""


def trim_memory() -> bool:
    """Return free memory of the C library's pools to the system, if it is a lot; return whether this was done.

    Decoders and frames of many sizes come and go in several threads, and glibc's pools fragment. Without this a rank
    that opens thousands of videos grows by a gigabyte or more. If the pools are being reused there is little to return,
    and taking it back would cost page faults: a tenth of the decoding time.
    """
    library = ctypes.CDLL(None)
    is_much = hasattr(library, "malloc_trim") and spare_bytes(library) > _SPARE_BYTES
    if is_much:
        library.malloc_trim(0)
    return is_much


def spare_bytes(library: ctypes.CDLL) -> int:
    """Return the resident bytes beyond what the C library has handed out; a large number if it cannot tell."""
    if not hasattr(library, "mallinfo2"):
        return sys.maxsize
    library.mallinfo2.restype = _Mallinfo2
    info = library.mallinfo2()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident - int(info.uordblks) - int(info.hblkhd)


_MALLINFO_FIELDS: Final = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``, since 2.33."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO_FIELDS]


class RowPool:
    """Rows of spans in one array per column; it reuses free places."""

    def __init__(self) -> None:
        self._columns: dict[str, NDArray[Any]] = {}
        self._free = np.arange(_FIRST_CAPACITY)[::-1]
        self._num_free = _FIRST_CAPACITY

    def add(self, columns: Mapping[str, Any], num_rows: int) -> Ints:
        """Return the place of each row, after copying the rows in."""
        if num_rows > self._num_free:
            self._grow(num_rows)
        self._num_free -= num_rows
        places = self._free[self._num_free : self._num_free + num_rows].copy()
        for name, values in columns.items():
            if name not in self._columns:
                shape, dtype = ((), object) if isinstance(values, list) else (values.shape[1:], values.dtype)
                self._columns[name] = np.empty((len(self._free), *shape), dtype=dtype)
            self._columns[name][places] = as_objects(values) if isinstance(values, list) else values
        return places

    def take(self, places: Ints) -> dict[str, NDArray[Any]]:
        """Return the rows at `places`: one indexed copy per column."""
        # For rows of several numbers `take` needs a quarter of the time of indexing.
        return {name: values.take(places, axis=0) for name, values in self._columns.items()}

    def free(self, places: Ints) -> None:
        """Allow later rows to overwrite those at `places`."""
        self._free[self._num_free : self._num_free + len(places)] = places
        self._num_free += len(places)

    @property
    def num_bytes(self) -> int:
        """Memory of the pool."""
        # A list, because another thread may read this while rows are added.
        return sum(values.nbytes for values in list(self._columns.values()))

    def _grow(self, num_rows: int) -> None:
        old = len(self._free)
        new = max(2 * old, old + num_rows)
        free = np.empty(new, dtype=np.int64)
        free[: self._num_free] = self._free[: self._num_free]
        free[self._num_free : self._num_free + new - old] = np.arange(old, new)[::-1]
        self._free, self._num_free = free, self._num_free + new - old
        for name, values in self._columns.items():
            grown = np.empty((new, *values.shape[1:]), dtype=values.dtype)
            grown[:old] = values
            self._columns[name] = grown


class LiveRows:
    """The rows of the spans at hand on a rank. Not thread-safe."""

    def __init__(self) -> None:
        self._rows = RowPool()
        self._places: dict[int, Ints] = {}
        self._images: dict[int, Mapping[str, Mapping[int, Any]]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, arrival: int) -> bool:
        return arrival in self._places

    @property
    def num_bytes(self) -> int:
        """Memory of the rows in bytes, without stored images."""
        return self._rows.num_bytes

    def admit(self, arrival: int, block: SpanBlock) -> None:
        """Add a span."""
        self._places[arrival] = self._rows.add(block.columns, block.num_rows)
        if block.stored_images:
            self._images[arrival] = block.stored_images

    def retire(self, arrivals: Iterable[int]) -> None:
        """Release spans. Ignores those never admitted, because no batch needed them."""
        for arrival in arrivals:
            if arrival in self._places:
                self._rows.free(self._places.pop(arrival))
                self._images.pop(arrival, None)

    def clear(self) -> None:
        """Release all spans."""
        self._rows, self._places, self._images = RowPool(), {}, {}

    def take_rows(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Return the row columns of a batch."""
        pairs = zip(batch.span.tolist(), batch.row.tolist(), strict=True)
        places = np.fromiter((self._places[span][row] for span, row in pairs), dtype=np.int64, count=len(batch.row))
        return self._rows.take(places)

    def stored_images(self, arrival: int) -> Mapping[str, Mapping[int, Any]]:
        """Return, by camera and frame, the images that the rows of a span store."""
        return self._images.get(arrival, {})


class BatchClips:
    """Requests and releases the clips of one rank's batches. For the assembling thread."""

    def __init__(
        self,
        context: BlockContext,
        plan: RankPlan,
        rows: LiveRows,
        bad: Container[int],
        executor: ClipExecutor,
        most_bytes: int,
    ) -> None:
        """Request nothing yet. Clips of spans whose arrival numbers are in `bad` are not decoded."""
        self.is_decoding = bool(context.batch_schema.cameras)
        batch_bytes = plan.steps.per_lane * len(plan.lanes) * sum(blank.nbytes for blank in context.blanks.values())
        self.store = ClipStore(self._open, executor, clip_bound(most_bytes, batch_bytes), context.frame_pool)
        self._context = context
        self._plan = plan
        self._rows = rows
        self._bad = bad
        self._requests: dict[int, SpanRequest] = {}
        self._sizes = self._clip_sizes(most_bytes)[plan.queue.dataset]

    def _clip_sizes(self, most_bytes: int) -> Ints:
        """Return, by dataset, how many frames are decoded together."""
        plan, num_datasets = self._plan, len(self._context.datasets)
        if plan.keys.clip_frames:
            return np.array(plan.keys.clip_frames, dtype=np.int64)
        live_frames = sum(part.lane.peak_live_frames() for part in plan.lanes)
        return np.full(num_datasets, unclipped_frames(plan.keys, live_frames * self._context.pixel_bytes, most_bytes))

    def keys(self, batch: Batch) -> list[ClipKey]:
        """Return the clip of every sample of a batch."""
        return list(zip(batch.span.tolist(), (batch.frame // self._sizes[batch.span]).tolist(), strict=True))

    def frames_of(self, key: ClipKey) -> tuple[int, int]:
        """Return the range ``start, stop`` of the episode's frames that a clip spans."""
        size, request = int(self._sizes[key[0]]), self.request(key[0])
        _, _, length = self._context.find_episode(request)
        return key[1] * size, min((key[1] + 1) * size, length)

    def leave(self, batch: Batch, keys: list[ClipKey]) -> None:
        """Release the frames that a batch shows. A repeat releases nothing: its frames were counted before."""
        samples = zip(keys, batch.frame.tolist(), batch.is_repeat.tolist(), strict=True)
        self.store.leave((key, frame) for key, frame, is_repeat in samples if not is_repeat)

    def retire(self, arrivals: list[int]) -> None:
        """Release what is left of these spans."""
        self.store.drop_spans(arrivals)
        for arrival in arrivals:
            self._requests.pop(arrival, None)

    def ahead(self, batches: Iterator[Batch], num_ahead: int) -> Iterator[Batch]:
        """Yield batches one by one, each after requesting its clips and those of up to `num_ahead` later batches."""
        coming: deque[Batch] = deque()
        num_asked = 0
        while True:
            while len(coming) <= num_ahead and (batch := next(batches, None)) is not None:
                coming.append(batch)
            if not coming:
                return
            while num_asked < len(coming) and self.ask(coming[num_asked], is_next=False):
                num_asked += 1
            yield coming.popleft()
            num_asked = max(0, num_asked - 1)

    def ask(self, batch: Batch, *, is_next: bool) -> bool:
        """Request the clips of a batch; return whether all are requested.

        No batch comes before the next one: its rows are at hand, and its clips may take any memory.
        """
        keys = self.wanted(batch)
        if self._context.has_images and any(key[0] not in self._rows for key in keys):
            # Images come with the rows.
            return False
        return self.store.ask(keys, is_next=is_next)

    def wanted(self, batch: Batch) -> list[ClipKey]:
        """Return the clips to decode for a batch."""
        return [key for key in self.keys(batch) if key[0] not in self._bad] if self.is_decoding else []

    def request(self, arrival: int) -> SpanRequest:
        """Return the span of an arrival number."""
        if arrival not in self._requests:
            self._requests[arrival] = span_request(self._plan, arrival)
        return self._requests[arrival]

    def _open(self, key: ClipKey) -> OpenedClip:
        arrival, clip = key
        request, size = self.request(arrival), int(self._sizes[arrival])
        begin, end = clip * size, (clip + 1) * size
        if request.frames:
            anchors = request.anchors
            anchors = anchors[np.searchsorted(anchors, begin) : np.searchsorted(anchors, end)]
        else:
            anchors = np.arange(max(begin, request.start), min(end, request.stop))
        dataset, cameras = self._context.datasets[request.dataset], self._context.member_of(request).cameras
        has_windows = any(dataset.window.offsets.get(own, (0,)) != (0,) for own in cameras.values())
        images, span, requests = self._rows.stored_images(arrival), (request.start, request.stop), {}
        for camera, own in cameras.items():
            frames = shown_frames(self._context, request, own, anchors, size)
            requests[camera] = clip_request(self._context, request, camera, frames, span, images)
        # The tail may repeat a frame that has already left, so frames stay as long as their clip does.
        return OpenedClip(requests, len(anchors), has_windows or self._plan.steps.num_repeats > 0)


class FileFetcher:
    """Starts to fetch the remote files of the next spans that this process reads: the plan names them long before."""

    def __init__(self, context: BlockContext, plan: RankPlan) -> None:
        self.fetches_rows = False
        """Whether this process also reads the rows."""
        self._fetches_videos = context.decode.where != "cluster"
        self._context = context
        self._plan = plan
        self._pool = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="raypipe-ahead")
        self._fetches: deque[Future[bool]] = deque(maxlen=_MOST_FETCHES)
        """Fetches ahead, some perhaps not begun."""

    def look_ahead(self, arrivals: range) -> None:
        """Start to fetch the files of the spans with these arrival numbers."""
        for arrival in arrivals if self.fetches_rows or self._fetches_videos else ():
            storage = self._context.datasets[int(self._plan.queue.dataset[arrival])].meta.storage
            if storage.cache is not None and storage.cache.prefetch and not storage.is_local:
                # In a thread, because finding which bytes a span needs may take a look at its video.
                self._pool.submit(self._fetch, span_request(self._plan, arrival))

    def close(self) -> None:
        """Start no more fetches; let those that have begun finish."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for fetch in self._fetches.copy():
            fetch.cancel()

    def _fetch(self, request: SpanRequest) -> None:
        dataset, row, _ = self._context.find_episode(request)
        fetches: list[Callable[[], Future[bool] | None]] = []
        if self.fetches_rows:
            fetches.append(partial(dataset.meta.storage.prefetch, dataset.meta.data_file(row)))
        for own in self._context.member_of(request).cameras.values() if self._fetches_videos else ():
            if not self._context.stores_images(request.dataset, own):
                frames = shown_frames(self._context, request, own)
                fetches.append(partial(self._context.decoders[request.dataset].prefetch, row, own, frames))
        for fetch in fetches:
            # Ignore errors: the code that reads or decodes the span meets and reports them.
            with suppress(RaypipeError, OSError, NotImplementedError):
                begun = fetch()
                if begun is not None and not begun.done():
                    self._fetches.append(begun)
