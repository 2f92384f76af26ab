// Tensor-core building blocks of every GPU from sm_80 on: cp.async, ldmatrix, mma.sync.
//
// A warp multiplies 16 x 16 by 16 x 8. In a fragment, lane = 4 * g + t holds elements (2t, 2t + 1)
// of row g; ldmatrix delivers exactly that from 8 rows of 16 bytes whose addresses come from 8
// lanes.
#pragma once

#include "dtype.cuh"

namespace tileflow {

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copy 16 bytes to shared memory; where `valid` is false, write zeros and read nothing. Past L1:
// neighbouring CTAs share tiles through L2 only.
__device__ inline void copy_async(unsigned to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

__device__ inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most kPending of the newest groups of this thread are still on their way.
template <int kPending>
__device__ inline void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8 x 8 matrices; lanes 8i .. 8i + 7 give the row addresses of matrix i.
__device__ inline void load_matrices(unsigned (&words)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// sums += a * b. sums[0, 1]: row g, columns 2t, 2t + 1; sums[2, 3]: row g + 8.
__device__ inline void multiply_add(float (&sums)[4], const unsigned (&a)[4], const unsigned* b) {
#if defined(TILEFLOW_DTYPE_FP16)
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Exchange words between lanes t and t ^ kMask of a quad: with kMask 1 and then 2, word j of lane
// t becomes word t of lane j, a 4 x 4 transposition without shared memory.
template <int kMask>
__device__ inline void exchange(unsigned& low, unsigned& high) {
  const bool upper = threadIdx.x & kMask;
  const unsigned received = __shfl_xor_sync(0xffffffffu, upper ? low : high, kMask);
  (upper ? low : high) = received;
}

__device__ inline void transpose_quad(unsigned (&words)[4]) {
  exchange<1>(words[0], words[1]);
  exchange<1>(words[2], words[3]);
  exchange<2>(words[0], words[2]);
  exchange<2>(words[1], words[3]);
}

}  // namespace tileflow
