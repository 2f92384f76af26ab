// The activation between the two expert GEMMs, in fp32.
#pragma once

namespace tileflow {

// silu(gate) * up. exp overflows to infinity for a gate below -88, which gives the right limit, -0.
__device__ inline float gated(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

}  // namespace tileflow
