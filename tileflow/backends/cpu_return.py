"""The last GEMM and the way home of its rows on the CPU: one producer, one consumer.

The producer walks tiles in the order of the plan and raises each band's counter when a tile is
stored. The consumer walks segments, waits until the bands of one are full, and stores its rows into
the owner's return buffer, while the producer goes on (BLAS releases the interpreter's lock). Serial
runs are the same two loops, one after the other: the same bits.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from ..buffers import view
from ..errors import ProtocolTimeout
from ..protocol import ControlLayout, WaitKind
from ..trace import now_ns
from .base import Forward
from .cpu_kernels import GroupRows, tiles

if TYPE_CHECKING:
    from .cpu import CpuBackend

__all__ = ["ReturnTrip"]


class ReturnTrip:
    """Producer and consumer of one forward on one rank."""

    def __init__(self, backend: CpuBackend, forward: Forward):
        self._backend, self._forward, self._plan = backend, forward, forward.plan
        self._rank, self._world = backend.world.rank, backend.world
        self._signals = backend.signals
        plan, config = forward.plan, forward.plan.config
        words = ControlLayout(config.ranks, config.experts_per_rank, config.max_bands)
        control = view(backend.workspace.local["control"], (words.num_words,), np.uint32)
        control[:] = 0
        self._runs = control[words.run_counters : words.owner_counters]
        self._owners = control[words.owner_counters : words.owner_counters + config.ranks]
        self._band_counters = control[words.band_counters : words.band_counters + plan.num_bands]
        rows = int(plan.recv_rows[self._rank])
        self._staging = backend.local_rows("staging", rows, config.num_cols, forward.shape.dtype)
        self._stopped = False
        self._producer_error: BaseException | None = None

    def run(self, mode: str) -> None:
        """Do what `mode` (one of MODES) says."""
        if mode == "overlap":
            self._run_overlapped()
            return
        if mode == "send":  # an earlier GEMM has left the rows in staging
            self._band_counters[:] = self._plan.bands["target"]
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                self._produce()
        if mode != "gemm":
            self._consume()

    def _run_overlapped(self) -> None:
        name = f"tileflow producer {self._rank}"
        producer = threading.Thread(target=self._produce_in_thread, name=name, daemon=True)
        producer.start()
        try:
            self._consume()
        except BaseException as error:
            self._stopped = True
            raise self._producer_error or error from None
        finally:  # bands of own rows alone may be left when all segments are sent
            producer.join()
        if self._producer_error is not None:
            raise self._producer_error

    # -- producer --------------------------------------------------------------------------------

    def _produce_in_thread(self) -> None:
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # of this thread
                self._produce()
        except BaseException as error:
            self._producer_error, self._stopped = error, True

    def _produce(self) -> None:
        forward, plan = self._forward, self._plan
        down = forward.weights.down
        inputs = GroupRows(plan, self._backend.activated_rows(forward))
        tile_m, tile_n = plan.config.tile_m, plan.config.tile_n
        product = np.empty((tile_m, tile_n), np.float32)
        for band, n_tile, position in tiles(plan):
            if self._stopped:
                return
            started = now_ns()
            columns = slice(n_tile * tile_n, min((n_tile + 1) * tile_n, plan.config.num_cols))
            weights = down.fp32(int(plan.bands["expert"][band]))[columns]
            result = product[:, : len(weights)]
            np.matmul(inputs.block(position), weights.T, out=result)
            self._store(band, columns, result)
            forward.faults.delay_tile()
            self._world.fence()  # release: the rows are stored before the counter says so
            self._band_counters[band] += 1
            self._span("producer", "tile", started, band=band, n_tile=n_tile)

    def _store(self, band: int, columns: slice, result: np.ndarray) -> None:
        """Store a tile: rows of other owners to staging, own rows to where they go home."""
        row, num_rows, remote, local_row = (
            int(self._plan.bands[name][band])
            for name in ("row", "num_rows", "num_remote", "local_row")
        )
        self._staging[row : row + remote, columns] = result[:remote]
        if num_rows > remote:
            home = self._backend.home_rows(self._forward, self._rank)
            home[local_row : local_row + num_rows - remote, columns] = result[remote:num_rows]

    # -- consumer --------------------------------------------------------------------------------

    def _consume(self) -> None:
        sends_to = set(self._plan.segments["owner"].tolist())
        for owner in range(self._world.size):
            if owner != self._rank and owner not in sends_to:
                self._post_done(owner)
        for number, segment in enumerate(self._plan.segments):
            started = now_ns()
            self._wait_bands(int(segment["band_first"]), int(segment["num_bands"]))
            owner = int(segment["owner"])
            self._span("consumer", "wait", started, segment=number, owner=owner)
            started = now_ns()
            self._forward.faults.delay_put()
            self._put(segment)
            self._span("consumer", "send", started, segment=number, owner=owner)

    def _wait_bands(self, first: int, num_bands: int) -> None:
        bands = slice(first, first + num_bands)
        counters, targets = self._band_counters[bands], self._plan.bands["target"][bands]
        self._signals.wait(
            self._forward,
            lambda: bool((counters >= targets).all()),
            lambda seconds: self._band_timeout(first, seconds),
            stopped=lambda: self._stopped,
        )

    def _band_timeout(self, first: int, seconds: float) -> ProtocolTimeout:
        targets = self._plan.bands["target"]
        late = next(b for b in range(first, len(targets)) if self._band_counters[b] < targets[b])
        return ProtocolTimeout(
            WaitKind.BAND.name.lower(),
            rank=self._rank,
            peer=self._rank,
            index=late,
            expected=int(targets[late]),
            seen=int(self._band_counters[late]),
            seconds=seconds,
        )

    def _put(self, segment: np.void) -> None:
        """Store a segment's rows at their owner, and say what is complete with it."""
        owner, rows = int(segment["owner"]), int(segment["num_rows"])
        source, target = int(segment["src_row"]), int(segment["dst_row"])
        home = self._backend.home_rows(self._forward, owner)
        home[target : target + rows] = self._staging[source : source + rows]
        self._world.fence()  # release: the rows are stored before a signal says so
        run = int(segment["run"])
        self._runs[run] += 1
        if self._runs[run] == segment["run_segments"]:
            self._signals.post(self._forward, owner, "arrived", int(segment["expert"]))
        self._owners[owner] += 1
        if self._owners[owner] == segment["owner_segments"]:
            self._post_done(owner)

    def _post_done(self, owner: int) -> None:
        self._signals.post(self._forward, owner, "done", self._rank)

    def _span(self, lane: str, name: str, started: int, **args: object) -> None:
        trace = self._backend.trace
        if trace is not None:
            trace.add(self._rank, lane, name, started, now_ns(), **args)
