"""A layer with CuPy arrays on a stream of one's own: virtual ranks on one GPU, or a GPU per rank.

python examples/cupy_layer.py
mpirun -n 4 python examples/cupy_layer.py
"""

import cupy as cp

import tileflow

TOKENS, HIDDEN, FFN, LOCAL_EXPERTS, TOP_K = 1024, 2048, 1024, 4, 4


def main(world):
    """Make this rank's part of a layer and call it; every rank runs this."""
    rng = cp.random.RandomState(world.rank)
    experts = LOCAL_EXPERTS * world.size  # expert e lives on rank e // LOCAL_EXPERTS
    w_gate_up = rng.normal(0, HIDDEN**-0.5, (LOCAL_EXPERTS, 2 * FFN, HIDDEN), cp.float32)
    w_down = rng.normal(0, FFN**-0.5, (LOCAL_EXPERTS, HIDDEN, FFN), cp.float32)
    shape = tileflow.MoEShape(HIDDEN, FFN, experts, TOP_K, max_tokens=TOKENS)
    half = cp.float16
    layer = tileflow.MoELayer(world, shape, w_gate_up.astype(half), w_down.astype(half))
    layer.warmup()  # compiles and loads the kernels

    x = rng.normal(size=(TOKENS, HIDDEN), dtype=cp.float32).astype(half)
    topk_ids = rng.randint(0, experts, (TOKENS, TOP_K)).astype(cp.int32)  # -1 would mask a slot
    topk_weights = cp.full((TOKENS, TOP_K), 1 / TOP_K, cp.float32)
    stream = cp.cuda.Stream(non_blocking=True)
    stream.wait_event(cp.cuda.get_current_stream().record())  # the inputs are ready
    y = layer(x, topk_ids, topk_weights, stream=stream)
    stream.synchronize()  # y is ordered by that stream
    norm = float(cp.linalg.norm(y.astype(cp.float32)))
    print(f"rank {world.rank} of {world.size}: y {y.shape} {y.dtype}, norm {norm:.2f}")


if __name__ == "__main__":
    with tileflow.init(backend="cuda") as opened:
        opened.run(main)
