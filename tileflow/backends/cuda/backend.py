"""The stages of one forward as kernel launches on one rank's GPU.

Order on the device, the reason why nothing here can hang:

* the producer is enqueued on the caller's stream before the consumer, and waits for nobody;
* the consumer's stream waits for an event recorded just before the producer, so it holds no SM
  through earlier stages, and spins only for its own rank's producer;
* peers are waited for by one warp, enqueued behind the own producer;
* the caller's stream joins the consumer's before the stage ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np

from ...buffers import Workspace, view
from ...config import ITEMSIZE, Config, Environment, MoEShape
from ...errors import ConfigError, InputError, ProtocolTimeout
from ...partition import split
from ...protocol import (
    ABORT_WORD,
    ERROR_RECORD,
    ControlLayout,
    SignalLayout,
    WaitKind,
    timeout_from_record,
)
from ..base import Backend, ExpertWeights, Forward
from .launcher import Launcher
from .peers import PeerTables
from .tables import TableUploader

__all__ = ["CudaBackend"]

ENQUEUE_S = 1.5e-3  # longer than any stage takes to enqueue


class CudaBackend(Backend):
    """Stages on one GPU.

    Attributes:
        num_sms: SMs that this rank sees (fewer than the GPU has under an MPS share).
    """

    name = "cuda"

    def __init__(self, world: Any):
        super().__init__(world)
        self.num_sms = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
        self._consumer_stream = cupy.cuda.Stream(non_blocking=True)
        self._before_producer = cupy.cuda.Event(disable_timing=True)
        self._consumer_done = cupy.cuda.Event(disable_timing=True)
        self._tables = TableUploader()
        self._peers = PeerTables(self.workspace, world)
        self._record = self._pinned_record()
        self._launch = Launcher(cupy.cuda.Device().compute_capability, self.num_sms)

    def _pinned_record(self) -> np.ndarray:
        memory = cupy.cuda.alloc_pinned_memory(ERROR_RECORD.itemsize)
        record = np.frombuffer(memory, ERROR_RECORD, count=1)
        record[:] = 0
        return record

    # -- arrays ----------------------------------------------------------------------------------

    def _make_workspace(self) -> Workspace:
        return Workspace(self.world, lambda nbytes: cupy.zeros(nbytes, cupy.uint8))

    def asarray(self, name: str, array: Any) -> Any:
        if isinstance(array, cupy.ndarray):
            return self._on_this_device(name, array)
        try:
            if hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray):
                return self._on_this_device(name, cupy.from_dlpack(array))
            if hasattr(array, "__cuda_array_interface__"):
                return self._on_this_device(name, cupy.asarray(array))
        except (BufferError, TypeError, ValueError, RuntimeError) as error:
            raise InputError(name, type(array).__name__, f"a GPU array ({error})") from error
        allowed = "a GPU array: CuPy, DLPack or __cuda_array_interface__"
        raise InputError(name, type(array).__name__, allowed)

    def _on_this_device(self, name: str, array: Any) -> Any:
        here = cupy.cuda.Device().id
        if array.device.id != here:
            raise InputError(f"{name}.device", array.device.id, f"device {here} of this rank")
        return array

    def dtype_name(self, array: Any) -> str:
        return str(array.dtype)

    def to_host(self, array: Any) -> np.ndarray:
        return cupy.asnumpy(array)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return cupy.empty(shape, _numpy_dtype(dtype))

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
        return "sm" if config.put_path == "auto" else config.put_path

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

    def _sharing_ranks(self) -> int:
        # The virtual ranks of a loopback take turns: one at a time has kernels resident.
        return 1 if self.world.name == "loopback" else len(self.world.device_ranks())

    # -- stages ----------------------------------------------------------------------------------

    def dispatch(self, forward: Forward) -> None:
        self._upload(forward)
        tokens, signals = forward.x.shape[0], self._signal_layout(forward)
        if tokens:
            ids = forward.topk_ids.astype(np.int32, copy=False)
            forward.state["ids"] = ids  # alive until the kernel has read it
            self._launch.dispatch(
                forward.stream,
                x=forward.x.data.ptr,
                topk_ids=ids.data.ptr,
                send_row=forward.state["tables"]["send_row"],
                dispatch_delta=forward.state["tables"]["dispatch_delta"],
                peer_recv=self._peers.recv,
                row_bytes=ITEMSIZE * forward.shape.hidden,
                tokens=tokens,
                top_k=forward.shape.top_k,
                experts_local=forward.plan.config.experts_per_rank,
            )
        if self.world.size > 1:
            muted = forward.faults.mute_dispatch
            self._launch.post_signals(
                forward.stream,
                peer_signals=self._peers.signals,
                abort=self._abort,
                post_epoch=_posted(forward.epoch, muted),
                word=signals.dispatched + self.world.rank,
                rank=self.world.rank,
                ranks=self.world.size,
            )

    def wait_dispatch(self, forward: Forward) -> None:
        word = self._signal_layout(forward).dispatched
        self._wait(forward, WaitKind.DISPATCH, word, expected_rows=0)

    def gemm1(self, forward: Forward) -> None:
        shape, plan = forward.shape, forward.plan
        if not plan.num_bands:
            return
        self._zero_control(forward)
        rows, local = plan.config.max_layout_rows, self.workspace.local
        self._launch.producer(
            forward,
            sms=self.num_sms,
            a=self._recv_pointer(),
            b=forward.weights.gate_up.data.ptr,
            staging=local["gate_up"].data.ptr,
            local=local["gate_up"].data.ptr,
            a_rows=rows,
            local_rows=rows,
            n=2 * shape.ffn,
            k=shape.hidden,
            control=self._control(forward),
            flags=False,
            all_to_staging=True,
        )
        self._launch.swiglu(
            forward.stream,
            shape.dtype,
            gate_up=local["gate_up"].data.ptr,
            out=local["activated"].data.ptr,
            rows=int(plan.recv_rows[self.world.rank]),
            ffn=shape.ffn,
        )

    def produce_and_send(self, forward: Forward) -> None:
        if "tables" not in forward.state:
            self._upload(forward)
        if forward.mode == "send":
            self._zero_send_counters(forward)
            self._send(forward, self.num_sms, forward.stream)
            return
        self._zero_control(forward)
        if forward.mode == "overlap" and self.put_path(forward.config) != "serial":
            self._overlap(forward)
            return
        self._produce(forward, self.num_sms)
        if forward.mode != "gemm":
            self._send(forward, self.num_sms, forward.stream)

    def _overlap(self, forward: Forward) -> None:
        if not forward.plan.num_segments:
            self._produce(forward, self.num_sms)
            self._send(forward, 1, forward.stream)
            return
        share = self.partition(forward)
        self._before_producer.record(forward.stream)
        self._produce(forward, share.producer)
        self._consumer_stream.wait_event(self._before_producer)
        self._send(forward, share.consumer, self._consumer_stream)
        self._consumer_done.record(self._consumer_stream)
        forward.stream.wait_event(self._consumer_done)

    def partition(self, forward: Forward) -> Any:
        """Return the SM partition of an overlapped forward."""
        plan, shape = forward.plan, forward.shape
        flops = 2.0 * plan.computed_rows * plan.config.num_cols * shape.ffn
        remote = 2.0 * plan.remote_rows * plan.config.num_cols
        asked = forward.config.consumer_sms
        link = self.world.link
        return split(self.num_sms, self._sharing_ranks(), asked, flops, remote, link)

    def _produce(self, forward: Forward, sms: int) -> None:
        if not forward.plan.num_bands:
            return
        activated, local = forward.activated, self.workspace.local
        shape, columns = forward.shape, forward.plan.config.num_cols
        operator = activated is not None
        self._launch.producer(
            forward,
            sms=sms,
            a=activated.data.ptr if operator else local["activated"].data.ptr,
            b=forward.weights.down.data.ptr,
            staging=local["staging"].data.ptr,
            local=self._returned_pointer(forward),
            a_rows=activated.shape[0] if operator else forward.plan.config.max_layout_rows,
            local_rows=shape.max_tokens * shape.top_k,
            n=columns,
            k=shape.ffn,
            control=self._control(forward),
            flags=True,
            all_to_staging=False,
        )

    def _send(self, forward: Forward, sms: int, stream: Any) -> None:
        if self.world.size == 1:
            return
        plan, tables, signals = forward.plan, forward.state["tables"], self._signal_layout(forward)
        control, layout = self._control(forward), self._control_layout(forward)
        row_bytes = ITEMSIZE * plan.config.num_cols
        self._launch.consumer(
            stream,
            sms=sms,
            mean_segment_bytes=row_bytes * plan.remote_rows // max(1, plan.num_segments),
            **self._site(forward),
            segments=tables["segments"],
            bands=tables["bands"],
            band_flags=control + 4 * layout.band_counters,
            ticket=control + 4 * layout.consumer_ticket,
            run_counters=control + 4 * layout.run_counters,
            owner_counters=control + 4 * layout.owner_counters,
            staging=self.workspace.local["staging"].data.ptr,
            peer_returned=self._peers.returned[forward.slot],
            owner_segments=tables["owner_segments"],
            row_bytes=row_bytes,
            post_epoch=_posted(forward.epoch, forward.faults.mute_done),
            num_segments=plan.num_segments,
            done_word=signals.done + self.world.rank,
            arrived_word=signals.arrived,
        )

    def wait_return(self, forward: Forward) -> None:
        word, expected = self._signal_layout(forward).done, forward.state["tables"]["expected_rows"]
        self._wait(forward, WaitKind.RETURN, word, expected_rows=expected)

    def combine(self, forward: Forward) -> None:
        tokens = forward.out.shape[0]
        if not tokens:
            return
        first, last = forward.plan.local_range
        offset = self.workspace.slot_offset(forward.slot)
        assert self.workspace.returned is not None
        self._launch.combine(
            forward.stream,
            forward.shape.dtype,
            returned_remote=self.workspace.returned.landing.data.ptr + offset,
            returned_local=self.workspace.returned.local.data.ptr + offset,
            send_row=forward.state["tables"]["send_row"],
            weights=forward.topk_weights.data.ptr,
            y=forward.out.data.ptr,
            **self._site(forward),
            n=forward.plan.config.num_cols,
            tokens=tokens,
            top_k=forward.shape.top_k,
            local_first=first,
            local_last=last,
        )

    def returned(self, forward: Forward) -> Any:
        buffer, columns = self.workspace.returned, forward.plan.config.num_cols
        assert buffer is not None
        size = (forward.plan.sent_rows, columns)
        offset, dtype = self.workspace.slot_offset(forward.slot), _numpy_dtype(forward.shape.dtype)
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
        assert self.workspace.signals is not None
        self._launch.wait_signals(
            forward.stream,
            **self._site(forward),
            signals=self.workspace.signals.local.data.ptr,
            expected_rows=expected_rows,
            epoch=forward.epoch,
            word=word,
            arrived_word=self._signal_layout(forward).arrived,
            experts_local=forward.plan.config.experts_per_rank,
            kind=int(kind),
        )

    def _site(self, forward: Forward) -> dict[str, int]:
        return {
            "abort": self._abort,
            "record": self._record.ctypes.data,
            "peer_signals": self._peers.signals,
            "timeout_ns": int(forward.timeout_s * 1e9),
            "rank": self.world.rank,
            "ranks": self.world.size,
        }

    @property
    def _abort(self) -> int:
        assert self.workspace.signals is not None
        return int(self.workspace.signals.local.data.ptr) + 8 * ABORT_WORD

    def _signal_layout(self, forward: Forward) -> SignalLayout:
        return SignalLayout(self.world.size, forward.shape.num_experts)

    def _control_layout(self, forward: Forward) -> ControlLayout:
        config = forward.plan.config
        return ControlLayout(config.ranks, config.experts_per_rank, config.max_bands)

    def _control(self, forward: Forward) -> int:
        return int(self.workspace.local["control"].data.ptr)

    def _zero_control(self, forward: Forward) -> None:
        layout = self._control_layout(forward)
        nbytes = 4 * (layout.band_counters + forward.plan.num_bands)
        self.workspace.local["control"][:nbytes].data.memset_async(0, nbytes, forward.stream)

    def _zero_send_counters(self, forward: Forward) -> None:
        """Zero what the consumer counts; the bands stay full from the GEMM before."""
        layout = self._control_layout(forward)
        first, last = 4 * layout.consumer_ticket, 4 * layout.band_counters
        region = self.workspace.local["control"][first:last]
        region.data.memset_async(0, last - first, forward.stream)

    def _recv_pointer(self) -> int:
        assert self.workspace.recv is not None
        return int(self.workspace.recv.local.data.ptr)

    def _returned_pointer(self, forward: Forward) -> int:
        assert self.workspace.returned is not None
        offset = self.workspace.slot_offset(forward.slot)
        return int(self.workspace.returned.local.data.ptr) + offset

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
        return timeout_from_record(self._record)

    def abort(self) -> None:
        self._peers.set_abort(1 + self.world.rank)

    def drain(self) -> None:
        cupy.cuda.runtime.deviceSynchronize()
        self._note_abort()

    def _note_abort(self) -> None:
        """Put another rank's failure on record where no wait of this rank has met it."""
        if self.workspace.signals is None or self._record["state"][0]:
            return
        word = int(self.workspace.signals.local[: 8 * (ABORT_WORD + 1)].view(np.uint64)[ABORT_WORD])
        if word:
            rank = self.world.rank
            self._record[0] = (2, WaitKind.ABORTED, rank, word - 1, -1, 0, word, 0)

    def reset_words(self, epoch: int) -> None:
        if self.workspace.signals is not None:
            words = self.workspace.signals.local.view(cupy.uint64)
            words[:] = cupy.uint64(epoch)
            words[ABORT_WORD] = 0
        cupy.cuda.runtime.deviceSynchronize()
        self._record[:] = 0


def _posted(epoch: int, muted: bool) -> int:
    """Return what signals are set to: the epoch, or the one before it from a muted rank."""
    return (epoch - muted) & ((1 << 64) - 1)


def _numpy_dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)
