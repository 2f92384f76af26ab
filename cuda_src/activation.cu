// SwiGLU between the two expert GEMMs: out = silu(gate) * up, in fp32, rounded once.
#include "activation.cuh"
#include "dtype.cuh"

struct ActivationParams {
  const tileflow::Element* gate_up;  // [rows, 2 * ffn]: gate columns, then up columns
  tileflow::Element* out;            // [rows, ffn]
  long long rows;
  int ffn;  // multiple of 8
  int pad;
};
TILEFLOW_CHECK_LAYOUT_ActivationParams;

namespace {
using namespace tileflow;

constexpr int kWarpSize = 32;
constexpr int kWidth = 8;    // elements of a 16-byte vector
constexpr int kVectors = 2;  // pairs of loads that a lane has in flight
constexpr int kChunk = kWarpSize * kVectors * kWidth;

__device__ inline unsigned int gated2(unsigned int gate, unsigned int up) {
  const float2 g = unpack2(gate);
  const float2 u = unpack2(up);
  return pack2(gated(g.x, u.x), gated(g.y, u.y));
}

__device__ inline uint4 gated8(const uint4& gate, const uint4& up) {
  return make_uint4(gated2(gate.x, up.x), gated2(gate.y, up.y), gated2(gate.z, up.z),
                    gated2(gate.w, up.w));
}

__device__ inline const uint4& vector_at(const Element* row, int column) {
  return *reinterpret_cast<const uint4*>(row + column);
}

// Columns first, first + 32 vectors, ... (kVectors of them, below ffn) of one row.
__device__ inline void activate(const Element* gate_up, Element* out, int ffn, int first) {
  uint4 gate[kVectors];
  uint4 up[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int column = first + j * kWarpSize * kWidth;
    if (column < ffn) {
      gate[j] = vector_at(gate_up, column);
      up[j] = vector_at(gate_up + ffn, column);
    }
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int column = first + j * kWarpSize * kWidth;
    if (column < ffn) *reinterpret_cast<uint4*>(out + column) = gated8(gate[j], up[j]);
  }
}

}  // namespace

// A warp takes one chunk of one row.
extern "C" __global__ void __launch_bounds__(kThreads)
    swiglu(const __grid_constant__ ActivationParams p) {
  constexpr int kWarps = kThreads / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int chunks = (p.ffn + kChunk - 1) / kChunk;
  const long long stride = static_cast<long long>(gridDim.x) * kWarps;
  long long unit = static_cast<long long>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  for (; unit < p.rows * chunks; unit += stride) {
    const long long row = unit / chunks;
    const int first = static_cast<int>(unit - row * chunks) * kChunk + lane * kWidth;
    activate(p.gate_up + row * 2 * p.ffn, p.out + row * p.ffn, p.ffn, first);
  }
}
