"""A whole forward on row numbers: what leaves a rank comes home to where it left from."""

import numpy as np
import pytest
from hypothesis import given, settings
from test_plan import LAYOUTS, PROPERTY, RANKS, cases, config_for, plans

from tileflow.routing import MODES, make_routing, place_rows

EMPTY = -1


def dispatch(all_plans, sent):
    """Store every send row at its expert's rank; return the receive buffers."""
    received = [np.full(rows, EMPTY) for rows in all_plans[0].recv_rows]
    for plan, rows in zip(all_plans, sent, strict=True):
        experts = np.arange(plan.config.num_experts).repeat(plan.counts[plan.rank])
        targets = np.arange(plan.sent_rows) + plan.dispatch_delta[experts]
        for row, expert, target in zip(rows, experts, targets, strict=True):
            buffer = received[expert // plan.config.experts_per_rank]
            assert buffer[target] == EMPTY
            buffer[target] = row
    return received


def compute(plan, received, returned):
    """Store own rows at home and the others in staging, band by band; return the staging rows."""
    staging = np.full(len(received), EMPTY)
    for band in plan.bands[plan.schedule["band"]]:
        row, remote, last = band["row"], band["num_remote"], band["num_rows"]
        staging[row : row + remote] = received[row : row + remote]
        store(returned, band["local_row"], received[row + remote : row + last])
    return staging


def send(plan, staging, all_returned):
    """Put every segment at its owner."""
    for segment in plan.segments:
        first = segment["src_row"]
        rows = staging[first : first + segment["num_rows"]]
        store(all_returned[segment["owner"]], segment["dst_row"], rows)


def store(buffer, first, rows):
    """Write rows to where nothing has been written yet."""
    assert first + len(rows) <= len(buffer)
    assert (buffer[first : first + len(rows)] == EMPTY).all()
    buffer[first : first + len(rows)] = rows


def forward(counts, config):
    """Send numbered rows around; return (sent, returned) of every rank."""
    all_plans = plans(counts, config)
    sent = [10**6 * plan.rank + np.arange(plan.sent_rows) for plan in all_plans]
    returned = [np.full(plan.sent_rows, EMPTY) for plan in all_plans]
    received = dispatch(all_plans, sent)
    for plan in all_plans:
        staging = compute(plan, received[plan.rank], returned[plan.rank])
        send(plan, staging, returned)
    return sent, returned


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_row_returns_once_to_its_own_index(ranks, layout):
    @settings(PROPERTY, max_examples=20)
    @given(cases(layouts=(layout,), ranks=(ranks,)))
    def comes_home(case):
        for sent, returned in zip(*forward(*case), strict=True):
            assert np.array_equal(sent, returned)

    comes_home()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_planned_where_nobody_has_rows(layout):
    counts = np.zeros((3, 6), np.int32)
    for plan in plans(counts, config_for(counts, layout=layout)):
        assert (plan.num_bands, plan.num_tiles, plan.num_segments) == (0, 0, 0)
        assert plan.local_range == (0, 0) and not plan.recv_rows.any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_every_row_returns_in_every_router_mode(mode, layout):
    tokens, experts = [40, 0, 7], 12
    rows = [
        make_routing(mode, tokens=tokens, num_experts=experts, top_k=3, ranks=3, rank=r, seed=1)[0]
        for r in range(3)
    ]
    counts = np.stack([place_rows(ids, experts)[0] for ids in rows])
    for sent, returned in zip(*forward(counts, config_for(counts, layout=layout)), strict=True):
        assert np.array_equal(sent, returned)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masked_slots_and_repeated_experts_find_their_rows(layout):
    ids = [np.array([[3, 3, -1], [-1, -1, -1], [0, 3, 1]]), np.array([[-1, 2, 2]])]
    counts, send_row = zip(*(place_rows(i, 4) for i in ids), strict=True)
    sent, returned = forward(np.stack(counts), config_for(np.stack(counts), layout=layout))
    for rank in range(2):
        here = send_row[rank] >= 0
        assert np.array_equal(here, ids[rank] >= 0)
        gathered = returned[rank][send_row[rank][here]]
        assert sorted(gathered) == sorted(sent[rank])
        assert np.array_equal(gathered - 10**6 * rank, send_row[rank][here])
