"""The SM partition stays within what can be resident, and its default follows the cost model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileflow.costmodel import consumer_sms
from tileflow.errors import ConfigError
from tileflow.partition import most_consumer_sms, split

SMS = st.integers(2, 200)
RANKS = st.integers(1, 8)
WORK = st.floats(0, 1e15)


@given(num_sms=SMS, ranks=RANKS, flops=WORK, remote=WORK)
def test_both_kernels_get_sms_and_consumers_of_a_device_leave_room(num_sms, ranks, flops, remote):
    if most_consumer_sms(num_sms, ranks) < 1:
        return
    share = split(num_sms, ranks, None, flops, remote)
    assert share.producer >= 1 and share.consumer >= 1
    assert share.producer + share.consumer == num_sms
    assert share.consumer * ranks < num_sms


@pytest.mark.parametrize("asked", [1, 2, 7, 64, 131])
def test_an_explicit_consumer_share_is_taken_as_it_is(asked):
    assert split(132, 1, asked, 1e12, 1e8).consumer == asked


@pytest.mark.parametrize(("num_sms", "ranks", "asked"), [(132, 1, 132), (132, 4, 33), (8, 2, 4)])
def test_a_share_that_cannot_be_resident_is_refused_with_the_limit(num_sms, ranks, asked):
    with pytest.raises(ConfigError, match=f"at most {(num_sms - 1) // ranks}"):
        split(num_sms, ranks, asked, 1e12, 1e8)


def test_more_ranks_than_sms_on_a_device_are_refused():
    with pytest.raises(ConfigError, match="ranks on one device"):
        split(4, 4, None, 1e12, 1e8)


@given(flops=st.floats(1e6, 1e15), remote=st.floats(1, 1e12))
def test_more_bytes_never_mean_fewer_consumer_sms(flops, remote):
    assert consumer_sms(132, flops, 2 * remote) >= consumer_sms(132, flops, remote)
