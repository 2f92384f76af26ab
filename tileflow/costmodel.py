"""Closed-form times of the GEMM and the send, as a function of the SMs that each gets.

Rates are per SM, measured on one H200 (docs/measurements.md). They only choose defaults; results
do not depend on them.
"""

from __future__ import annotations

import math

__all__ = ["consumer_sms"]

GEMM_FLOPS_PER_SM = 5.2e12  # wgmma, 2-byte inputs, fp32 sums
SEND_BYTES_PER_SM = 28e9  # beside a GEMM; alone it is 46e9
LINK_BYTES = {"host": 52e9}  # per second, of links that a few SMs saturate


def consumer_sms(num_sms: int, flops: float, remote_bytes: float, link: str | None = None) -> int:
    """Return the consumer's share of `num_sms` at which GEMM and send take equally long.

    With c consumer SMs the GEMM takes ``flops / (F (S - c))`` and the send ``bytes / (B c)``; they
    are equal at ``c = S * bytes/B / (flops/F + bytes/B)``. Rounded up, since a late send is wholly
    exposed while one SM more costs the GEMM 1/S; not more than the link can take.

    Args:
        num_sms: SMs to share.
        flops: floating-point operations of the GEMM.
        remote_bytes: bytes to send.
        link: ``World.link``.
    """
    gemm, send = flops / GEMM_FLOPS_PER_SM, remote_bytes / SEND_BYTES_PER_SM
    if gemm + send <= 0:
        return 1
    useful = num_sms
    if link in LINK_BYTES:
        useful = math.ceil(LINK_BYTES[link] / SEND_BYTES_PER_SM)
    return min(num_sms - 1, useful, int(num_sms * send / (gemm + send)) + 2)
