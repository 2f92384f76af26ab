"""Top-k routing: sort (token, slot) pairs by expert, and generate routings and counts by mode.

Generated routings are dropless and depend on the arguments alone, so each rank makes its own part
without talking to others. Modes, and the rows that experts get in them:

- ``balanced``: equal to +-1.
- ``moderate_skew``, ``stress_skew``: power law, the i-th most popular expert gets ~ ``i**-a`` with
  a such that max/mean is 1.75 or 4.0.
- ``random_uneven``: uniform in [0.2, 1.8] x mean, the total exact.
- ``uniform``: every token draws k distinct experts, all sets alike.
- ``first_k``: every token goes to experts 0 .. k-1.
- ``half_empty``: half of the experts (rounded down, drawn) get nothing, the others are balanced.
- ``one_owner_90``: balanced, but 90 % of rank 0's rows go to rank 1.
- ``power_law``: the i-th most popular expert gets ~ ``1/i``.

The experts of a token are distinct wherever k experts have rows at all. An expert then gets at most
one row of each token, so max/mean cannot exceed E/k; rows that it cannot take go to the others in
proportion. Ratios hold within 5 % from about 10 mean rows per expert on; below, whole rows are too
coarse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from .errors import ConfigError, InputError

__all__ = ["MODES", "make_counts", "make_routing", "place_rows"]


def place_rows(topk_ids: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Sort routed pairs by expert, stable in token order.

    Args:
        topk_ids: int [T, k], global experts, -1 where a slot is masked.
        num_experts: E.

    Returns:
        counts, int32 [E], pairs of each expert, and send_row, int32 [T, k], the position of each
        pair in the sorted order, -1 where masked.

    Raises:
        InputError: an id lies outside -1 .. E-1; names the first such token and slot.
    """
    if topk_ids.size and (topk_ids.min() < -1 or topk_ids.max() >= num_experts):
        token, slot = np.argwhere((topk_ids < -1) | (topk_ids >= num_experts))[0]
        value = int(topk_ids[token, slot])
        raise InputError(f"topk_ids[{token}, {slot}]", value, f"-1 to {num_experts - 1}")
    # The narrowest type makes the stable sort a radix sort; -1 wraps to its largest value.
    keys = topk_ids.astype(np.min_scalar_type(num_experts)).ravel()
    order = keys.argsort(kind="stable")
    counts = np.bincount(keys, minlength=num_experts)[:num_experts]
    routed = int(counts.sum())
    send_row = np.full(keys.size, -1, np.int32)
    send_row[order[:routed]] = np.arange(routed, dtype=np.int32)
    return counts.astype(np.int32), send_row.reshape(topk_ids.shape)


