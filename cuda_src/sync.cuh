// Every instruction that orders memory, each with the reason why it is the weakest that will do.
//
// Scopes: `.gpu` between threads of one rank's kernels, `.sys` for words that another rank or the
// host reads. Causality is transitive over scopes: what a thread has acquired at .gpu scope, its
// later .sys release passes on. Every asm clobbers "memory", so the compiler moves no access
// across. `.global` is right for device, peer-mapped and pinned host memory alike.
//
// A stress tool proves that an order is needed by compiling without it: each
// TILEFLOW_WITHOUT_<ORDER> below weakens one.
#pragma once

#ifdef TILEFLOW_WITHOUT_FLAG_RELEASE
#define TILEFLOW_FLAG_RELEASE "relaxed"
#else
#define TILEFLOW_FLAG_RELEASE "release"
#endif
#ifdef TILEFLOW_WITHOUT_FLAG_ACQUIRE
#define TILEFLOW_FLAG_ACQUIRE "relaxed"
#else
#define TILEFLOW_FLAG_ACQUIRE "acquire"
#endif
#ifdef TILEFLOW_WITHOUT_SIGNAL_RELEASE
#define TILEFLOW_SIGNAL_RELEASE "relaxed"
#else
#define TILEFLOW_SIGNAL_RELEASE "release"
#endif
#ifdef TILEFLOW_WITHOUT_SIGNAL_ACQUIRE
#define TILEFLOW_SIGNAL_ACQUIRE "relaxed"
#else
#define TILEFLOW_SIGNAL_ACQUIRE "acquire"
#endif
#ifdef TILEFLOW_WITHOUT_ELECTION_ORDER
#define TILEFLOW_ELECTION_ORDER "relaxed"
#else
#define TILEFLOW_ELECTION_ORDER "acq_rel"
#endif
#ifdef TILEFLOW_WITHOUT_FULL_BULK_WAIT
#define TILEFLOW_FULL_BULK_WAIT ".read"
#else
#define TILEFLOW_FULL_BULK_WAIT ""
#endif
#if defined(TILEFLOW_WITHOUT_PROXY_FENCE) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900)
#define TILEFLOW_PROXY_FENCE(space) ""  // before sm_90 there is no async proxy
#else
#define TILEFLOW_PROXY_FENCE(space) "fence.proxy.async." space ";"
#endif

