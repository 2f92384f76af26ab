"""Words of different kinds never overlap, epochs wrap, records become errors."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileflow.errors import ProtocolTimeout
from tileflow.protocol import (
    ABORT_WORD,
    ERROR_RECORD,
    ControlLayout,
    SignalLayout,
    WaitKind,
    next_epoch,
    reached,
    timeout_from_record,
    wait_until,
)

EPOCHS = st.integers(0, 2**64 - 1)


@given(epoch=EPOCHS, ahead=st.integers(0, 1000), behind=st.integers(1, 1000))
def test_a_word_reaches_its_epoch_and_later_ones_but_no_earlier_one(epoch, ahead, behind):
    assert reached((epoch + ahead) % 2**64, epoch)
    assert not reached((epoch - behind) % 2**64, epoch)


def test_epochs_wrap_after_64_bits():
    assert next_epoch(2**64 - 1) == 0
    assert reached(next_epoch(2**64 - 1), 2**64 - 1)


@given(ranks=st.integers(1, 40), experts=st.integers(1, 300))
def test_signal_words_are_disjoint_and_inside_the_block(ranks, experts):
    layout = SignalLayout(ranks, experts)
    words = [ABORT_WORD]
    words += [layout.dispatched + s for s in range(ranks)]
    words += [layout.done + s for s in range(ranks)]
    words += [layout.arrived + e for e in range(experts)]
    assert len(set(words)) == len(words) and max(words) < layout.num_words


@given(ranks=st.integers(1, 16), experts=st.integers(1, 64), bands=st.integers(0, 500))
def test_control_words_are_disjoint_and_inside_the_block(ranks, experts, bands):
    layout = ControlLayout(ranks, experts, bands)
    words = [layout.producer_ticket, layout.consumer_ticket]
    words += [layout.run_counters + i for i in range(experts * ranks)]
    words += [layout.owner_counters + s for s in range(ranks)]
    words += [layout.band_counters + b for b in range(bands)]
    assert len(set(words)) == len(words) and max(words) < layout.num_words


def test_only_a_complete_record_becomes_an_error():
    record = np.zeros(1, ERROR_RECORD)
    assert timeout_from_record(record) is None
    record[0] = (1, WaitKind.RETURN, 2, 3, 17, 9, 8, 2_500_000_000)
    assert timeout_from_record(record) is None
    record["state"] = 2
    error = timeout_from_record(record)
    assert (error.what, error.rank, error.peer, error.index) == ("return", 2, 3, 17)
    assert (error.expected, error.seen, error.seconds) == (9, 8, 2.5)


def failing(kind, peer):
    return ProtocolTimeout("aborted" if kind else "band", rank=0, peer=peer)


def test_a_wait_ends_in_time_and_says_so():
    started = time.monotonic()
    with pytest.raises(ProtocolTimeout) as caught:
        wait_until(lambda: False, timeout_s=0.05, aborted=lambda: 0, on_fail=failing)
    assert caught.value.what == "band" and time.monotonic() - started < 5


def test_a_wait_ends_at_once_when_another_rank_failed():
    with pytest.raises(ProtocolTimeout) as caught:
        wait_until(lambda: False, timeout_s=60, aborted=lambda: 4, on_fail=failing)
    assert (caught.value.what, caught.value.peer) == ("aborted", 3)


def test_a_wait_whose_word_is_there_ignores_abort():
    wait_until(lambda: True, timeout_s=0, aborted=lambda: 1, on_fail=failing)
