// Sends finished rows to their owners while the producer still runs: the `sm` put path.
//
// An item is one of `parts` shares of a segment; CTAs claim items in order by ticket. Warp roles,
// so that neither the wait for the next item nor the election behind the last one stops the copy:
//   warp 0   claim: takes a ticket, waits for the segment's bands, describes the copy in a box
//   warp 1   post: counts the copied item; who completes a run or an owner sets the signal
//   others   copy
// The CTA is one item ahead in claiming and one behind in posting.
#include "plan.cuh"
#include "wait_site.cuh"

struct ConsumerParams {
  unsigned long long* abort;  // the first six fields: tileflow::WaitSite
  tileflow::ErrorRecord* record;
  unsigned long long* const* peer_signals;  // [ranks]
  long long timeout_ns;
  int rank;
  int ranks;
  const tileflow::Segment* segments;  // [num_segments]
  const tileflow::Band* bands;
  const unsigned int* band_flags;  // [num_bands]
  unsigned int* ticket;            // zero at launch, like the two arrays of counters
  unsigned int* run_counters;      // [experts_local * ranks]
  unsigned int* owner_counters;    // [ranks]
  const char* staging;             // [rows, row_bytes]
  char* const* peer_returned;      // [ranks], return slot of every rank
  const int* owner_segments;       // [ranks]; -1: served by another put path
  long long row_bytes;             // multiple of 16
  unsigned long long post_epoch;
  int num_segments;
  int parts;
  int done_word;     // index of done[rank] in the owner's signal words
  int arrived_word;  // index of arrived[0]
};
TILEFLOW_CHECK_LAYOUT_ConsumerParams;