namespace tileflow {

// --- flags: a band's counter, written and read on one rank ---

// Raises a flag behind the rows it stands for. Cumulative: it also covers the stores of threads
// that this one met at a CTA barrier, and bulk stores that it has waited for with
// bulk_wait_group_0. No value comes back, so nobody waits for the counter.
__device__ inline void red_release_gpu_add(unsigned int* word, unsigned int value) {
  asm volatile("red." TILEFLOW_FLAG_RELEASE ".gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value)
               : "memory");
}

// Reads a flag; ordinary loads behind it (in other threads: behind a barrier) see the rows of every
// add up to the value it returns, since the adds form one chain of read-modify-writes. A bulk
// (TMA) read of the rows needs fence_proxy_async_global in its issuing thread as well.
__device__ inline unsigned int ld_acquire_gpu(const unsigned int* word) {
  unsigned int value;
  asm volatile("ld." TILEFLOW_FLAG_ACQUIRE ".gpu.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(word)
               : "memory");
  return value;
}

// A flag that the host's stream waits or copy engines look at.
__device__ inline void red_release_sys_add(unsigned int* word, unsigned int value) {
  asm volatile("red." TILEFLOW_FLAG_RELEASE ".sys.global.add.u32 [%0], %1;" ::"l"(word), "r"(value)
               : "memory");
}

// Counts finished parts to elect the last sender. Release: hands on this CTA's stores; acquire: the
// thread that brings the counter to its target has received those of all CTAs before it. Returns
// the value before the add. Scope .gpu, since all that meet here run on one GPU, even where their
// stores go to a peer: the elected thread's st_release_sys carries them to system scope.
__device__ inline unsigned int atom_acq_rel_gpu_add(unsigned int* word, unsigned int value) {
  unsigned int before;
  asm volatile("atom." TILEFLOW_ELECTION_ORDER ".gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(value)
               : "memory");
  return before;
}

// --- signals: 8-byte words with one writer, read by another rank or the host ---

// Sets a signal behind the rows it announces. A store, not an atomic: it works over PCIe too.
__device__ inline void st_release_sys(unsigned long long* word, unsigned long long value) {
  asm volatile("st." TILEFLOW_SIGNAL_RELEASE ".sys.global.u64 [%0], %1;" ::"l"(word), "l"(value)
               : "memory");
}

// Reads a signal; what follows (the next kernel of the stream included) sees the announced rows.
__device__ inline unsigned long long ld_acquire_sys(const unsigned long long* word) {
  unsigned long long value;
  asm volatile("ld." TILEFLOW_SIGNAL_ACQUIRE ".sys.global.u64 %0, [%1];"
               : "=l"(value)
               : "l"(word)
               : "memory");
  return value;
}

// Looks at a word that guards no data (abort, or a signal that is only reported): fresh, unordered.
__device__ inline unsigned long long ld_relaxed_sys(const unsigned long long* word) {
  unsigned long long value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// --- the async proxy (TMA) ---

// Between an acquire and bulk accesses of global memory that others have touched by ordinary ones:
// before a bulk load of rows that ordinary stores wrote, and before a bulk store over a slot that
// ordinary loads have read. Generic and async accesses of one address are not ordered otherwise.
__device__ inline void fence_proxy_async_global() {
  asm volatile(TILEFLOW_PROXY_FENCE("global")::: "memory");
}

// In every thread that wrote shared memory with ordinary stores, before the barrier behind which
// one thread issues the bulk store that reads it.
__device__ inline void fence_proxy_async_shared_cta() {
  asm volatile(TILEFLOW_PROXY_FENCE("shared::cta")::: "memory");
}

// Waits until this thread's bulk stores have *landed*; its release then covers them. The `.read`
// form ends when shared memory has been read, with the rows still under way.
__device__ inline void bulk_wait_group_0() {
  asm volatile("cp.async.bulk.wait_group" TILEFLOW_FULL_BULK_WAIT " 0;" ::: "memory");
}

// Waits until all but the latest kGroups bulk stores have read their shared memory, which may then
// be written again. Says nothing about global memory.
template <int kGroups>
__device__ inline void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

// --- inside a CTA ---

// Barrier kId among kCount threads of a CTA, whole warps: all accesses before it happen before all
// accesses behind it. The warp converges first, as `bar.sync` asks for.
template <int kId, int kCount>
__device__ inline void named_barrier_sync() {
  static_assert(kId > 0 && kId < 16 && kCount % 32 == 0, "0 is __syncthreads; whole warps");
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kCount) : "memory");
}

// A barrier in shared memory whose phases count arrivals, and for bulk loads also bytes. An arrival
// releases what its thread did before; a wait acquires what all arrivals of the phase released.
// Own instructions rather than CUTLASS's wrappers: those let the compiler move ordinary accesses
// of shared memory across them.
struct Mbarrier {
  unsigned long long word;

  __device__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals)
                 : "memory");
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  __device__ void arrive_expecting(unsigned int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }
  // Bounded by what this CTA does itself: every arrival it waits for is in its own program.
  __device__ void wait(unsigned int parity) {
    unsigned int done = 0;
    while (done == 0) {
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
          " selp.u32 %0, 1, 0, p; }"
          : "=r"(done)
          : "r"(address()), "r"(parity)
          : "memory");
    }
  }
  __device__ unsigned int address() const {
    return static_cast<unsigned int>(__cvta_generic_to_shared(&word));
  }
};

// Behind the init of all barriers, before the CTA barrier that publishes them: bulk loads, which
// arrive through the async proxy, see them initialised.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// --- time ---

// Nanoseconds that run on while the process is not scheduled; steps of up to a microsecond.
__device__ inline unsigned long long globaltimer_ns() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

}  // namespace tileflow
