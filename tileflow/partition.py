"""The SM partition: how many CTAs the producer and the consumer get.

Producer and consumer CTAs each fill an SM, so a partition is valid if both fit at once. Ranks that
share a device may all have their consumers resident; those spin for producers that also need SMs,
so together they must stay below the device's SM count.
"""

from __future__ import annotations

from dataclasses import dataclass

from .costmodel import consumer_sms
from .errors import ConfigError

__all__ = ["Partition", "most_consumer_sms", "split"]


@dataclass(frozen=True)
class Partition:
    """CTAs (one per SM) of the two kernels; in serial mode each has all SMs in its turn."""

    producer: int
    consumer: int


def most_consumer_sms(num_sms: int, sharing_ranks: int) -> int:
    """Return the most consumer SMs that leave every sharing rank's producer room."""
    return (num_sms - 1) // sharing_ranks


def split(
    num_sms: int,
    sharing_ranks: int,
    asked: int | None,
    flops: float,
    remote_bytes: float,
    link: str | None = None,
) -> Partition:
    """Return the partition of an overlapped forward.

    Args:
        num_sms: SMs that this rank sees.
        sharing_ranks: ranks on the same device.
        asked: ``Config.consumer_sms``; None takes the cost model's choice.
        flops: of the GEMM.
        remote_bytes: that leave this rank.
        link: ``World.link``.

    Raises:
        ConfigError: `asked` cannot be resident beside a producer.
    """
    most = most_consumer_sms(num_sms, sharing_ranks)
    if most < 1:
        raise ConfigError("ranks on one device", sharing_ranks, f"at most {num_sms - 1}")
    if asked is not None and asked > most:
        allowed = f"at most {most}: {num_sms} SMs, {sharing_ranks} rank(s) on this device"
        raise ConfigError("Config.consumer_sms", asked, allowed)
    chosen = consumer_sms(num_sms, flops, remote_bytes, link) if asked is None else asked
    consumer = min(most, chosen)
    return Partition(num_sms - consumer, consumer)