namespace {
using namespace tileflow;

constexpr int kWarpSize = 32;
constexpr int kServiceThreads = 2 * kWarpSize;
constexpr int kCopyThreads = kThreads - kServiceThreads;
constexpr int kInFlight = 8;     // 16-byte loads that a thread has in flight
constexpr int kLineVectors = 8;  // parts begin at steps of 128 bytes, so that no two share a line
constexpr unsigned int kAllLanes = 0xffffffffu;
constexpr unsigned int kBoxes = 4;
static_assert(kCopyThreads >= kWarpSize, "two warps serve, at least one copies");

// What to copy, from the claiming warp to the others. The claiming warp fills a box while the
// copying warps empty the one before and the posting warp may still be at the one before that:
// three boxes at least.
struct Box {
  const uint4* from;
  uint4* to;
  int num_vectors;  // of 16 bytes
  int segment;      // -1: no more items
};

__device__ inline void item_is_ready() { named_barrier_sync<1, kCopyThreads + kWarpSize>(); }
__device__ inline void item_is_copied() { named_barrier_sync<2, kCopyThreads + kWarpSize>(); }

struct BandWait {
  const unsigned int* flag;
  int rank;
  int band;
  int target;
  __device__ unsigned int read() const { return ld_acquire_gpu(flag); }
  __device__ bool reached(unsigned int arrivals) const {
    return arrivals >= static_cast<unsigned int>(target);
  }
  __device__ int kind() const { return kWaitBand; }
  __device__ int peer() const { return rank; }
  __device__ int index() const { return band; }
  __device__ int expected() const { return target; }
};

// One lane per band. The acquires reach the copying warps through the barrier behind this.
__device__ inline bool wait_for_bands(const ConsumerParams& p, const Segment& segment, int lane) {
  bool full = true;
  for (int i = lane; i < segment.num_bands && full; i += kWarpSize) {
    const int band = segment.band_first + i;
    const BandWait wait{p.band_flags + band, p.rank, band, p.bands[band].target};
    full = wait_until(site_of(p), wait);
  }
  return __all_sync(kAllLanes, full);
}

// Share `part` of a segment, in whole 16-byte vectors; the last ones may be short or empty.
__device__ inline Box box_of(const ConsumerParams& p, const Segment& segment, int index, int part) {
  const long long total = segment.num_rows * (p.row_bytes / 16);
  const long long even = (total + p.parts - 1) / p.parts;
  const long long share = (even + kLineVectors - 1) / kLineVectors * kLineVectors;
  const long long first = min(part * share, total);
  const char* from = p.staging + segment.src_row * p.row_bytes;
  char* to = p.peer_returned[segment.owner] + segment.dst_row * p.row_bytes;
  return {reinterpret_cast<const uint4*>(from) + first, reinterpret_cast<uint4*>(to) + first,
          static_cast<int>(min(share, total - first)), index};
}

__device__ inline int next_ticket(unsigned int* ticket, int lane) {
  unsigned int claimed = 0;
  if (lane == 0) claimed = atomicAdd(ticket, 1u);
  return static_cast<int>(__shfl_sync(kAllLanes, claimed, 0));
}

__device__ inline void claim_items(const ConsumerParams& p, Box* boxes, int lane) {
  for (unsigned int i = 0;; ++i) {
    const int item = next_ticket(p.ticket, lane);
    const int index = item / p.parts;
    Box box{nullptr, nullptr, 0, -1};
    if (index < p.num_segments) {
      const Segment segment = p.segments[index];
      if (wait_for_bands(p, segment, lane)) box = box_of(p, segment, index, item % p.parts);
    }
    if (lane == 0) boxes[i % kBoxes] = box;
    item_is_ready();
    if (box.segment < 0) return;
  }
}

// Copies vectors first, first + kCopyThreads, ... (kCount of them), all loads before any store.
// kWhole: none of them lies beyond the end. Loads pass by L1: a line there may hold bytes of the
// next segment from before they were written.
template <int kCount, bool kWhole>
__device__ inline void sweep(const Box& box, int first) {
  const int left = box.num_vectors - first;
  uint4 data[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if (kWhole || j * kCopyThreads < left) data[j] = __ldcg(box.from + first + j * kCopyThreads);
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if (kWhole || j * kCopyThreads < left) __stcs(box.to + first + j * kCopyThreads, data[j]);
  }
}

// The last, partial sweep takes half as many at a time: its comparisons need registers too.
__device__ inline void copy(const Box& box, int thread) {
  constexpr int kLast = (kInFlight - 1) * kCopyThreads;
  int i = thread;
#pragma unroll 1
  for (; i + kLast < box.num_vectors; i += kInFlight * kCopyThreads) sweep<kInFlight, true>(box, i);
#pragma unroll 1
  for (; i < box.num_vectors; i += kInFlight / 2 * kCopyThreads) {
    sweep<kInFlight / 2, false>(box, i);
  }
}

__device__ inline void copy_items(const Box* boxes, int thread) {
  for (unsigned int i = 0;; ++i) {
    item_is_ready();
    const Box box = boxes[i % kBoxes];
    copy(box, thread);
    item_is_copied();
    if (box.segment < 0) return;
  }
}

// Sets a signal at a peer, unless the world is broken.
__device__ inline void post(const ConsumerParams& p, int owner, int word) {
  unsigned long long* signals = p.peer_signals[owner];
  if (signals == nullptr || ld_relaxed_sys(p.abort) != 0) return;
  st_release_sys(signals + word, p.post_epoch);
}

// Counts one copied item. What makes a signal stand for rows that other CTAs stored:
//   stores -> item_is_copied -> add to the run's counter -> (last item of the run) add to the
//   owner's counter -> (last run of the owner) signal.
// Each arrow synchronises at CTA or GPU scope and causality is transitive, so the signal's release
// at system scope covers all of them. The adds need no wider scope, even for stores to a peer:
// only threads of this GPU meet there. A run adds to its owner's counter at once and behind its own
// signal, so done implies all arrivals.
__device__ inline void post_item(const ConsumerParams& p, const Segment& segment) {
  const unsigned int run_items = segment.run_segments * p.parts;
  const unsigned int owner_items = segment.owner_segments * p.parts;
  if (atom_acq_rel_gpu_add(p.run_counters + segment.run, 1) + 1 != run_items) return;
  post(p, segment.owner, p.arrived_word + segment.expert);
  unsigned int* owner_counter = p.owner_counters + segment.owner;
  if (atom_acq_rel_gpu_add(owner_counter, run_items) + run_items != owner_items) return;
  post(p, segment.owner, p.done_word);
}

__device__ inline void post_items(const ConsumerParams& p, const Box* boxes, int lane) {
  for (unsigned int i = 0;; ++i) {
    item_is_copied();
    const int index = boxes[i % kBoxes].segment;
    if (index < 0) return;
    if (lane == 0) post_item(p, p.segments[index]);
  }
}

// Owners that get no rows wait for done too; for them it says that the kernels before this one,
// the readers of the receive buffer, have ended. An owner with -1 segments is not this kernel's.
__device__ inline void post_empty_owners(const ConsumerParams& p, int lane) {
#pragma unroll 1
  for (int owner = lane; owner < p.ranks; owner += kWarpSize) {
    if (owner != p.rank && p.owner_segments[owner] == 0) post(p, owner, p.done_word);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    consumer(const __grid_constant__ ConsumerParams p) {
  __shared__ Box boxes[kBoxes];
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  if (warp == 0) {
    claim_items(p, boxes, lane);
  } else if (warp == 1) {
    if (blockIdx.x == 0) post_empty_owners(p, lane);
    post_items(p, boxes, lane);
  } else {
    copy_items(boxes, threadIdx.x - kServiceThreads);
  }
}
