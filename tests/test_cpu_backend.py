"""The CPU backend: arrays in, modes, timelines, planted faults that must be seen, failures."""

from __future__ import annotations

import pkgutil
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dlpack_tensors import CUDA, BfloatTensor
from hypothesis import given
from hypothesis import strategies as st
from layer_problems import assert_right, expected, poison, problem

import tileflow
from tileflow import Config, ConfigError, InputError, ProtocolTimeout, WorldBroken, reference
from tileflow.backends import cpu_kernels, cpu_return
from tileflow.faults import Faults
from tileflow.plan import PlanConfig, build_plan
from tileflow.protocol import ABORT_WORD
from tileflow.routing import make_counts
from tileflow.trace import Trace


def run(ranks: int, main: Any, timeout_s: float = 10.0) -> list[Any]:
    """Call `main` on every rank; waits are bounded by `timeout_s` from the first forward on."""

    def bounded(w: Any) -> Any:
        w.warmup_timeout_s = timeout_s
        return main(w)

    with tileflow.init("loopback", ranks=ranks, backend="cpu", timeout_s=timeout_s) as world:
        return world.run(bounded)


def with_backend(use: Any) -> Any:
    """Return ``use(backend)`` for the backend of a world of one rank."""
    case = problem(ranks=1)
    return run(1, lambda w: (case.layer(w), use(w.backend))[1])[0]


# -- arrays ----------------------------------------------------------------------------------------


def test_arrays_and_host_tensors_are_taken_without_a_copy():
    class Tensor:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    def use(backend):
        array = np.arange(6, dtype=np.float16)
        assert backend.asarray("x", array) is array
        view = backend.asarray("x", Tensor(array))
        assert np.shares_memory(view, array)

    with_backend(use)


def test_a_bfloat16_tensor_of_another_library_is_taken_without_a_copy():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.arange(24, dtype=np.float32).reshape(4, 6).astype(ml_dtypes.bfloat16)
    bits = values.view(np.uint16)

    def use(backend):
        taken = backend.asarray("x", BfloatTensor(bits))
        assert taken.dtype == ml_dtypes.bfloat16 and np.array_equal(taken, values)
        assert np.shares_memory(taken, bits) and backend.dtype_name(taken) == "bfloat16"
        turned = backend.asarray("x", BfloatTensor(bits.T))
        assert np.array_equal(turned, values.T) and not turned.flags.c_contiguous

    with_backend(use)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        ([1.0, 2.0], "list"),
        (3.0, "float"),
        (BfloatTensor(np.zeros(4, np.uint16), device=CUDA), "host memory"),
        (BfloatTensor(np.zeros(4, np.uint16), code=17), "BfloatTensor"),
    ],
    ids=["list", "scalar", "device", "dtype"],
)
def test_what_is_no_array_in_host_memory_is_refused_by_name(array, text):
    with pytest.raises(InputError, match=text) as refused:
        with_backend(lambda backend: backend.asarray("topk_weights", array))
    assert refused.value.field == "topk_weights"


@pytest.mark.parametrize("dtype", ["uint16", "V2", "float32", ">f2"])
def test_no_other_two_bytes_pass_for_a_half(dtype):
    case = problem(ranks=2)
    x, ids, shares = case.arguments(0)

    def main(w):
        with pytest.raises(InputError) as refused:
            case.layer(w)(np.zeros(x.shape, dtype), ids, shares)
        assert refused.value.field == "x.dtype"

    run(2, main)


def test_bfloat16_without_its_package_is_refused_with_the_packages_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ConfigError, match="ml_dtypes"):
        cpu_kernels.numpy_dtype("bfloat16")
    assert cpu_kernels.numpy_dtype("float16") == np.float16


def test_streams_are_refused():
    with pytest.raises(InputError, match="stream"):
        with_backend(lambda backend: backend.on_stream(object()))


# -- kernels ---------------------------------------------------------------------------------------


