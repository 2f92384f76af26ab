"""The bench: options, cases, rows, checks and printing."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy as np
import pytest

from tileflow import reference
from tileflow.bench import cases, checks, options, oracles, place, report, rows, runner
from tileflow.errors import ConfigError


def parsed(*arguments: str) -> options.Options:
    return options.parse(arguments)


def selected(*arguments: str, device: str = "cpu") -> list[cases.Case]:
    return cases.select(parsed(*arguments), device)


# -- command line ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--suite", "gemm"],
        ["--suite", "paper"],
        ["--rows", "0"],
        ["--rows", "many"],
        ["--routing", "nonsense"],
        ["--dtype", "float64"],
        ["--unknown"],
        ["--backend", "tpu"],
        ["--put-path", "pigeon"],
        ["--full", "--quick"],
    ],
)
def test_a_wrong_flag_is_a_usage_error_that_lists_what_exists(arguments, capsys):
    with pytest.raises(SystemExit) as exited:
        runner.main(arguments)
    assert exited.value.code == runner.USAGE
    assert arguments[0] in capsys.readouterr().err


def test_the_help_names_every_flag_and_the_exit_codes(capsys):
    with pytest.raises(SystemExit) as exited:
        options.parse(["--help"])
    text = capsys.readouterr().out
    assert exited.value.code == 0
    flags = "suite quick full only backend world ranks link layout put-path rows n k tokens hidden"
    flags += " ffn experts-per-rank top-k routing dtype tile-m consumer-sms mgb repeats seed json"
    for flag in (*flags.split(), "trace"):
        assert f"--{flag}" in text
    assert "exit codes" in text


def test_the_documentation_names_every_flag_and_every_row_field():
    text = (Path(__file__).parents[1] / "docs" / "bench.md").read_text()
    for name in vars(parsed()):
        flag = "--quick" if name == "effort" else "--" + name.replace("_", "-")
        assert flag in text
    for field in rows.FIELDS:
        assert f"`{field}`" in text


# -- cases -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_default_run_has_both_suites_in_both_layouts(device):
    found = {(case.suite, case.config.layout) for case in selected(device=device)}
    assert found == {(s, y) for s in ("operator", "layer") for y in ("packed", "aligned")}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("effort", [[], ["--quick"], ["--full"]])
def test_names_and_keys_of_a_run_are_unique(device, effort):
    found = selected(*effort, device=device)
    assert len({case.name for case in found}) == len(found)
    assert len({case.key() for case in found}) == len(found)


def test_only_takes_a_part_of_a_name_or_a_glob():
    assert {case.suite for case in selected("--only", "layer")} == {"layer"}
    assert {case.name for case in selected("--only", "operator/*/packed")} == {
        "operator/balanced/e4/packed"
    }
    assert selected("--only", "nothing") == []


def test_flags_change_the_sizes_and_the_configuration():
    arguments = "--rows 64 --n 128 --k 8 --experts-per-rank 2 --layout aligned --tile-m 64 --mgb 3"
    arguments += " --suite operator --routing stress_skew --dtype bfloat16 --repeats 9 --seed 5"
    (case,) = selected(*arguments.split())
    assert isinstance(case, cases.OperatorCase)
    assert (case.rows, case.n, case.k, case.e_local) == (64, 128, 8, 2)
    assert (case.config.layout, case.config.tile_m, case.config.mgb) == ("aligned", 64, 3)
    assert (case.routing, case.dtype, case.repeats, case.seed) == ("stress_skew", "bfloat16", 9, 5)


def test_a_value_that_no_layer_can_have_is_refused_with_its_field():
    with pytest.raises(ConfigError) as refused:
        selected("--tile-m", "100")
    assert refused.value.field == "Config.tile_m"


@pytest.mark.parametrize(
    "arguments", [["--seed", "1"], ["--mgb", "3"], ["--rows", "64"], ["--repeats", "4"]]
)
def test_every_setting_changes_the_key(arguments):
    plain, changed = selected("--suite", "operator"), selected("--suite", "operator", *arguments)
    assert not {case.key() for case in plain} & {case.key() for case in changed}


def test_a_case_in_another_place_has_another_key():
    (case, *_) = selected()
    assert case.key("cpu", 4) != case.key("cpu", 2)
    assert case.key("cpu", 4) == case.key("cpu", 4)


# -- rows ------------------------------------------------------------------------------------------


def test_a_row_has_every_field_and_null_for_what_is_not_a_number():
    row = rows.make_row({"suite": "operator", "tflops": math.nan, "gbps": math.inf, "rows": 3})
    assert tuple(row) == rows.FIELDS
    assert row["tflops"] is None and row["gbps"] is None and row["rows"] == 3


def test_a_field_that_does_not_exist_is_refused():
    with pytest.raises(KeyError, match="speed"):
        rows.make_row({"speed": 1.0})


def test_a_file_that_ends_inside_a_line_is_continued_and_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"key": "a", "check": "pass"}\n{"key": "b", "chec')
    file = rows.RowFile(path)
    assert file.finished() == {"a"}
    file.append({"key": "c", "check": "pass"})
    file.append({"key": "d", "check": "fail"})
    assert file.finished() == {"a", "c"}
    assert [row["key"] for row in file.read()] == ["a", "c", "d"]


def test_without_a_path_rows_go_nowhere():
    file = rows.RowFile(None)
    file.append({"key": "a"})
    assert file.finished() == set()


# -- checks ----------------------------------------------------------------------------------------


def operator_example() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    own = rng.standard_normal((5, 16), np.float32).astype(np.float16)
    weights = rng.standard_normal((3, 8, 16), np.float32).astype(np.float16)
    experts = np.repeat([0, 2], [2, 3])
    expected = np.einsum("rk,rnk->rn", own.astype(np.float32), weights[experts].astype(np.float32))
    return own, weights, np.array([2, 0, 3]), expected.astype(np.float16)


ORACLES = [oracles.HostOracle("float16"), oracles.DeviceOracle(np)]


@pytest.mark.parametrize("oracle", ORACLES)
def test_a_right_operator_result_passes(oracle):
    own, weights, counts, returned = operator_example()
    assert checks.operator_error(oracle, own, returned, counts, lambda e: weights[e]) < 1e-3


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_one_row_that_did_not_arrive_fails(oracle, value):
    own, weights, counts, returned = operator_example()
    returned[4] = value
    with np.errstate(invalid="ignore"):
        error = checks.operator_error(oracle, own, returned, counts, lambda e: weights[e])
    assert not checks.Check(error, 8e-3, True).passed


@pytest.mark.parametrize("oracle", ORACLES)
def test_swapped_rows_fail(oracle):
    own, weights, counts, returned = operator_example()
    returned[[0, 1]] = returned[[1, 0]]
    assert checks.operator_error(oracle, own, returned, counts, lambda e: weights[e]) > 0.1


def layer_example() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return x, ids, shares, gate_up, down: a masked token, and one that names an expert twice."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, 16), np.float32).astype(np.float16)
    ids = np.array([[0, 1], [-1, -1], [1, 1], [1, -1]], np.int32)
    shares = rng.uniform(0.1, 1.0, (4, 2)).astype(np.float32)
    gate_up = (rng.standard_normal((2, 24, 16)) / 4).astype(np.float16)
    down = (rng.standard_normal((2, 8, 12)) / 4).astype(np.float16)
    return x, ids, shares, gate_up, down


def test_both_oracles_agree_with_the_reference_on_a_whole_layer():
    x, ids, shares, gate_up, down = layer_example()
    (exact,) = reference.moe_reference([x], [ids], [shares], gate_up, down)
    for oracle in ORACLES:
        arguments = (oracle, x, ids, shares)
        error = checks.layer_error(*arguments, exact.y, lambda e: (gate_up[e], down[e]))
        assert error < 1e-3


@pytest.mark.parametrize("oracle", ORACLES)
def test_a_masked_token_must_be_exactly_zero(oracle):
    x, ids, shares, gate_up, down = layer_example()
    (exact,) = reference.moe_reference([x], [ids], [shares], gate_up, down)
    exact.y[1, 0] = 1e-6
    arguments = (oracle, x, ids, shares, exact.y)
    assert checks.layer_error(*arguments, lambda e: (gate_up[e], down[e])) == math.inf


def test_results_with_the_same_values_and_other_bits_are_told_apart():
    zero = np.zeros(2, np.float16)
    assert checks.same_bits(np, zero, zero.copy())
    assert not checks.same_bits(np, zero, -zero)
    assert checks.same_bits(np, np.array([np.nan], np.float16), np.array([np.nan], np.float16))


@pytest.mark.parametrize(("error", "bits"), [(0.1, True), (0.0, False), (math.nan, True)])
def test_a_check_fails_on_a_large_error_and_on_differing_bits(error, bits):
    check = checks.Check(error, 8e-3, bits)
    assert check.verdict == "fail"
    assert "FAIL" in str(check)


# -- printing --------------------------------------------------------------------------------------


def test_tables_are_plain_text_where_the_output_is_no_terminal(capsys):
    report.Printer().table(["time", "median ms"], [["gemm", "1.5"], ["overlap", "12.25"]])
    assert capsys.readouterr().out.splitlines() == [
        "  time     median ms",
        "  gemm           1.5",
        "  overlap      12.25",
    ]


def test_other_ranks_than_the_first_print_nothing(capsys):
    printer = report.Printer(enabled=False)
    printer.line("text")
    printer.table(["a"], [["b"]])
    assert capsys.readouterr().out == ""


def test_rows_become_a_table_without_empty_columns(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    row = rows.make_row({"case": "operator/x", "check": "pass", "t_gemm_ms": 1.25, "ranks": 4})
    rows.RowFile(path).append(row)
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "operator/x" in text and "1.25" in text and "4 ranks" in text
    assert "gbps" not in text


def test_a_file_without_rows_is_a_usage_error(tmp_path):
    assert report.main([str(tmp_path / "none.jsonl")]) == 2


# -- the place -------------------------------------------------------------------------------------


def gpu_place(**changes) -> place.Place:
    values = {"backend": "cuda", "device": "GPU", "world": "nvshmem", "link": None, "ranks": 4}
    values |= {"sharing": 4, "reason": "asked for", "mps": False} | changes
    return place.Place(**values)


def test_processes_that_share_a_gpu_without_mps_get_three_repeats_and_the_commands():
    shared = gpu_place()
    text = "\n".join(shared.lines())
    assert shared.most_repeats == 3
    assert "nvidia-cuda-mps-control -d" in text and "3 repeats" in text
    found = cases.select(parsed(), "cuda", most_repeats=shared.most_repeats)
    assert {case.repeats for case in found} == {3}


def test_with_mps_repeats_stay_and_the_sharing_is_said():
    shared = gpu_place(mps=True)
    assert shared.most_repeats is None
    assert "no multi-GPU result" in "\n".join(shared.lines())
    assert "mps-control" not in "\n".join(shared.lines())


def test_ranks_with_unlike_places_agree_on_one_and_so_on_the_repeats():
    class FakeWorld:
        name, device, link, size = "loopback", "cpu", None, 2

        def device_ranks(self) -> tuple[int, ...]:
            return (0,)

        def allgather(self, payload: bytes) -> list[bytes]:
            return [pickle.dumps(gpu_place(sharing=1, mps=True)), pickle.dumps(gpu_place())]

    agreed = place.Place.of(FakeWorld(), "asked for")
    assert agreed == gpu_place()
    assert agreed.most_repeats == 3


def test_a_gpu_per_rank_needs_no_warning():
    assert len(gpu_place(sharing=1).lines()) == 3


def test_a_loopback_on_a_gpu_says_that_ranks_share_it():
    loopback = gpu_place(world="loopback", link="hbm")
    assert "no multi-GPU result" in "\n".join(loopback.lines())
    assert loopback.most_repeats is None
