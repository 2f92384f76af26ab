"""Timelines: the Chrome JSON that is saved, and the figure that is drawn from it."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tileflow
from tileflow import MoELayer, MoEShape
from tileflow.faults import Faults
from tileflow.trace import Span, Trace, now_ns
from tools import plot_timeline

MS = 1_000_000  # nanoseconds


def overlapped_trace() -> Trace:
    """Two ranks; half of each send lies behind the GEMM."""
    trace = Trace()
    for rank in (0, 1):
        start = 5 * MS + rank * MS
        for tile in range(4):
            trace.add(rank, "producer", "tile", start + tile * MS, start + (tile + 1) * MS)
        trace.add(rank, "consumer", "wait", start, start + 3 * MS, segment=0)
        trace.add(rank, "consumer", "send", start + 3 * MS, start + 5 * MS, owner=1 - rank)
    return trace


def test_events_name_ranks_as_processes_and_lanes_as_threads():
    events = overlapped_trace().events()
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(0, "rank 0"), (1, "rank 1")}
    threads = [e for e in events if e["name"] == "thread_name"]
    assert sorted((e["pid"], e["args"]["name"]) for e in threads) == [
        (0, "consumer"),
        (0, "producer"),
        (1, "consumer"),
        (1, "producer"),
    ]
    assert len({e["tid"] for e in threads}) == 4


def test_times_are_microseconds_since_the_first_span_of_all_ranks():
    events = [e for e in overlapped_trace().events() if e["ph"] == "X"]
    assert min(e["ts"] for e in events) == 0.0
    assert {e["dur"] for e in events if e["name"] == "tile"} == {1000.0}
    assert {e["ts"] for e in events if e["name"] == "wait"} == {0.0, 1000.0}


def test_details_of_a_span_reach_the_file(tmp_path):
    overlapped_trace().save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"] for e in events if e["name"] == "send"] == [{"owner": 1}, {"owner": 0}]


def test_spans_of_other_ranks_join_a_trace():
    trace = Trace()
    trace.extend([Span(3, "stage", "dispatch", now_ns(), now_ns())])
    trace.extend(overlapped_trace().spans)
    assert {span.rank for span in trace.spans} == {0, 1, 3}


def test_an_empty_trace_is_a_valid_file(tmp_path):
    Trace().save(tmp_path / "empty.json")
    assert json.loads((tmp_path / "empty.json").read_text()) == {"traceEvents": []}


def test_the_share_of_hidden_send_time_is_read_from_the_spans(tmp_path):
    overlapped_trace().save(tmp_path / "trace.json")
    bars = plot_timeline.load(tmp_path / "trace.json")
    assert plot_timeline.hidden_share(bars) == pytest.approx(0.5)
    tiles = [bar for bar in bars if bar.name == "tile"]
    assert plot_timeline.hidden_share(tiles) is None


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_figure_is_drawn_with_a_row_per_rank_and_lane(tmp_path, kind):
    pytest.importorskip("matplotlib")
    overlapped_trace().save(tmp_path / "trace.json")
    output = tmp_path / f"timeline.{kind}"
    assert plot_timeline.main([str(tmp_path / "trace.json"), "-o", str(output)]) == 0
    assert output.stat().st_size > 1000


def test_the_figure_has_a_title_axes_with_units_and_a_legend_outside_the_data(tmp_path):
    pytest.importorskip("matplotlib")
    overlapped_trace().save(tmp_path / "trace.json")
    figure = plot_timeline.plot(plot_timeline.load(tmp_path / "trace.json", [1]))
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "rank 1  producer",
        "rank 1  consumer",
    ]
    assert "[ms]" in axes.get_xlabel()
    assert "50%" in axes.get_title(loc="left")
    assert axes.get_legend() is None
    assert len(figure.legends) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": []}'])
def test_a_file_that_is_no_timeline_is_refused_with_exit_code_2(tmp_path, capsys, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert plot_timeline.main([str(path), "-o", str(tmp_path / "out.png")]) == 2
    assert "bad.json" in capsys.readouterr().err
    assert not (tmp_path / "out.png").exists()


def test_ranks_that_are_not_in_the_file_are_refused(tmp_path, capsys):
    overlapped_trace().save(tmp_path / "trace.json")
    arguments = [str(tmp_path / "trace.json"), "-o", str(tmp_path / "out.png"), "--ranks", "7"]
    assert plot_timeline.main(arguments) == 2
    assert "ranks" in capsys.readouterr().err


def traced_run(mode: str) -> list[Span]:
    """Run an operator with slow tiles on 2 virtual ranks; return the spans of both."""

    def main(world) -> list[Span]:
        shape = MoEShape(8, 16, 2, 1, 1024, hidden_out=512)
        layer = MoELayer(world, shape, None, np.ones((1, 512, 16), np.float16))
        layer.engine.faults = Faults(tile_delay_s=4e-3)
        counts = np.full((2, 2), 256, np.int32)
        world.backend.trace = Trace()
        layer.operator(np.ones((512, 16), np.float16), counts, mode=mode)
        return world.backend.trace.spans

    with tileflow.init("loopback", ranks=2, backend="cpu") as world:
        return [span for spans in world.run(main) for span in spans]


def by_name(spans: list[Span], rank: int, name: str) -> list[Span]:
    return [span for span in spans if span.rank == rank and span.name == name]


def test_an_overlapped_run_sends_inside_the_window_of_its_gemm():
    spans = traced_run("overlap")
    for rank in (0, 1):
        tiles, sends = by_name(spans, rank, "tile"), by_name(spans, rank, "send")
        assert len(tiles) == 4 * 2 and len(sends) == 2
        assert min(s.end_ns for s in sends) < max(t.start_ns for t in tiles)


def test_a_serial_run_sends_nothing_before_its_gemm_has_ended():
    spans = traced_run("serial")
    for rank in (0, 1):
        tiles, sends = by_name(spans, rank, "tile"), by_name(spans, rank, "send")
        assert min(s.start_ns for s in sends) >= max(t.end_ns for t in tiles)
