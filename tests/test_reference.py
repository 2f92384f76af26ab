"""The oracle against a loop over single slots, and its verdict on wrong results."""

import ml_dtypes
import numpy as np
import pytest

from tileflow.reference import check_tokens, moe_reference, operator_reference, relative_error

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def problem(dtype=np.float32, *, tokens=(5, 0, 3), experts=4, top_k=3, hidden=16, ffn=24, cols=8):
    """Return (x, ids, weights per rank, w_gate_up, w_down), some slots masked, experts repeated."""
    rng = np.random.default_rng(7)
    x = [rng.standard_normal((t, hidden)).astype(dtype) for t in tokens]
    ids = [rng.integers(-1, experts, (t, top_k)) for t in tokens]
    ids[0][0], ids[0][1] = -1, 2
    weights = [rng.standard_normal((t, top_k)).astype(np.float32) for t in tokens]
    w_gate_up = (rng.standard_normal((experts, 2 * ffn, hidden)) / 4).astype(dtype)
    w_down = (rng.standard_normal((experts, cols, ffn)) / 5).astype(dtype)
    return x, ids, weights, w_gate_up, w_down


def expected_token(x, ids, weights, w_gate_up, w_down):
    """Return (y, scale) of one token, slot by slot, in float64."""
    y, scale = np.zeros(w_down.shape[1]), 0.0
    for expert, weight in zip(ids, weights, strict=True):
        if expert < 0:
            continue
        gate, up = np.split(w_gate_up[expert].astype(np.float64) @ x.astype(np.float64), 2)
        row = w_down[expert].astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up)
        y, scale = y + weight * row, scale + abs(weight) * np.linalg.norm(row)
    return y, scale


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_reference_is_the_sum_over_single_slots(dtype):
    x, ids, weights, *w = problem(dtype)
    results = moe_reference(x, ids, weights, *w)
    assert [len(result.y) for result in results] == [5, 0, 3]
    for rank, result in enumerate(results):
        for token in range(len(x[rank])):
            y, scale = expected_token(x[rank][token], ids[rank][token], weights[rank][token], *w)
            assert result.y[token] == pytest.approx(y, rel=1e-10, abs=1e-12)
            assert result.row_norms[token] == pytest.approx(scale, rel=1e-10)


def test_masked_tokens_are_exactly_zero():
    result = moe_reference(*problem())[0]
    assert not result.y[0].any() and result.row_norms[0] == 0
    assert result.y[1].any()


@pytest.mark.parametrize("accumulate", [np.float32, np.float64])
def test_results_have_the_type_that_was_asked_for(accumulate):
    exact = moe_reference(*problem())[0]
    result = moe_reference(*problem(), accumulate=accumulate)[0]
    assert result.y.dtype == result.row_norms.dtype == accumulate
    assert result.y == pytest.approx(exact.y, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", DTYPES)
def test_rounding_between_the_gemms_changes_little_but_something(name):
    arrays = problem(DTYPES[name])
    exact, rounded = (moe_reference(*arrays, dtype=dtype)[0] for dtype in (None, name))
    ok, error = check_tokens(rounded.y, exact.y, exact.row_norms, name)
    assert ok and error > 0
    same = moe_reference(*arrays, dtype=DTYPES[name])[0]
    assert np.array_equal(same.y, rounded.y)


def test_huge_gates_do_not_overflow():
    x, ids, weights, w_gate_up, w_down = problem()
    with np.errstate(all="raise", under="ignore"):
        result = moe_reference([100 * a for a in x], ids, weights, 30 * w_gate_up, w_down)
    assert all(np.isfinite(part.y).all() for part in result)


def test_the_operator_is_one_product_per_row():
    rng = np.random.default_rng(1)
    rows, weights = rng.standard_normal((6, 8)), rng.standard_normal((3, 4, 8))
    experts = np.array([2, 0, -1, 2, 1, 0])
    result = operator_reference(rows, experts, weights)
    for row, expert in enumerate(experts):
        expected = weights[expert] @ rows[row] if expert >= 0 else np.zeros(4)
        assert result.y[row] == pytest.approx(expected)
    assert result.row_norms == pytest.approx(np.linalg.norm(result.y, axis=1))


@pytest.mark.parametrize("name", DTYPES)
def test_a_result_rounded_to_the_layers_dtype_passes(name):
    result = moe_reference(*problem())[0]
    ok, error = check_tokens(result.y.astype(DTYPES[name]), result.y, result.row_norms, name)
    assert ok and 0 < error < 0.01


@pytest.mark.parametrize(("dtype", "allowed"), [("float16", 8e-3), (ml_dtypes.bfloat16, 3e-2)])
def test_the_tolerance_is_measured_by_the_norms_of_the_terms(dtype, allowed):
    ref, norms = np.zeros((2, 4)), np.array([10.0, 1.0])  # terms of token 0 cancel
    y = ref.copy()
    y[0, 0] = 9.9 * allowed
    assert check_tokens(y, ref, norms, dtype) == (True, pytest.approx(0.99 * allowed))
    y[0, 0] = 10.1 * allowed
    assert check_tokens(y, ref, norms, dtype) == (False, pytest.approx(1.01 * allowed))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_values_that_are_not_finite_fail(bad, scale):
    y, ref = np.zeros((3, 4)), np.zeros((3, 4))
    y[1, 2] = bad
    assert check_tokens(y, ref, np.full(3, scale), "float16") == (False, np.inf)


def test_a_masked_token_must_be_exactly_zero():
    ref, norms = np.zeros((2, 4)), np.zeros(2)
    assert check_tokens(ref, ref, norms, "float16") == (True, 0.0)
    assert check_tokens(ref + 1e-30, ref, norms, "float16") == (False, np.inf)


def test_no_tokens_pass():
    assert check_tokens(np.zeros((0, 4)), np.zeros((0, 4)), np.zeros(0), "float16") == (True, 0.0)


def test_arrays_of_different_tokens_are_not_compared():
    with pytest.raises(ValueError, match="belong together"):
        relative_error(np.zeros((2, 4)), np.zeros((1, 4)), np.zeros(1))