@given(
    ranks=st.integers(1, 4),
    e_local=st.integers(1, 4),
    rows=st.integers(0, 700),
    cols=st.sampled_from([8, 128, 136, 520]),
    group=st.integers(1, 5),
    layout=st.sampled_from(["packed", "aligned"]),
)
def test_every_tile_is_visited_once_and_groups_come_whole(
    ranks, e_local, rows, cols, group, layout
):
    counts = make_counts("power_law", rows=rows, experts_per_rank=e_local, ranks=ranks, seed=1)
    config = PlanConfig(ranks, ranks * e_local, cols, layout, 64, 128, 2, group, rows)
    plan = build_plan(counts, config, 0)
    walked = list(cpu_kernels.tiles(plan))
    bands = [(band, n_tile) for band, n_tile, _ in walked]
    want = {(band, n) for band in range(plan.num_bands) for n in range(config.tiles_n)}
    assert len(bands) == len(want) and set(bands) == want
    firsts = [int(plan.schedule["group_first"][position]) for _, _, position in walked]
    assert firsts == sorted(firsts)
    assert all(plan.schedule["band"][position] == band for band, _, position in walked)


def test_combine_skips_masked_slots_and_adds_in_the_order_of_slots():
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((40, 16)) * 100).astype(np.float16)
    rows[7] = np.nan  # no slot names it
    send_row = rng.integers(8, 40, (3000, 8)).astype(np.int32)
    weights = rng.standard_normal((3000, 8)).astype(np.float32)
    send_row[:, 1], weights[:, 1] = send_row[:, 0], -weights[:, 0]  # terms that cancel
    send_row[::3, 4], weights[::3, 4] = -1, np.nan
    send_row[5], weights[5] = -1, np.nan
    out = np.empty((3000, 16), np.float16)
    cpu_kernels.combine(rows, send_row, weights, out)
    want = np.zeros((3000, 16), np.float32)
    for token in range(3000):
        for slot in range(8):
            if send_row[token, slot] >= 0:
                row = rows[send_row[token, slot]].astype(np.float32)
                want[token] += weights[token, slot] * row
    assert out.tobytes() == want.astype(np.float16).tobytes()
    assert not out[5].any()


def test_weights_too_large_to_keep_as_fp32_give_the_same_bits(monkeypatch):
    case = problem(ranks=2, tokens=50, e_local=3)
    kept = run(2, lambda w: case.layer(w)(*case.arguments(w.rank)))
    monkeypatch.setattr(cpu_kernels, "_KEEP_BYTES", 0)
    again = run(2, lambda w: case.layer(w)(*case.arguments(w.rank)))
    assert [y.tobytes() for y in kept] == [y.tobytes() for y in again]


@pytest.mark.filterwarnings("error")
def test_results_beyond_the_dtype_become_infinite_without_a_warning():
    case = problem(ranks=2, tokens=8)
    case.gate_up *= np.float16(200)
    case.down *= np.float16(500)
    ys = run(2, lambda w: case.layer(w)(*case.arguments(w.rank)))
    assert any(np.isinf(y).any() for y in ys)


# -- modes and timelines ---------------------------------------------------------------------------


def test_a_gemm_alone_leaves_rows_that_a_send_alone_brings_home():
    case = problem(ranks=3, tokens=60, mode="power_law")
    counts = make_counts("power_law", rows=200, experts_per_rank=2, ranks=3, seed=3)
    shape = replace(case.shape, max_tokens=200)
    case.shape = shape

    def main(w):
        layer = case.layer(w)
        plan = layer.plan(counts)
        rows = np.random.default_rng(w.rank).standard_normal((plan.recv_rows[w.rank], shape.ffn))
        rows = rows.astype(np.float16)
        want = layer.operator(rows, counts, mode="serial")
        poison(w)
        weights, engine = layer._weights, layer.engine
        engine.operator(weights, rows, counts, "gemm")
        forward = engine.operator(weights, rows, counts, "send")
        got = w.backend.returned(forward)
        first, last = plan.local_range
        remote = np.r_[0:first, last : plan.sent_rows]
        assert len(remote) and got[remote].tobytes() == want[remote].tobytes()

    run(3, main)


