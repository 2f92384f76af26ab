// The one wait of all kernels: bounded by time, ended by abort, its failure told to the host.
//
// A wait that runs out of time claims the rank's error record, then sets abort here and at every
// reachable peer; a wait that finds abort set ends at once. The record keeps the first failure and
// lies in pinned host memory, so the host reads it while kernels still run.
#pragma once

#include "sync.cuh"

namespace tileflow {

struct ErrorRecord {
  long long state;  // 0: free, 1: being written, 2: complete
  long long kind;   // kWaitBand ... kWaitAborted
  long long rank;
  long long peer;
  long long index;  // band, or global expert of a run; -1: none
  long long expected;
  long long seen;
  long long elapsed_ns;
};
TILEFLOW_CHECK_LAYOUT_ErrorRecord;

// Where a waiting kernel looks for abort and where it reports.
struct WaitSite {
  unsigned long long* abort;  // own abort word: 0, or 1 + the rank that failed first
  ErrorRecord* record;
  unsigned long long* const* peer_signals;  // [ranks], null: that peer has no pointer
  long long timeout_ns;
  int rank;
  int ranks;
};

// The parameters of every kernel that waits begin with these fields.
template <typename Params>
__device__ inline WaitSite site_of(const Params& p) {
  return {p.abort, p.record, p.peer_signals, p.timeout_ns, p.rank, p.ranks};
}

constexpr unsigned int kPollsPerLook = 16;  // polls between looks at the clock and at abort
constexpr unsigned int kLeastNapNs = 32;
constexpr unsigned int kMostNapNs = 256;  // a late look costs less than the polls of many warps

// Fills the record, unless an earlier failure has. Field by field: others may be trying `state`.
__device__ inline void report(const WaitSite& site, const ErrorRecord& failure) {
  ErrorRecord& record = *site.record;
  auto* state = reinterpret_cast<unsigned long long*>(&record.state);
  if (atomicCAS_system(state, 0ull, 1ull) != 0ull) return;
  record.kind = failure.kind;
  record.rank = failure.rank;
  record.peer = failure.peer;
  record.index = failure.index;
  record.expected = failure.expected;
  record.seen = failure.seen;
  record.elapsed_ns = failure.elapsed_ns;
  st_release_sys(state, 2);  // the host sees 2 only with all fields
}

__device__ inline void abort_everywhere(const WaitSite& site) {
  const unsigned long long word = 1ull + site.rank;
  st_release_sys(site.abort, word);
#pragma unroll 1
  for (int peer = 0; peer < site.ranks; ++peer) {
    unsigned long long* signals = site.peer_signals[peer];
    if (peer != site.rank && signals != nullptr) st_release_sys(signals + kAbortWord, word);
  }
}

// Tells whether another rank has failed; if so, the record names it.
__device__ inline bool is_aborted(const WaitSite& site, long long elapsed_ns = 0) {
  const auto word = static_cast<long long>(ld_relaxed_sys(site.abort));
  if (word == 0) return false;
  report(site, {0, kWaitAborted, site.rank, word - 1, -1, 0, word, elapsed_ns});
  return true;
}

// Tells whether a wait must end, and reports why.
template <typename Wait, typename Word>
__device__ inline bool must_end(const WaitSite& site, const Wait& wait, Word seen,
                                unsigned long long start_ns) {
  const auto elapsed = static_cast<long long>(globaltimer_ns() - start_ns);
  if (is_aborted(site, elapsed)) return true;
  if (elapsed <= site.timeout_ns) return false;
  report(site, {0, wait.kind(), site.rank, wait.peer(), wait.index(), wait.expected(),
                static_cast<long long>(seen), elapsed});
  abort_everywhere(site);
  return true;
}

// Polls until the wait is over; false: it failed or the world is broken, and the caller leaves.
//
// A Wait answers read() (an acquire load), reached(word), and for the record kind(), peer(),
// index() and expected(), which are called on failure only.
template <typename Wait>
__device__ inline bool wait_until(const WaitSite& site, const Wait& wait) {
  if (wait.reached(wait.read())) return true;  // the usual case reads no clock
  const unsigned long long start_ns = globaltimer_ns();
  unsigned int nap_ns = kLeastNapNs;
  for (unsigned int polls = 1;; ++polls) {
    __nanosleep(nap_ns);
    const auto seen = wait.read();
    if (wait.reached(seen)) return true;
    if (polls % kPollsPerLook == 0 && must_end(site, wait, seen, start_ns)) return false;
    nap_ns = min(2 * nap_ns, kMostNapNs);
  }
}

}  // namespace tileflow
