"""The `sm` put path: a consumer kernel on reserved SMs, on a stream of its own.

Order on the device, the reason why it cannot hang: the producer is enqueued first, on the caller's
stream; the consumer's stream waits for an event recorded just before the producer, so it holds no
SM through earlier stages; the caller's stream then joins the consumer's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy

from ....partition import Partition
from ...base import Forward

__all__ = ["SmPut"]

Produce = Callable[[Forward, int], None]
Send = Callable[[Forward, int, Any], None]


class SmPut:
    """Runs a producer and a consumer side by side.

    Attributes:
        stream: where consumers run.
    """

    def __init__(self) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._before_producer = cupy.cuda.Event(disable_timing=True)
        self._sent = cupy.cuda.Event(disable_timing=True)

    def overlap(self, forward: Forward, share: Partition, produce: Produce, send: Send) -> None:
        """Enqueue ``produce(forward, sms)`` and, beside it, ``send(forward, sms, stream)``."""
        self._before_producer.record(forward.stream)
        produce(forward, share.producer)
        self.stream.wait_event(self._before_producer)
        send(forward, share.consumer, self.stream)
        self._sent.record(self.stream)
        forward.stream.wait_event(self._sent)