def traced(config: Config, mode: str, faults: Faults) -> list[Trace]:
    case = problem(ranks=2, tokens=300, e_local=2, hidden_out=264)

    def main(w):
        layer = case.layer(w, config)
        layer(*case.arguments(w.rank))
        w.backend.trace, layer.engine.faults = Trace(), faults
        layer(*case.arguments(w.rank), mode=mode)
        w.backend.trace.plan = layer.engine.last_plan
        return w.backend.trace

    return run(2, main)


def spans(trace: Trace, lane: str, name: str) -> list[Any]:
    return [span for span in trace.spans if (span.lane, span.name) == (lane, name)]


def test_a_timeline_shows_sends_inside_the_gemms_window():
    for trace in traced(Config(tile_m=64, tile_n=128), "overlap", Faults(tile_delay_s=4e-3)):
        tiles = spans(trace, "producer", "tile")
        sends = spans(trace, "consumer", "send")
        assert len(tiles) == trace.plan.num_tiles and len(sends) == trace.plan.num_segments
        assert {s.args["segment"] for s in sends} == set(range(trace.plan.num_segments))
        assert min(s.start_ns for s in sends) < max(t.start_ns for t in tiles)
        stages = [span.name for span in trace.spans if span.lane == "stage"]
        assert stages == [
            "dispatch",
            "wait_dispatch",
            "gemm1",
            "produce_and_send",
            "wait_return",
            "combine",
        ]


@pytest.mark.parametrize(("path", "mode"), [("serial", "overlap"), ("auto", "serial")])
def test_serial_runs_send_after_the_last_tile(path, mode):
    for trace in traced(Config(tile_m=64, put_path=path), mode, Faults()):
        last_tile = max(span.end_ns for span in spans(trace, "producer", "tile"))
        assert min(span.start_ns for span in spans(trace, "consumer", "send")) >= last_tile


# -- planted faults: what the other tests look at must show them -----------------------------------


def poisoned_run_is_right() -> bool:
    """Run with poisoned buffers and slow tiles."""
    case = problem(ranks=3, tokens=90)

    def main(w):
        layer = case.layer(w, Config(tile_m=64, tile_n=128))
        poison(w)
        layer.engine.faults = Faults(tile_delay_s=2e-3, seed=w.rank)
        y = layer(*case.arguments(w.rank))
        want = expected(case)[w.rank]
        return reference.check_tokens(y, want.y, want.row_norms, "float16")[0]

    return all(run(3, main))


def test_the_poisoned_run_is_right_without_a_planted_fault():
    assert poisoned_run_is_right()


def test_a_tile_that_is_counted_before_it_is_stored_is_seen(monkeypatch):
    store = cpu_return.ReturnTrip._store
    late: dict[Any, Any] = {}

    def store_the_one_before(trip, *tile):
        if trip in late:
            store(trip, *late[trip])
        late[trip] = (tile[0], tile[1], tile[2].copy())

    monkeypatch.setattr(cpu_return.ReturnTrip, "_store", store_the_one_before)
    assert not poisoned_run_is_right()


def test_a_signal_that_overtakes_its_rows_is_seen(monkeypatch):
    put = cpu_return.ReturnTrip._put

    def signal_first(trip, segment):
        home = trip._backend.home_rows(trip._forward, int(segment["owner"]))
        first, last = int(segment["dst_row"]), int(segment["dst_row"] + segment["num_rows"])
        before = home[first:last].copy()
        put(trip, segment)
        rows, home[first:last] = home[first:last].copy(), before
        time.sleep(0.05)
        home[first:last] = rows

    monkeypatch.setattr(cpu_return.ReturnTrip, "_put", signal_first)
    assert not poisoned_run_is_right()


def test_a_segment_that_is_lost_ends_in_a_timeout_that_names_its_run(monkeypatch):
    case = problem(ranks=2, tokens=30)
    put = cpu_return.ReturnTrip._put

    def lose_the_first(trip, segment):
        if trip._rank == 1 and segment["owner"] == 0 and segment["expert"] == 3:
            return
        put(trip, segment)

    monkeypatch.setattr(cpu_return.ReturnTrip, "_put", lose_the_first)
    with pytest.raises(ProtocolTimeout) as failed:
        run(2, lambda w: case.layer(w)(*case.arguments(w.rank)), timeout_s=1.0)
    error = failed.value
    assert (error.what, error.rank, error.peer, error.index) == ("return", 0, 1, 3)


