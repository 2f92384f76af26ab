"""Whole runs of the bench on the CPU. No test compares two times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tileflow
from tileflow import reference
from tileflow.bench import rows, runner
from tileflow.faults import Faults
from tileflow.worlds import World, open_worlds
from tools.mpi_env import find_mpirun, mpi_environment

QUICK = ["--backend", "cpu", "--quick", "--repeats", "2"]


def json_rows(path: Path) -> list[dict]:
    def refuse(text: str):
        raise AssertionError(f"{text} in a row")

    lines = path.read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_a_quick_run_passes_and_writes_a_row_per_case(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    assert runner.main([*QUICK, "--json", str(path)]) == runner.PASSED
    text = capsys.readouterr().out
    assert "no launcher" in text and "not how fast it is" in text
    assert text.count("check PASS") == 4
    written = json_rows(path)
    assert [row["suite"] for row in written] == ["operator", "operator", "layer", "layer"]
    for row in written:
        assert tuple(row) == rows.FIELDS
        assert row["check"] == "pass" and 0 < row["max_rel_err"] < 8e-3
        assert (row["backend"], row["world"], row["ranks"]) == ("cpu", "loopback", 4)
        assert row["t_serial_ms"] > 0 and row["t_overlap_ms"] > 0 and row["t_plan_ms"] > 0
        assert row["p10_ms"] <= row["t_overlap_ms"] <= row["p90_ms"]
        assert row["link"] is None and row["consumer_sms"] is None and row["target"] is None
    operator, layer = written[0], written[2]
    assert operator["t_gemm_ms"] > 0 and operator["t_send_ms"] > 0 and operator["gbps"] > 0
    assert layer["t_gemm_ms"] is None and layer["overlap_ratio"] is None
    assert set(layer["stages_ms"]) >= {"dispatch", "gemm1", "produce_and_send", "combine"}


def test_the_formulas_hold_in_the_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert runner.main([*QUICK, "--suite", "operator", "--json", str(path)]) == runner.PASSED
    packed, aligned = json_rows(path)
    for row in (packed, aligned):
        flops = 2 * row["useful_rows"] * row["n"] * row["k"]
        assert row["tflops"] == pytest.approx(flops / row["t_gemm_ms"] / 1e9)
        assert row["useful_rows"] == row["rows"] == 512
        sent = 512 * 3 // 4 * row["n"] * 2  # 3 of 4 balanced owners are other ranks
        assert row["gbps"] == pytest.approx(sent / row["t_send_ms"] / 1e6)
        bound = max(row["t_gemm_ms"], row["t_send_ms"])
        assert row["bound_ratio"] == pytest.approx(row["t_overlap_ms"] / bound)
    assert packed["computed_rows"] == 4 * 128  # 4 experts of 128 rows
    assert aligned["computed_rows"] == 16 * 128  # 16 runs of 32 rows


def test_finished_cases_are_skipped_and_other_settings_are_not(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    arguments = [*QUICK, "--suite", "operator", "--json", str(path)]
    assert runner.main([*arguments, "--only", "packed"]) == runner.PASSED
    assert runner.main(arguments) == runner.PASSED
    assert "0 failed, 1 skipped" in capsys.readouterr().out
    assert runner.main(arguments) == runner.PASSED
    assert [row["layout"] for row in json_rows(path)] == ["packed", "aligned"]
    assert runner.main([*arguments, "--seed", "1", "--only", "packed"]) == runner.PASSED
    assert len(json_rows(path)) == 3


def test_a_failed_check_exits_1_and_is_not_timed(tmp_path, capsys, monkeypatch):
    path = tmp_path / "rows.jsonl"
    arguments = [*QUICK, "--only", "operator/balanced/e4/packed", "--json", str(path)]
    with monkeypatch.context() as patched:
        patched.setitem(reference.TOLERANCES, "float16", 0.0)
        assert runner.main(arguments) == runner.FAILED
    assert "check FAIL" in capsys.readouterr().out
    (row,) = json_rows(path)
    assert row["check"] == "fail" and row["t_gemm_ms"] is None and row["repeats"] is None
    assert runner.main(arguments) == runner.PASSED  # a failed case is not finished
    assert [row["check"] for row in json_rows(path)] == ["fail", "pass"]


def test_overlap_that_differs_from_serial_exits_1(monkeypatch, capsys):
    monkeypatch.setattr("tileflow.bench.run_layer.same_bits", lambda *arrays: False)
    assert runner.main([*QUICK, "--only", "layer/balanced/e2/packed"]) == runner.FAILED
    assert "DIFFERS" in capsys.readouterr().out


def test_a_wait_that_times_out_exits_3(monkeypatch, capsys):
    monkeypatch.setattr("tileflow.engine.Faults", lambda: Faults(mute_done=True))
    monkeypatch.setattr(World, "warmup_timeout_s", 0.2)

    def hasty(*arguments, **options):
        return tileflow.init(*arguments, **options, timeout_s=0.2)

    monkeypatch.setattr(runner, "init", hasty)
    assert runner.main([*QUICK, "--suite", "operator", "--ranks", "2"]) == runner.TIMEOUT
    assert "ProtocolTimeout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nothing"], "operator/balanced/e4/packed"),
        (["--link", "host"], "host"),
        (["--world", "nvshmem"], "nvshmem"),
        (["--world", "mpi_shm", "--ranks", "3"], "ranks"),
        (["--tile-m", "100"], "Config.tile_m"),
        (["--n", "100"], "multiple of 8"),
        (["--suite", "layer", "--trace", "trace.json"], "operator case"),
        (["--json", "no/such/folder/rows.jsonl"], "No such file"),
    ],
)
def test_an_impossible_choice_exits_2_and_says_why(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert runner.main([*QUICK, *arguments]) == runner.USAGE
    error = capsys.readouterr().err
    assert said in error
    assert error.count("tileflow.bench") == 1


def test_one_rank_alone_sends_nothing_and_has_no_ratio(tmp_path):
    path = tmp_path / "rows.jsonl"
    arguments = [*QUICK, "--suite", "operator", "--layout", "packed", "--ranks", "1"]
    assert runner.main([*arguments, "--json", str(path)]) == runner.PASSED
    (row,) = json_rows(path)
    for field in ("t_send_ms", "gbps", "overlap_ratio", "overlap_ceiling"):
        assert row[field] is None
    assert row["bound_ratio"] > 0


def test_a_serial_put_path_says_so(tmp_path):
    path = tmp_path / "rows.jsonl"
    arguments = [*QUICK, "--suite", "operator", "--layout", "packed", "--put-path", "serial"]
    assert runner.main([*arguments, "--json", str(path)]) == runner.PASSED
    (row,) = json_rows(path)
    assert row["put_path"] == row["mode"] == "serial"
    assert row["p10_ms"] <= row["t_serial_ms"] <= row["p90_ms"]


@pytest.mark.parametrize("routing", ["stress_skew", "first_k", "half_empty", "one_owner_90"])
def test_uneven_routings_pass_in_both_layouts_and_suites(routing):
    arguments = [*QUICK, "--routing", routing, "--repeats", "1", "--ranks", "3"]
    assert runner.main(arguments) == runner.PASSED


def test_bfloat16_passes():
    pytest.importorskip("ml_dtypes")
    assert runner.main([*QUICK, "--dtype", "bfloat16", "--layout", "packed"]) == runner.PASSED


def test_a_trace_holds_tiles_and_sends_of_all_ranks(tmp_path, capsys):
    path = tmp_path / "trace.json"
    arguments = [*QUICK, "--suite", "operator", "--layout", "packed", "--trace", str(path)]
    assert runner.main(arguments) == runner.PASSED
    assert str(path) in capsys.readouterr().out
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    for name in ("tile", "wait", "send"):
        assert {event["pid"] for event in events if event["name"] == name} == {0, 1, 2, 3}
    tiles = [event for event in events if event["name"] == "tile"]
    assert len(tiles) == 4 * 4  # ranks x bands of 256 columns: one forward, no other


def test_a_traced_case_runs_again_although_it_is_finished(tmp_path):
    arguments = [*QUICK, "--suite", "operator", "--json", str(tmp_path / "rows.jsonl")]
    assert runner.main(arguments) == runner.PASSED
    trace = tmp_path / "trace.json"
    assert runner.main([*arguments, "--trace", str(trace)]) == runner.PASSED
    assert trace.stat().st_size > 1000


def test_no_world_stays_open_after_a_run():
    assert runner.main([*QUICK, "--only", "nothing"]) == runner.USAGE
    assert open_worlds() == ()


def run_module(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [*launcher, sys.executable, "-m", "tileflow.bench", *arguments]
    environment = os.environ | mpi_environment()
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)


def test_the_module_starts_as_a_command():
    done = run_module(*QUICK, "--only", "operator/balanced/e4/packed")
    assert done.returncode == 0, done.stderr
    assert "1 passed, 0 failed" in done.stdout


@pytest.mark.mpi
def test_under_mpirun_one_rank_prints_and_all_check(tmp_path):
    pytest.importorskip("mpi4py")
    mpirun = find_mpirun()
    if mpirun is None:
        pytest.skip("no mpirun")
    path = tmp_path / "rows.jsonl"
    launcher = (mpirun, "-n", "2")
    done = run_module(*QUICK, "--layout", "packed", "--json", str(path), launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 passed, 0 failed") == 1
    assert "\x1b" not in done.stdout  # a launcher's pseudo-terminal gets plain text
    assert [row["world"] for row in json_rows(path)] == ["mpi_shm", "mpi_shm"]
    assert run_module(*QUICK, "--only", "nothing", launcher=launcher).returncode == 2


@pytest.mark.gpu
def test_a_quick_run_on_a_gpu_passes_beside_a_dense_product(tmp_path):
    path = tmp_path / "rows.jsonl"
    arguments = ["--backend", "cuda", "--quick", "--repeats", "2", "--json", str(path)]
    assert runner.main(arguments) == runner.PASSED
    for row in json_rows(path):
        assert row["check"] == "pass" and row["link"] == "hbm"
        assert row["consumer_sms"] > 0
        assert row["suite"] == "layer" or row["tflops_cublas_dense"] > 0


@pytest.mark.gpu
def test_a_timeline_of_the_gpu_is_refused_for_now(tmp_path, capsys):
    arguments = ["--backend", "cuda", "--quick", "--trace", str(tmp_path / "trace.json")]
    assert runner.main(arguments) == runner.USAGE
    assert "not in this version" in capsys.readouterr().err
