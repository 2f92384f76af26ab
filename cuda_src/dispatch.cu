// Stores every own token at the ranks of its experts: the first all-to-all.
//
// A warp takes one chunk of one token: it loads the chunk once and stores it top_k times. Chunks
// rather than whole rows, so that few wide tokens still fill the GPU.
struct DispatchParams {
  const char* x;              // [tokens, row_bytes]
  const int* topk_ids;        // [tokens, top_k]
  const int* send_row;        // [tokens, top_k], -1: masked
  const int* dispatch_delta;  // [num_experts]
  char* const* peer_recv;     // [ranks], receive buffer of every rank
  long long row_bytes;        // multiple of 16
  int tokens;
  int top_k;  // at most 32
  int experts_local;
  int pad;
};
TILEFLOW_CHECK_LAYOUT_DispatchParams;

namespace {
constexpr int kWarpSize = 32;
constexpr int kVectors = 4;  // 16-byte loads that a lane has in flight
constexpr int kChunk = kWarpSize * kVectors;

// Where the token's row for slot `slot` of all tokens goes; null: nowhere.
__device__ inline char* row_of_slot(const DispatchParams& p, long long slot) {
  const int row = p.send_row[slot];
  if (row < 0) return nullptr;
  const int expert = p.topk_ids[slot];
  const long long recv_row = row + p.dispatch_delta[expert];
  return p.peer_recv[expert / p.experts_local] + recv_row * p.row_bytes;
}

// Vectors first, first + 32, ... (kVectors of them, below `end`) of a row.
struct Chunk {
  int first;
  int end;
  uint4 data[kVectors];

  __device__ void load(const uint4* row) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (first + j * kWarpSize < end) data[j] = __ldcs(row + first + j * kWarpSize);
    }
  }

  __device__ void store(uint4* row) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (first + j * kWarpSize < end) row[first + j * kWarpSize] = data[j];
    }
  }
};

// Stores the warp's chunk to the rows that its first top_k lanes hold.
__device__ inline void scatter(const Chunk& chunk, char* row, int top_k) {
  const auto address = reinterpret_cast<unsigned long long>(row);
  for (int k = 0; k < top_k; ++k) {
    auto* to = reinterpret_cast<uint4*>(__shfl_sync(0xffffffffu, address, k));
    if (to != nullptr) chunk.store(to);
  }
}

}  // namespace

// Says nothing to anybody: `post_signals` does, behind this kernel in the stream.
extern "C" __global__ void __launch_bounds__(kThreads)
    dispatch(const __grid_constant__ DispatchParams p) {
  constexpr int kWarps = kThreads / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int vectors = static_cast<int>(p.row_bytes / 16);
  const int chunks = (vectors + kChunk - 1) / kChunk;
  const long long units = static_cast<long long>(p.tokens) * chunks;
  const long long stride = static_cast<long long>(gridDim.x) * kWarps;
  long long unit = static_cast<long long>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  for (; unit < units; unit += stride) {
    const long long token = unit / chunks;
    Chunk chunk;
    chunk.first = static_cast<int>(unit - token * chunks) * kChunk + lane;
    chunk.end = vectors;
    chunk.load(reinterpret_cast<const uint4*>(p.x + token * p.row_bytes));  // under way meanwhile:
    char* row = lane < p.top_k ? row_of_slot(p, token * p.top_k + lane) : nullptr;
    scatter(chunk, row, p.top_k);
  }
}