# -- failures --------------------------------------------------------------------------------------


def test_a_band_that_does_not_fill_in_time_is_named():
    case = problem(ranks=2, tokens=30)

    def main(w):
        layer = case.layer(w)
        layer(*case.arguments(w.rank))
        w.barrier()
        if w.rank == 1:
            w.timeout_s = 0.5
            layer.engine.faults.delay_tile = lambda: time.sleep(1.2)
        layer(*case.arguments(w.rank))

    with pytest.raises(ProtocolTimeout) as failed:
        run(2, main)
    error = failed.value
    assert (error.what, error.rank, error.peer) == ("band", 1, 1)
    assert (error.index >= 0, error.expected, error.seen) == (True, 1, 0)


STAGES = {
    "dispatch": "tileflow.backends.cpu._source_tokens",
    "gemm1": "tileflow.backends.cpu.swiglu",
    "producer": "tileflow.backends.cpu_return.GroupRows",
    "consumer": "tileflow.backends.cpu_return.ReturnTrip._put",
    "combine": "tileflow.backends.cpu.combine",
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_in_a_stage_of_one_rank_reaches_its_caller_and_ends_the_others(
    monkeypatch, stage
):
    case, armed = problem(ranks=3, tokens=40), threading.Event()
    original = pkgutil.resolve_name(STAGES[stage])

    def planted(*arguments):
        if armed.is_set() and threading.current_thread().name.endswith(" 1"):
            raise MemoryError("planted")
        return original(*arguments)

    monkeypatch.setattr(STAGES[stage], planted)

    def main(w):
        layer = case.layer(w)
        want = layer(*case.arguments(w.rank))
        w.barrier()
        armed.set()
        w.barrier()
        started = time.monotonic()
        with pytest.raises((MemoryError, ProtocolTimeout)) as failed:
            for _ in range(2):  # who was served before the failure learns of it in the next call
                layer(*case.arguments(w.rank))
        assert time.monotonic() - started < 5
        with pytest.raises(WorldBroken):
            layer(*case.arguments(w.rank))
        armed.clear()
        w.reset()
        assert layer(*case.arguments(w.rank)).tobytes() == want.tobytes()
        return failed.value

    before = threading.active_count()
    errors = run(3, main)
    assert threading.active_count() == before
    assert isinstance(errors[1], MemoryError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, ProtocolTimeout)
        assert (error.what, error.peer) == ("aborted", 1)


def test_nothing_is_posted_after_an_abort():
    case = problem(ranks=2)

    def main(w):
        layer = case.layer(w)
        layer(*case.arguments(w.rank))
        w.barrier()
        if w.rank == 0:
            words = w.backend.signals.words(0)
            words[ABORT_WORD] = 2
            forward = layer.engine._forward(
                np.zeros((2, 4), np.int32), layer._weights, "serial", None
            )
            before = w.backend.signals.words(1).copy()
            w.backend.signals.post(forward, 1, "done", 0)
            assert np.array_equal(before, w.backend.signals.words(1))
            assert w.backend.failure().peer == 1
            words[ABORT_WORD] = 0
        w.barrier()

    run(2, main)


def test_timed_counts_milliseconds():
    assert with_backend(lambda backend: backend.timed(lambda: time.sleep(0.02))) >= 15


def test_a_larger_layer_after_a_smaller_one_grows_the_workspace_and_keeps_both_right():
    small, large = problem(ranks=3, tokens=10), problem(ranks=3, tokens=200, hidden=128)

    def main(w):
        first = small.layer(w)
        ys = [first(*small.arguments(w.rank))]
        second = large.layer(w)
        ys.append(second(*large.arguments(w.rank)))
        ys.append(first(*small.arguments(w.rank)))
        return ys

    results = run(3, main)
    for case, number in ((small, 0), (large, 1), (small, 2)):
        assert_right(case, [ys[number] for ys in results])
