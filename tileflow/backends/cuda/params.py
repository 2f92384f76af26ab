"""Kernel parameter structs: the NumPy side of each ``struct XParams`` in ``cuda_src``.

A kernel takes one struct by value. CuPy passes a 0-d structured array as such, so these dtypes
must have the size and the offsets that the C++ compiler chose; :func:`layout_checks` turns them
into ``static_assert`` lines that every compilation evaluates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["STRUCTS", "layout_checks", "pack", "struct"]

TENSOR_MAP = (np.uint64, (16,))  # CUtensorMap, 128 bytes, aligned to 64
_POINTER, _I32, _I64, _U64 = np.uint64, np.int32, np.int64, np.uint64


def struct(fields: Sequence[tuple]) -> np.dtype:
    """Return an aligned dtype, its size a multiple of 64 where it holds tensor maps."""
    dtype = np.dtype(list(fields), align=True)
    if not any(field[1] is TENSOR_MAP[0] and field[2:] == (TENSOR_MAP[1],) for field in fields):
        return dtype
    names = list(dtype.names or ())
    return np.dtype(
        {
            "names": names,
            "formats": [dtype.fields[n][0] for n in names],  # type: ignore[index]
            "offsets": [dtype.fields[n][1] for n in names],  # type: ignore[index]
            "itemsize": -(-dtype.itemsize // 64) * 64,
        }
    )


PRODUCER = struct(
    [
        ("map_a", *TENSOR_MAP),  # input rows [rows, k]           (sm_90a only)
        ("map_b", *TENSOR_MAP),  # weights [experts * n, k]       (sm_90a only)
        ("map_staging", *TENSOR_MAP),  # staging rows [rows, n]   (sm_90a only)
        ("map_local", *TENSOR_MAP),  # own return rows [rows, n]  (sm_90a only)
        ("a", _POINTER),  # input rows                 [a_rows, k]
        ("b", _POINTER),  # weights                    [num_experts_local * n, k]
        ("staging", _POINTER),  # rows of other owners [a_rows, n]
        ("local", _POINTER),  # own return buffer      [*, n]
        ("bands", _POINTER),  # Band                   [num_bands]
        ("schedule", _POINTER),  # ScheduleEntry       [num_bands]
        ("ticket", _POINTER),  # uint32, zero at launch
        ("band_flags", _POINTER),  # uint32            [num_bands], null: raise no flags
        ("num_tiles", _I32),
        ("tiles_n", _I32),
        ("n", _I32),
        ("k", _I32),
        ("a_rows", _I32),
        ("all_to_staging", _I32),  # 1: own rows go to staging too (first expert GEMM)
    ]
)

# What every kernel that waits needs: where to look for abort and where to report.
WAIT_SITE = [
    ("abort", _POINTER),  # uint64, own abort word
    ("record", _POINTER),  # ErrorRecord in pinned host memory
    ("peer_signals", _POINTER),  # uint64*            [ranks], signal words of every rank
    ("timeout_ns", _I64),
    ("rank", _I32),
    ("ranks", _I32),
]

CONSUMER = struct(
    [
        *WAIT_SITE,
        ("segments", _POINTER),  # Segment            [num_segments]
        ("bands", _POINTER),  # Band                  [num_bands]
        ("band_flags", _POINTER),  # uint32           [num_bands]
        ("ticket", _POINTER),  # uint32, zero at launch
        ("run_counters", _POINTER),  # uint32         [experts_local * ranks], zero at launch
        ("owner_counters", _POINTER),  # uint32       [ranks], zero at launch
        ("staging", _POINTER),  # source rows         [rows, row_bytes]
        ("peer_returned", _POINTER),  # void*         [ranks], return slot of every rank
        ("owner_segments", _POINTER),  # int32        [ranks], segments to each owner
        ("row_bytes", _I64),
        ("post_epoch", _U64),  # value that arrival signals are set to
        ("num_segments", _I32),
        ("parts", _I32),  # each segment is cut in so many items
        ("done_word", _I32),  # index of done[rank] in the signal words
        ("arrived_word", _I32),  # index of arrived[0]
    ]
)

DISPATCH = struct(
    [
        ("x", _POINTER),  # own tokens                [tokens, row_bytes]
        ("topk_ids", _POINTER),  # int32              [tokens, top_k]
        ("send_row", _POINTER),  # int32              [tokens, top_k], -1: masked
        ("dispatch_delta", _POINTER),  # int32        [num_experts]
        ("peer_recv", _POINTER),  # void*             [ranks], receive buffer of every rank
        ("row_bytes", _I64),
        ("tokens", _I32),
        ("top_k", _I32),
        ("experts_local", _I32),
        ("pad", _I32),
    ]
)

SIGNAL = struct(
    [
        ("peer_signals", _POINTER),  # uint64*        [ranks]
        ("abort", _POINTER),
        ("post_epoch", _U64),
        ("word", _I32),  # index of the word to set at every peer
        ("rank", _I32),
        ("ranks", _I32),
        ("pad", _I32),
    ]
)

WAIT = struct(
    [
        *WAIT_SITE,
        ("signals", _POINTER),  # uint64, own signal words
        ("expected_rows", _POINTER),  # int32         [num_experts], null: not a return
        ("epoch", _U64),
        ("word", _I32),  # index of the first awaited word; word + src is awaited for src != rank
        ("arrived_word", _I32),  # index of arrived[0], to name the missing run
        ("experts_local", _I32),
        ("kind", _I32),  # WaitKind
    ]
)

ACTIVATION = struct(
    [
        ("gate_up", _POINTER),  # [rows, 2 * ffn]: gate columns, then up columns
        ("out", _POINTER),  # [rows, ffn]
        ("rows", _I64),
        ("ffn", _I32),
        ("pad", _I32),
    ]
)

COMBINE = struct(
    [
        *WAIT_SITE,
        ("returned_remote", _POINTER),  # rows that peers stored   [sent_rows, row_bytes]
        ("returned_local", _POINTER),  # rows that the own GEMM stored, same row numbers
        ("send_row", _POINTER),  # int32              [tokens, top_k], -1: masked
        ("weights", _POINTER),  # float32             [tokens, top_k]
        ("y", _POINTER),  # [tokens, n]
        ("n", _I64),
        ("tokens", _I32),
        ("top_k", _I32),
        ("local_first", _I32),  # rows local_first .. local_last - 1 are in returned_local
        ("local_last", _I32),
    ]
)

DELAY = struct([("nanoseconds", _I64)])

STRUCTS: dict[str, np.dtype] = {
    "ProducerParams": PRODUCER,
    "ConsumerParams": CONSUMER,
    "DispatchParams": DISPATCH,
    "SignalParams": SIGNAL,
    "WaitParams": WAIT,
    "ActivationParams": ACTIVATION,
    "CombineParams": COMBINE,
    "DelayParams": DELAY,
}


def layout_checks(name: str, dtype: np.dtype) -> str:
    """Return ``#define TILEFLOW_CHECK_LAYOUT_<name>``: static_asserts of size and offsets."""
    lines = [f'static_assert(sizeof({name}) == {dtype.itemsize}, "size of {name}");']
    for field in dtype.names or ():
        offset = dtype.fields[field][1]  # type: ignore[index]
        # NVRTC 13.0 has no __builtin_offsetof; its constant folder knows this intrinsic.
        address = f"__INTADDR__(&(static_cast<{name}*>(nullptr))->{field})"
        lines.append(f'static_assert({address} == {offset}, "{name}.{field}");')
    return f"#define TILEFLOW_CHECK_LAYOUT_{name} \\\n  " + " \\\n  ".join(lines) + "\n"


def pack(dtype: np.dtype, **values: object) -> np.ndarray:
    """Return a 0-d structured array with every field set; KeyError where one is missing."""
    params = np.zeros((), dtype)
    for field in dtype.names or ():
        if field != "pad":
            params[field] = values.pop(field)
    if values:
        raise KeyError(f"unknown parameters {sorted(values)}")
    return params
