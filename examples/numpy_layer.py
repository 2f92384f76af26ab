"""A layer with NumPy arrays: 4 virtual ranks in one process, or one rank per process.

python examples/numpy_layer.py
mpirun -n 4 python examples/numpy_layer.py
"""

import numpy as np

import tileflow

TOKENS, HIDDEN, FFN, LOCAL_EXPERTS, TOP_K = 64, 256, 512, 2, 2


def main(world):
    """Make this rank's part of a layer and call it; every rank runs this."""
    rng = np.random.default_rng(world.rank)
    experts = LOCAL_EXPERTS * world.size  # expert e lives on rank e // LOCAL_EXPERTS
    w_gate_up = rng.normal(0, HIDDEN**-0.5, (LOCAL_EXPERTS, 2 * FFN, HIDDEN)).astype(np.float16)
    w_down = rng.normal(0, FFN**-0.5, (LOCAL_EXPERTS, HIDDEN, FFN)).astype(np.float16)
    shape = tileflow.MoEShape(HIDDEN, FFN, experts, TOP_K, max_tokens=TOKENS)
    layer = tileflow.MoELayer(world, shape, w_gate_up, w_down)

    x = rng.normal(size=(TOKENS, HIDDEN)).astype(np.float16)
    topk_ids = rng.integers(0, experts, (TOKENS, TOP_K), dtype=np.int32)  # -1 would mask a slot
    topk_weights = np.full((TOKENS, TOP_K), 1 / TOP_K, np.float32)
    y = layer(x, topk_ids, topk_weights)
    norm = np.linalg.norm(y.astype(np.float32))
    print(f"rank {world.rank} of {world.size}: y {y.shape} {y.dtype}, norm {norm:.2f}")


if __name__ == "__main__":
    with tileflow.init(backend="cpu") as opened:
        opened.run(main)
