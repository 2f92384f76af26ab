"""Medians, maxima over ranks, interleaving and the overlap ratios, without looking at a clock."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tileflow
from tileflow import MoELayer, MoEShape, timing

POSITIVE = st.floats(min_value=1e-6, max_value=1e6)


class FakeWorld:
    """Stands for several ranks: the payloads of the others are given."""

    def __init__(self, others: list[np.ndarray] | None = None):
        self._others = others or []

    def allgather(self, payload: bytes) -> list[bytes]:
        return [payload, *(np.asarray(o, np.float64).tobytes() for o in self._others)]


def test_a_spread_holds_the_median_and_the_tenth_and_ninetieth_percentile():
    spread = timing.Spread.of(np.arange(11.0))
    assert spread == timing.Spread(5.0, 1.0, 9.0, 11)


def test_one_sample_is_its_own_spread():
    assert timing.Spread.of([3.0]) == timing.Spread(3.0, 3.0, 3.0, 1)


def test_the_maximum_over_ranks_is_taken_per_repeat_and_not_of_medians():
    mine, other = np.array([[1.0], [9.0], [1.0]]), np.array([[9.0], [1.0], [1.0]])
    slowest = timing.max_over_ranks(FakeWorld([other]), mine)
    assert slowest.tolist() == [[9.0], [9.0], [1.0]]
    assert timing.Spread.of(slowest[:, 0]).median_ms == 9.0


def test_works_take_turns_and_warm_up_rounds_do_not_count():
    calls: list[str] = []

    def work(name: str):
        return lambda: calls.append(name) or float(len(calls))

    spreads = timing.measure(FakeWorld(), {"a": work("a"), "b": work("b")}, repeats=2, warmups=1)
    assert calls == ["a", "b"] * 3
    assert spreads["a"].median_ms == 4.0  # calls 3 and 5; call 1 was the warm-up
    assert spreads["b"].median_ms == 5.0
    assert spreads["a"].repeats == 2


def test_a_send_hidden_whole_has_ratio_one_and_a_serial_one_zero():
    assert timing.overlap_ratio(3.0, 7.0, overlap_ms=3.0) == 1.0
    assert timing.overlap_ratio(3.0, 7.0, overlap_ms=7.0) == 0.0
    assert timing.overlap_ratio(3.0, 7.0, overlap_ms=5.0) == 0.5


def test_an_overlap_below_the_gemm_counts_as_hidden_whole():
    assert timing.overlap_ratio(3.0, 7.0, overlap_ms=2.5) == 1.0


def test_an_overlap_that_loses_has_a_negative_ratio():
    assert timing.overlap_ratio(3.0, 7.0, overlap_ms=9.0) == -0.5


@pytest.mark.parametrize("serial_ms", [3.0, 2.0])
def test_there_is_no_ratio_where_nothing_is_exposed(serial_ms):
    assert timing.overlap_ratio(3.0, serial_ms, overlap_ms=3.0) is None
    assert timing.overlap_ceiling(3.0, serial_ms, send_ms=1.0) is None


def test_a_send_longer_than_the_gemm_lowers_the_ceiling():
    assert timing.overlap_ceiling(3.0, 7.0, send_ms=2.0) == 1.0
    assert timing.overlap_ceiling(3.0, 7.0, send_ms=4.0) == 0.75


def test_the_bound_is_the_longer_of_gemm_and_send():
    assert timing.bound_ratio(3.0, 6.0, send_ms=4.0) == 1.5
    assert timing.bound_ratio(3.0, 6.0, send_ms=1.0) == 2.0
    assert timing.bound_ratio(0.0, 6.0, send_ms=0.0) is None


@settings(deadline=None, derandomize=True)
@given(gemm=POSITIVE, send=POSITIVE, overlap=POSITIVE)
def test_no_ratio_exceeds_one_and_none_is_nan(gemm, send, overlap):
    ratios = (
        timing.overlap_ratio(gemm, gemm + send, overlap_ms=overlap),
        timing.overlap_ceiling(gemm, gemm + send, send_ms=send),
    )
    for ratio in ratios:
        assert ratio is None or ratio <= 1.0


def test_times_without_remote_rows_have_no_ratio_and_no_send():
    spread = timing.Spread(2.0, 2.0, 2.0, 1)
    times = timing.OperatorTimes(spread, None, spread, spread, {})
    assert times.overlap_ratio is None
    assert times.overlap_ceiling is None
    assert times.bound_ratio == 1.0


def operator_layer(world) -> tuple[MoELayer, np.ndarray, np.ndarray]:
    """Return an operator-only layer, its rows and counts: 64 rows of each source everywhere."""
    counts = np.full((world.size, world.size), 64, np.int32)
    shape = MoEShape(8, 16, world.size, 1, 64 * world.size, hidden_out=264)
    layer = MoELayer(world, shape, None, np.ones((1, 264, 16), np.float16))
    return layer, np.ones((64 * world.size, 16), np.float16), counts


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_operators_times_are_measured_and_equal_on_all_ranks(ranks):
    def main(world) -> timing.OperatorTimes:
        layer, rows, counts = operator_layer(world)
        extra = {"plan": lambda: layer.engine.last_plan_ms}
        times = timing.measure_operator(layer, rows, counts, repeats=3, extra=extra)
        assert (layer.operator(rows, counts) == 16).all()  # the modes for timing left no trace
        return times

    with tileflow.init("loopback", ranks=ranks, backend="cpu") as world:
        times, *others = world.run(main)
    assert all(other == times for other in others)
    assert times.gemm.repeats == 3 and times.extra["plan"].median_ms > 0
    assert (times.send is None) == (ranks == 1)
    assert times.bound_ratio > 0


def test_rows_left_in_staging_by_the_gemm_are_what_the_send_sends():
    def main(world) -> np.ndarray:
        layer, rows, counts = operator_layer(world)
        assert timing.operator_ms(layer, rows, counts, "gemm") > 0
        for slot in range(2):  # neither slot of the return buffer holds them yet
            layer.world.backend.workspace.returned.local[:] = 0
            world.barrier()
            assert timing.operator_ms(layer, rows, counts, "send") > 0, slot
        buffer = layer.world.backend.workspace.returned.local
        return np.count_nonzero(buffer.view(np.float16) == 16)

    with tileflow.init("loopback", ranks=2, backend="cpu") as world:
        arrived = world.run(main)
    assert arrived == [64 * 264] * 2  # the other rank's rows; own ones are the GEMM's to store


def test_a_layers_time_is_the_sum_of_its_stages():
    def main(world) -> dict[str, float]:
        shape = MoEShape(16, 8, 2 * world.size, 1, 4)
        weights = np.zeros((2, 16, 16), np.float16), np.zeros((2, 16, 8), np.float16)
        layer = MoELayer(world, shape, *weights)
        x, ids = np.zeros((4, 16), np.float16), np.zeros((4, 1), np.int32)
        return timing.layer_ms(layer, (x, ids, np.ones((4, 1), np.float32)), "overlap")

    with tileflow.init("loopback", ranks=2, backend="cpu") as world:
        for stages in world.run(main):
            total = stages.pop("total")
            assert "gemm1" in stages
            assert total == pytest.approx(sum(stages.values()))
