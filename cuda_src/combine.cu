// Weighted sum over top-k: y[t] = sum_k weights[t, k] * returned[send_row[t, k]].
//
// fp32, in the order of k, one fused multiply-add each, rounded to the element type once: the same
// bits whatever the grid. A masked slot is skipped, not multiplied by zero: its row is not there.
#include "dtype.cuh"
#include "wait_site.cuh"

struct CombineParams {
  unsigned long long* abort;  // the first six fields are the WaitSite
  tileflow::ErrorRecord* record;
  unsigned long long* const* peer_signals;  // [ranks]
  long long timeout_ns;
  int rank;
  int ranks;
  const tileflow::Element* returned_remote;  // [sent_rows, n], rows that peers stored
  const tileflow::Element* returned_local;   // [sent_rows, n], rows that the own GEMM stored
  const int* send_row;                       // [tokens, top_k], -1: masked
  const float* weights;                      // [tokens, top_k]
  tileflow::Element* y;                      // [tokens, n]
  long long n;                               // multiple of 8
  int tokens;
  int top_k;        // at most 32
  int local_first;  // rows local_first .. local_last - 1 are in returned_local
  int local_last;
};
TILEFLOW_CHECK_LAYOUT_CombineParams;

namespace {
using namespace tileflow;

constexpr int kWarpSize = 32;
constexpr unsigned int kAllLanes = 0xffffffffu;
constexpr int kWidth = 8;  // elements of a 16-byte vector
constexpr int kChunk = kWarpSize * kWidth;
constexpr int kBatch = 8;  // rows whose loads are in flight together

struct Sums {
  float value[kWidth] = {};

  __device__ void add(float weight, const uint4& row) {
    const unsigned int words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack2(words[i]);
      value[2 * i] = fmaf(weight, pair.x, value[2 * i]);
      value[2 * i + 1] = fmaf(weight, pair.y, value[2 * i + 1]);
    }
  }

  __device__ uint4 rounded() const {
    return make_uint4(pack2(value[0], value[1]), pack2(value[2], value[3]),
                      pack2(value[4], value[5]), pack2(value[6], value[7]));
  }
};

// Row of slot `slot` of all tokens, null where it is masked.
__device__ inline const Element* row_of_slot(const CombineParams& p, long long slot) {
  const int row = p.send_row[slot];
  if (row < 0) return nullptr;
  const bool local = row >= p.local_first && row < p.local_last;
  return (local ? p.returned_local : p.returned_remote) + row * p.n;
}

// Adds slots k .. k + kBatch - 1, whose rows and weights the lanes of these numbers hold; all loads
// before the first sum. Bit k of `valid`: slot k is not masked. Peers wrote the rows: ordinary
// loads (through L2 only, as no byte is read twice), never `.nc`.
__device__ inline void add_batch(Sums& sums, const Element* row, float weight, unsigned int valid,
                                 int k, int column) {
  uint4 data[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const auto address = __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(row), k + j);
    const auto* from = reinterpret_cast<const Element*>(address) + column;
    if (valid >> (k + j) & 1) data[j] = __ldcg(reinterpret_cast<const uint4*>(from));
  }
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const float w = __shfl_sync(kAllLanes, weight, k + j);
    if (valid >> (k + j) & 1) sums.add(w, data[j]);
  }
}

}  // namespace

// A warp takes 32 vectors of one token, lane k looks slot k up. Once the world is broken rows may be
// missing: nothing more is written, and the record says why `y` is not whole.
extern "C" __global__ void __launch_bounds__(kThreads)
    combine(const __grid_constant__ CombineParams p) {
  if (__any_sync(kAllLanes, is_aborted(site_of(p)))) return;
  constexpr int kWarps = kThreads / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int n = static_cast<int>(p.n);
  const int chunks = (n + kChunk - 1) / kChunk;
  const long long units = static_cast<long long>(p.tokens) * chunks;
  const long long stride = static_cast<long long>(gridDim.x) * kWarps;
  long long unit = static_cast<long long>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  for (; unit < units; unit += stride) {
    const long long token = unit / chunks;
    const int column = static_cast<int>(unit - token * chunks) * kChunk + lane * kWidth;
    const long long slot = token * p.top_k + lane;
    const Element* row = lane < p.top_k ? row_of_slot(p, slot) : nullptr;
    const float weight = lane < p.top_k ? p.weights[slot] : 0.0f;
    const unsigned int valid = __ballot_sync(kAllLanes, row != nullptr);
    Sums sums;
    for (int k = 0; k < p.top_k; k += kBatch) {
      // All lanes must take part: those beyond the row read its last vector and store nothing.
      add_batch(sums, row, weight, valid, k, min(column, n - kWidth));
    }
    if (column < n) *reinterpret_cast<uint4*>(p.y + token * p.n + column) = sums.rounded();
  }
}
