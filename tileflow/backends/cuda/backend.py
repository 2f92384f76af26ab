"""The stages of one forward as kernel launches on one rank's GPU.

Nothing here can hang: the producer waits for nobody, the consumer only for its own rank's producer
(enqueued before it), and peers are waited for by one warp behind the own producer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np

from ...buffers import Workspace, view
from ...config import ITEMSIZE, Config, Environment, MoEShape
from ...errors import ConfigError, ProtocolTimeout
from ...partition import Partition, split
from ...protocol import WaitKind
from ..base import Backend, ExpertWeights, Forward
from .arrays import as_device_array, numpy_dtype
from .launcher import Launcher
from .put import DEFAULT, PUT_PATHS
from .tables import TableUploader
from .words import Words, control_layout, posted_epoch, signal_layout

__all__ = ["CudaBackend"]

ENQUEUE_S = 1.5e-3  # longer than any stage takes to enqueue


class CudaBackend(Backend):
    """Stages on one GPU.

    Attributes:
        num_sms: SMs that this rank sees (fewer than the GPU has under an MPS share).
        put: put path name -> the object that runs it.
    """

    name = "cuda"

    def __init__(self, world: Any):
        super().__init__(world)
        device = cupy.cuda.Device()
        self.num_sms = int(device.attributes["MultiProcessorCount"])
        self.put = {name: path() for name, path in PUT_PATHS.items()}
        self._words = Words(self.workspace, world)
        self._tables = TableUploader()
        self._launch = Launcher(device.compute_capability, self.num_sms)

    # -- arrays ----------------------------------------------------------------------------------

    def _make_workspace(self) -> Workspace:
        return Workspace(self.world, lambda nbytes: cupy.zeros(nbytes, cupy.uint8))

    def asarray(self, name: str, array: Any) -> Any:
        return as_device_array(name, array)

    def dtype_name(self, array: Any) -> str:
        return str(array.dtype)

    def to_host(self, array: Any) -> np.ndarray:
        return cupy.asnumpy(array)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return cupy.empty(shape, numpy_dtype(dtype))

    def load_weights(self, shape: MoEShape, gate_up: Any, down: Any) -> ExpertWeights:
        return ExpertWeights(gate_up, down)

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[Any]:
        with cupy.cuda.Device(cupy.cuda.Device().id):
            if stream is None:
                yield cupy.cuda.get_current_stream()
                return
            if isinstance(stream, int):
                stream = cupy.cuda.ExternalStream(stream)
            with stream:
                yield stream

    # -- what plan and layer need to know --------------------------------------------------------

    def arrivals_per_tile(self, shape: MoEShape, config: Config) -> int:
        return self._launch.arrivals_per_tile(shape.dtype, config)

    def put_path(self, config: Config) -> str:
        return DEFAULT if config.put_path == "auto" else config.put_path

    def check_config(self, config: Config) -> None:
        self._launch.check(config)
        split(self.num_sms, self._sharing_ranks(), config.consumer_sms, 1.0, 1.0)
        if Environment.read().launch_blocking and config.put_path != "serial":
            raise ConfigError(
                "CUDA_LAUNCH_BLOCKING",
                1,
                "unset with put paths other than serial: it would start the consumer after the "
                "producer has ended",
            )

    def partition(self, forward: Forward) -> Partition:
        """Return the SM partition of an overlapped forward."""
        plan = forward.plan
        flops = 2.0 * plan.computed_rows * plan.config.num_cols * forward.shape.ffn
        remote = float(ITEMSIZE) * plan.remote_rows * plan.config.num_cols
        sharing, link = self._sharing_ranks(), self.world.link
        return split(self.num_sms, sharing, forward.config.consumer_sms, flops, remote, link)

    def _sharing_ranks(self) -> int:
        # The virtual ranks of a loopback take turns: one at a time has kernels resident.
        return 1 if self.world.name == "loopback" else len(self.world.device_ranks())

    # -- dispatch --------------------------------------------------------------------------------

    def dispatch(self, forward: Forward) -> None:
        self._upload(forward)
        if forward.x.shape[0]:
            self._dispatch_rows(forward)
        if self.world.size > 1:
            self._launch.post_signals(
                forward.stream,
                peer_signals=self._words.peers.signals,
                abort=self._words.abort,
                post_epoch=posted_epoch(forward.epoch, forward.faults.mute_dispatch),
                word=signal_layout(forward).dispatched + self.world.rank,
                rank=self.world.rank,
                ranks=self.world.size,
            )

    def _dispatch_rows(self, forward: Forward) -> None:
        ids = forward.topk_ids.astype(np.int32, copy=False)
        forward.state["ids"] = ids  # alive until the kernel has read it
        self._launch.dispatch(
            forward.stream,
            x=forward.x.data.ptr,
            topk_ids=ids.data.ptr,
            send_row=forward.state["tables"]["send_row"],
            dispatch_delta=forward.state["tables"]["dispatch_delta"],
            peer_recv=self._words.peers.recv,
            row_bytes=ITEMSIZE * forward.shape.hidden,
            tokens=forward.x.shape[0],
            top_k=forward.shape.top_k,
            experts_local=forward.plan.config.experts_per_rank,
        )

    def wait_dispatch(self, forward: Forward) -> None:
        self._wait(forward, WaitKind.DISPATCH, signal_layout(forward).dispatched, expected_rows=0)

    # -- expert GEMMs ----------------------------------------------------------------------------

    def gemm1(self, forward: Forward) -> None:
        shape, plan = forward.shape, forward.plan
        if not plan.num_bands:
            return
        self._words.zero_control(forward)
        if self._launch.fuses_activation(forward.config):
            self._first_gemm(forward, self._local("activated"), shape.ffn, gated=True)
            return
        gate_up = self._local("staging")  # free until the last GEMM
        self._first_gemm(forward, gate_up, 2 * shape.ffn, gated=False)
        self._launch.swiglu(
            forward.stream,
            shape.dtype,
            gate_up=gate_up,
            out=self._local("activated"),
            rows=int(plan.recv_rows[self.world.rank]),
            ffn=shape.ffn,
        )

    def _first_gemm(self, forward: Forward, out: int, columns: int, *, gated: bool) -> None:
        rows = forward.plan.config.max_layout_rows
        assert self.workspace.recv is not None
        self._launch.producer(
            forward,
            sms=self.num_sms,
            a=self.workspace.recv.local.data.ptr,
            b=forward.weights.gate_up.data.ptr,
            staging=out,
            local=out,
            a_rows=rows,
            local_rows=rows,
            n=columns,
            k=forward.shape.hidden,
            control=self._words.control,
            flags=False,
            all_to_staging=True,
            gated=gated,
        )

    def produce_and_send(self, forward: Forward) -> None:
        if "tables" not in forward.state:
            self._upload(forward)
        if forward.mode == "send":
            self._words.zero_send_counters(forward)
            self._send(forward, self.num_sms, forward.stream)
            return
        self._words.zero_control(forward)
        path = self.put.get(self.put_path(forward.config))
        if forward.mode == "overlap" and path is not None and forward.plan.num_segments:
            path.overlap(forward, self.partition(forward), self._produce, self._send)
            return
        self._produce(forward, self.num_sms)
        if forward.mode != "gemm":
            self._send(forward, self.num_sms, forward.stream)

    def _produce(self, forward: Forward, sms: int) -> None:
        if not forward.plan.num_bands:
            return
        given, config = forward.activated, forward.plan.config
        self._launch.producer(
            forward,
            sms=sms,
            a=self._local("activated") if given is None else given.data.ptr,
            b=forward.weights.down.data.ptr,
            staging=self._local("staging"),
            local=self._returned_address(forward),
            a_rows=config.max_layout_rows if given is None else given.shape[0],
            local_rows=forward.shape.max_tokens * forward.shape.top_k,
            n=config.num_cols,
            k=forward.shape.ffn,
            control=self._words.control,
            flags=True,
            all_to_staging=False,
        )

    def _send(self, forward: Forward, sms: int, stream: Any) -> None:
        if self.world.size == 1:
            return
        plan, tables = forward.plan, forward.state["tables"]
        signals, layout, control = (
            signal_layout(forward),
            control_layout(forward),
            self._words.control,
        )
        row_bytes = ITEMSIZE * plan.config.num_cols
        self._launch.consumer(
            stream,
            sms=sms,
            mean_segment_bytes=row_bytes * plan.remote_rows // max(1, plan.num_segments),
            **self._words.site(forward),
            segments=tables["segments"],
            bands=tables["bands"],
            band_flags=control + 4 * layout.band_counters,
            ticket=control + 4 * layout.consumer_ticket,
            run_counters=control + 4 * layout.run_counters,
            owner_counters=control + 4 * layout.owner_counters,
            staging=self._local("staging"),
            peer_returned=self._words.peers.returned[forward.slot],
            owner_segments=tables["owner_segments"],
            row_bytes=row_bytes,
            post_epoch=posted_epoch(forward.epoch, forward.faults.mute_done),
            num_segments=plan.num_segments,
            done_word=signals.done + self.world.rank,
            arrived_word=signals.arrived,
        )

    # -- return ----------------------------------------------------------------------------------

    def wait_return(self, forward: Forward) -> None:
        expected = forward.state["tables"]["expected_rows"]
        self._wait(forward, WaitKind.RETURN, signal_layout(forward).done, expected_rows=expected)

    def combine(self, forward: Forward) -> None:
        tokens = forward.out.shape[0]
        if not tokens:
            return
        first, last = forward.plan.local_range
        self._launch.combine(
            forward.stream,
            forward.shape.dtype,
            **self._words.site(forward),
            returned_remote=self._returned_address(forward, landing=True),
            returned_local=self._returned_address(forward),
            send_row=forward.state["tables"]["send_row"],
            weights=forward.topk_weights.data.ptr,
            y=forward.out.data.ptr,
            n=forward.plan.config.num_cols,
            tokens=tokens,
            top_k=forward.shape.top_k,
            local_first=first,
            local_last=last,
        )

    def returned(self, forward: Forward) -> Any:
        buffer = self.workspace.returned
        assert buffer is not None
        size = (forward.plan.sent_rows, forward.plan.config.num_cols)
        offset, dtype = self.workspace.slot_offset(forward.slot), numpy_dtype(forward.shape.dtype)
        rows = view(buffer.landing, size, dtype, offset=offset).copy()
        first, last = forward.plan.local_range
        rows[first:last] = view(buffer.local, size, dtype, offset=offset)[first:last]
        return rows

    # -- pieces of the stages --------------------------------------------------------------------

    def _upload(self, forward: Forward) -> None:
        plan = forward.plan
        per_owner = np.zeros(self.world.size, np.int32)
        per_owner[plan.segments["owner"]] = plan.segments["owner_segments"]
        tables = {
            "bands": plan.bands,
            "schedule": plan.schedule,
            "segments": plan.segments,
            "owner_segments": per_owner,
            "expected_rows": plan.counts[self.world.rank],
        }
        if forward.send_row is not None:
            tables["send_row"] = forward.send_row
            tables["dispatch_delta"] = plan.dispatch_delta
        forward.state["tables"] = self._tables.upload(tables, forward.stream)

    def _wait(self, forward: Forward, kind: WaitKind, word: int, *, expected_rows: int) -> None:
        if self.world.size == 1:
            return
        self._launch.wait_signals(
            forward.stream,
            **self._words.site(forward),
            signals=self._words.signals,
            expected_rows=expected_rows,
            epoch=forward.epoch,
            word=word,
            arrived_word=signal_layout(forward).arrived,
            experts_local=forward.plan.config.experts_per_rank,
            kind=int(kind),
        )

    def _local(self, region: str) -> int:
        return int(self.workspace.local[region].data.ptr)

    def _returned_address(self, forward: Forward, *, landing: bool = False) -> int:
        buffer = self.workspace.returned
        assert buffer is not None
        array = buffer.landing if landing else buffer.local
        return int(array.data.ptr) + self.workspace.slot_offset(forward.slot)

    # -- life ------------------------------------------------------------------------------------

    def warmup(self, shape: MoEShape, config: Config) -> None:
        self._launch.load_all(shape.dtype, config)

    def timed(
        self, work: Callable[[], None], stream: Any = None, lead: Callable[[], None] | None = None
    ) -> float:
        stream = stream or cupy.cuda.get_current_stream()
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        # The device waits until everything is enqueued, so host time is not part of the answer.
        self.hold(stream, ENQUEUE_S)
        if lead is not None:
            lead()
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end))

    def hold(self, stream: Any, seconds: float) -> None:
        """Keep `stream` busy for a while (tests and measurements)."""
        self._launch.delay(stream, seconds)

    def failure(self) -> ProtocolTimeout | None:
        return self._words.failure()

    def abort(self) -> None:
        self._words.peers.set_abort(1 + self.world.rank)

    def drain(self) -> None:
        cupy.cuda.runtime.deviceSynchronize()
        self._words.note_abort()

    def reset_words(self, epoch: int) -> None:
        self._words.reset(epoch)