def make_routing(
    mode: str,
    *,
    tokens: int | Sequence[int],
    num_experts: int,
    top_k: int,
    ranks: int,
    rank: int,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Generate the routing of one rank's tokens.

    Except in ``uniform``, the totals per expert over the tokens of all ranks are exactly those of
    the mode, and every rank's own part has the same proportions (to +-1 row where all ranks have
    equally many tokens).

    Args:
        mode: one of MODES, see the module.
        tokens: T of every rank, as one number where they are equal, or as W numbers.
        num_experts: E, a multiple of `ranks`.
        top_k: k; where fewer experts have rows, tokens repeat experts.
        ranks: W.
        rank: whose tokens.
        seed: equal on all ranks.

    Returns:
        topk_ids, int32 [T, k], and topk_weights, float32 [T, k], positive, with sum 1 per token.

    Raises:
        ConfigError: an argument is not allowed.
    """
    _check(mode, np.shape(tokens) in ((), (ranks,)), "tokens", tokens, f"one number or {ranks}")
    tokens_of = np.broadcast_to(np.asarray(tokens, np.int64), ranks)
    _check(mode, tokens_of.min() >= 0, "tokens", tokens, "0 or more")
    _check(mode, num_experts % ranks == 0, "num_experts", num_experts, f"a multiple of {ranks}")
    own = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(rank,)))
    if mode == "uniform" and top_k <= num_experts:
        ids = _draw_distinct(own, int(tokens_of[rank]), num_experts, top_k)
    elif mode == "one_owner_90" and rank == 0:
        ids = _deal(_one_owner_shares(num_experts, ranks), top_k, tokens_of[:1], 0)
    else:
        shares = _SHARES[mode](num_experts, top_k, np.random.default_rng(seed))
        ids = _deal(shares, top_k, tokens_of, rank)
    own.shuffle(ids)  # tokens
    own.permuted(ids, axis=1, out=ids)  # slots
    weights = own.uniform(0.1, 1.0, ids.shape)
    weights /= weights.sum(axis=1, keepdims=True)
    return ids, weights.astype(np.float32)


def make_counts(
    mode: str, *, rows: int, experts_per_rank: int, ranks: int, seed: int
) -> np.ndarray:
    """Generate counts with which every rank receives exactly `rows` rows.

    The rows of each rank are distributed over its experts by mode, with these readings: max/mean
    is that of one rank's experts (at most E_local), ``first_k`` takes the first expert of each
    rank, ``half_empty`` empties half of each rank's experts, ``uniform`` draws (source, expert) of
    each row, and in ``one_owner_90`` 90 % of the rows that rank 0 computes return to rank 1.
    Sources share every expert's rows to +-1 otherwise.

    Args:
        mode: one of MODES.
        rows: rows that each rank receives.
        experts_per_rank: E_local.
        ranks: W.
        seed: equal on all ranks.

    Returns:
        counts, int32 [W, E].

    Raises:
        ConfigError: an argument is not allowed.
    """
    _check(mode, rows >= 0, "rows", rows, "0 or more")
    rng = np.random.default_rng(seed)
    if mode == "uniform":
        cells = np.full(ranks * experts_per_rank, 1 / (ranks * experts_per_rank))
        drawn = rng.multinomial(rows, cells, size=ranks).reshape(ranks, ranks, experts_per_rank)
        return np.ascontiguousarray(drawn.swapaxes(0, 1).reshape(ranks, -1), np.int32)
    shares = [_SHARES[mode](experts_per_rank, 1, rng) for _ in range(ranks)]
    per_expert = np.concatenate([_apportion(share, rows, rows) for share in shares])  # [E]
    counts = _split(per_expert, ranks)
    if mode == "one_owner_90":
        counts[:, :experts_per_rank] = _mostly_to_one(per_expert[:experts_per_rank], ranks)
    return counts.astype(np.int32)


def _check(mode: str, holds: bool | np.bool_, field: str, value: object, allowed: str) -> None:
    if mode not in MODES:
        raise ConfigError("mode", mode, "one of " + ", ".join(MODES))
    if not holds:
        raise ConfigError(field, value, allowed)


# -- shares of the experts: [experts], not normalised --------------------------------------------


def _power_law(num_experts: int, exponent: float, rng: np.random.Generator) -> np.ndarray:
    return (1.0 + rng.permutation(num_experts)) ** -exponent


def _skew(most: float, num_experts: int, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """Return the power law whose max/mean is `most`, or the highest that can be: a little below E.

    Solves ``E / sum(i**-a, i = 1 .. E) == most`` for the exponent a.
    """
    ratio = min(most, 0.999 * num_experts)
    order = np.arange(1.0, num_experts + 1.0)
    exponent = _bisect(lambda a: num_experts / (order**-a).sum(), ratio, 16.0)
    return _power_law(num_experts, exponent, rng)


def _uneven_shares(uniform: np.ndarray) -> np.ndarray:
    """Map draws from [0, 1) to [0.2, 1.8] with mean 1, moved towards one end just as needed."""
    mean = uniform.mean()
    if mean > 0.5:
        return 0.2 + 1.6 * uniform * (0.5 / mean)
    return 1.8 - 1.6 * (1.0 - uniform) * (0.5 / (1.0 - mean))


def _one_owner_shares(num_experts: int, ranks: int) -> np.ndarray:
    """Return 0.9 spread over the experts of rank 1 (mod W) and 0.1 over all others."""
    owner = np.arange(num_experts) // (num_experts // ranks) == 1 % ranks
    others = max(1, num_experts - np.count_nonzero(owner))
    return np.where(owner, 0.9 / np.count_nonzero(owner), 0.1 / others)


_SHARES: dict[str, Callable[[int, int, np.random.Generator], np.ndarray]] = {
    "balanced": lambda experts, top_k, rng: np.ones(experts),
    "moderate_skew": partial(_skew, 1.75),
    "stress_skew": partial(_skew, 4.0),
    "random_uneven": lambda experts, top_k, rng: _uneven_shares(rng.random(experts)),
    "uniform": lambda experts, top_k, rng: np.ones(experts),
    "first_k": lambda experts, top_k, rng: (np.arange(experts) < top_k) * 1.0,
    "half_empty": lambda experts, top_k, rng: (rng.permutation(experts) >= experts // 2) * 1.0,
    "one_owner_90": lambda experts, top_k, rng: np.ones(experts),
    "power_law": lambda experts, top_k, rng: _power_law(experts, 1.0, rng),
}
MODES = tuple(_SHARES)


def _bisect(rising: Callable[[float], float], value: float, high: float) -> float:
    """Return x in [0, high] where `rising` reaches `value`."""
    low = 0.0
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return high


# -- rows: whole numbers by share, and who they belong to ----------------------------------------


def _apportion(shares: np.ndarray, total: int, most: int) -> np.ndarray:
    """Return int64 rows with this total by largest remainder, none above `most`.

    What exceeds `most` goes to the other experts in proportion to their shares. Needs
    ``most * count_nonzero(shares) >= total``.
    """
    smallest = shares[shares > 0].min()
    scale = _bisect(lambda s: np.minimum(shares * s, most).sum(), total, (most + 1) / smallest)
    exact = np.minimum(shares * scale, most)
    rows = np.floor(exact).astype(np.int64)
    missing = total - int(rows.sum())
    rows[np.argsort(rows - exact, kind="stable")[:missing]] += 1
    return rows


def _deal(shares: np.ndarray, top_k: int, tokens_of: np.ndarray, rank: int) -> np.ndarray:
    """Return int32 [T, k], the experts of one rank's tokens, by shares over all tokens.

    The rows of all tokens form a line, expert after expert. Token number g of G takes the places
    g, g + G, g + 2G, ...: two different experts as long as none has more than G rows. Places that
    are W apart go to one rank, so all ranks see the same proportions.
    """
    total = int(tokens_of.sum())
    repeats = -(-top_k // np.count_nonzero(shares))  # 1 wherever k experts can be distinct
    per_expert = _apportion(shares, total * top_k, total * repeats)
    places = _token_numbers(tokens_of, rank)[:, None] + total * np.arange(top_k)
    return np.searchsorted(per_expert.cumsum(), places, side="right").astype(np.int32)


def _token_numbers(tokens_of: np.ndarray, rank: int) -> np.ndarray:
    """Return int64 [T], global numbers of one rank's tokens, every rank's evenly spread."""
    spread = np.concatenate([(np.arange(count) + 0.5) / count for count in tokens_of.tolist()])
    number = np.empty(len(spread), np.int64)
    number[np.argsort(spread, kind="stable")] = np.arange(len(spread))
    first = int(tokens_of[:rank].sum())
    return number[first : first + int(tokens_of[rank])]


def _draw_distinct(
    rng: np.random.Generator, tokens: int, num_experts: int, top_k: int
) -> np.ndarray:
    """Return int32 [tokens, top_k] distinct experts: the method of Floyd, column by column."""
    ids = np.empty((tokens, top_k), np.int32)
    for column, newest in enumerate(range(num_experts - top_k, num_experts)):
        draw = rng.integers(0, newest + 1, tokens, dtype=np.int32)
        taken = (ids[:, :column] == draw[:, None]).any(axis=1)
        ids[:, column] = np.where(taken, newest, draw)
    return ids


def _split(per_expert: np.ndarray, ranks: int) -> np.ndarray:
    """Return int64 [W, E]: the rows of all experts, dealt to the sources in turn."""
    ends = per_expert.cumsum()
    dealt = (ends + ranks - 1 - np.arange(ranks)[:, None]) // ranks  # [W, E], up to each end
    return np.diff(dealt, axis=1, prepend=0)


def _mostly_to_one(per_expert: np.ndarray, ranks: int) -> np.ndarray:
    """Return int64 [W, E_local]: 90 % of the rows to source 1 (mod W), the rest in turn."""
    favoured = np.diff(per_expert.cumsum() * 9 // 10, prepend=0)
    counts = np.zeros((ranks, per_expert.size), np.int64)
    counts[1 % ranks] = favoured
    others = [source for source in range(ranks) if source != 1 % ranks] or [0]
    counts[others] += _split(per_expert - favoured, len(others))
    return counts
