// Words between ranks that no other kernel posts or awaits on its way: one warp each.
//
// `post_signals` tells every peer that what ran before it in the stream has been stored there;
// `wait_signals` holds its stream until every peer has said so. One warp, so that a rank which
// waits takes no room from a peer on the same GPU whose kernels it waits for.
#include "wait_site.cuh"

struct SignalParams {
  unsigned long long* const* peer_signals;  // [ranks], null: that peer has no pointer
  const unsigned long long* abort;
  unsigned long long post_epoch;
  int word;  // index of the word to set at every peer
  int rank;
  int ranks;
  int pad;
};
TILEFLOW_CHECK_LAYOUT_SignalParams;

struct WaitParams {
  unsigned long long* abort;  // the first six fields: tileflow::WaitSite
  tileflow::ErrorRecord* record;
  unsigned long long* const* peer_signals;  // [ranks]
  long long timeout_ns;
  int rank;
  int ranks;
  const unsigned long long* signals;  // own signal words
  const int* expected_rows;           // [num_experts] rows that return here, null: not a return
  unsigned long long epoch;
  int word;  // word + src is awaited for every src != rank
  int arrived_word;
  int experts_local;
  int kind;
};
TILEFLOW_CHECK_LAYOUT_WaitParams;

namespace {
using namespace tileflow;

constexpr int kWarpSize = 32;

// Distances wrap, so epochs may.
__device__ inline bool has_reached(unsigned long long word, unsigned long long epoch) {
  return static_cast<long long>(word - epoch) >= 0;
}

// First expert of `src` whose rows are due and have not arrived, -1 where there is none.
__device__ inline int first_missing_run(const WaitParams& p, int src) {
  if (p.expected_rows == nullptr) return -1;
  const unsigned long long* arrived = p.signals + p.arrived_word;
  const int first = src * p.experts_local;
  for (int e = first; e < first + p.experts_local; ++e) {
    if (p.expected_rows[e] > 0 && !has_reached(ld_relaxed_sys(arrived + e), p.epoch)) return e;
  }
  return -1;
}

struct SignalWait {
  const WaitParams& p;
  int src;
  __device__ unsigned long long read() const { return ld_acquire_sys(p.signals + p.word + src); }
  __device__ bool reached(unsigned long long word) const { return has_reached(word, p.epoch); }
  __device__ int kind() const { return p.kind; }
  __device__ int peer() const { return src; }
  __device__ int index() const { return p.kind == kWaitReturn ? first_missing_run(p, src) : -1; }
  __device__ long long expected() const { return static_cast<long long>(p.epoch); }
};

}  // namespace

// The end of the kernel before this one in the stream synchronises with the start of this one, at
// every scope; the release is cumulative and system-wide. So it covers all stores of that kernel,
// to whatever GPU, and no further fence is needed.
extern "C" __global__ void __launch_bounds__(kWarpSize)
    post_signals(const __grid_constant__ SignalParams p) {
  if (ld_relaxed_sys(p.abort) != 0) return;
#pragma unroll 1
  for (int peer = threadIdx.x; peer < p.ranks; peer += kWarpSize) {
    unsigned long long* signals = p.peer_signals[peer];
    if (peer != p.rank && signals != nullptr) st_release_sys(signals + p.word, p.post_epoch);
  }
}

// Lane l waits for peers l, l + 32, ... A failed wait ends the kernel: the record and the abort
// word tell the host and the kernels behind this one.
extern "C" __global__ void __launch_bounds__(kWarpSize)
    wait_signals(const __grid_constant__ WaitParams p) {
  for (int src = threadIdx.x; src < p.ranks; src += kWarpSize) {
    if (src != p.rank && !wait_until(site_of(p), SignalWait{p, src})) return;
  }
  // What follows in the stream may read the rows, or write over a slot that was read, by TMA.
  fence_proxy_async_global();
}
