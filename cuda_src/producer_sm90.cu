// Grouped GEMM for Hopper: out[row, :] = a[row, :] @ b[expert(row)]^T, one persistent launch for all
// local experts, a flag per finished half tile.
//
// With kGated, b[expert] holds n gate rows and then n up rows, and out = silu(gate) * up: a tile takes
// the gate and the up rows of the same output columns, so both factors of an element meet in one
// thread's registers.
//
// Warp roles, one CTA per SM:
//   warpgroup 0, warp 0        load: TMA of A and B boxes into a ring of kStages stages
//   warpgroup 0, warps 1..G    store: TMA (or row-wise) stores of 64 output rows, then the flag
//   warpgroup 0, warp 3        schedule: claims tiles by ticket, one ahead, for all other roles
//   warpgroups 1..G            MMA: 64 rows each; hand converted chunks of 64 columns to "their" store warp
//
// So the tensor cores never wait for a store to land, nor for a ticket. Every role walks the same
// ring of tiles. K is never split and the order of additions is fixed: an output row's bits depend
// on its own inputs alone.
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_types.h>

#include "activation.cuh"
#include "dtype.cuh"
#include "producer.cuh"
#include "sync.cuh"
#include "tile_scheduler.cuh"

namespace {

using namespace cute;
using namespace tileflow;
using Tile = tileflow::Tile;  // not cute::Tile

#if defined(TILEFLOW_DTYPE_FP16)
using MmaElement = cutlass::half_t;
#else
using MmaElement = cutlass::bfloat16_t;
#endif

constexpr int kTileK = 64;               // 128 bytes: one swizzle atom
constexpr int kMmaGroups = kTileM / 64;  // MMA warpgroups, each with its own store warp
constexpr int kThreads = 128 * (1 + kMmaGroups);
constexpr int kChunk = 64;                           // columns per store
constexpr int kOutN = kGated ? kTileN / 2 : kTileN;  // output columns of a tile
constexpr int kChunks = kOutN / kChunk;
constexpr int kChunkBuffers = 2;  // per MMA warpgroup
constexpr int kRing = 3;          // tiles: claimed, being multiplied, being stored
constexpr int kRingReaders = 1 + 2 * kMmaGroups;
constexpr int kScheduleWarp = 3;
constexpr unsigned kStageBytes = (kTileM + kTileN) * kTileK * sizeof(MmaElement);
static_assert(kMmaGroups == 1 || kMmaGroups == 2, "kTileM is 64 or 128");

struct __align__(1024) SharedStorage {
  MmaElement a[kStages][kTileM * kTileK];
  MmaElement b[kStages][kTileN * kTileK];
  MmaElement chunk[kMmaGroups][kChunkBuffers][64 * kChunk];
  Tile tiles[kRing];
  Mbarrier stage_full[kStages];
  Mbarrier stage_empty[kStages];
  Mbarrier chunk_full[kMmaGroups][kChunkBuffers];
  Mbarrier chunk_empty[kMmaGroups][kChunkBuffers];
  Mbarrier tile_full[kRing];
  Mbarrier tile_empty[kRing];
  Mbarrier may_claim;
};

static_assert(sizeof(SharedStorage) <= kSharedBytes, "kSharedBytes of the variant");

// Position in a ring of mbarriers: the parity flips each time the index wraps.
template <int kSize>
struct RingState {
  int index = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++index == kSize) {
      index = 0;
      parity ^= 1;
    }
  }
};

__device__ inline void init_barriers(SharedStorage& s) {
  for (int i = 0; i < kStages; ++i) {
    s.stage_full[i].init(1);
    s.stage_empty[i].init(kMmaGroups);
  }
  for (int g = 0; g < kMmaGroups; ++g) {
    for (int i = 0; i < kChunkBuffers; ++i) {
      s.chunk_full[g][i].init(128);
      s.chunk_empty[g][i].init(1);
    }
  }
  for (int i = 0; i < kRing; ++i) {
    s.tile_full[i].init(1);
    s.tile_empty[i].init(kRingReaders);
  }
  s.may_claim.init(1);
  fence_mbarrier_init();
}

// Walks the ring of claimed tiles; a tile with band < 0 ends the walk.
struct TileReader {
  SharedStorage& s;
  RingState<kRing> at;
  __device__ Tile wait() {
    s.tile_full[at.index].wait(at.parity);
    return s.tiles[at.index];
  }
  __device__ void release() {
    s.tile_empty[at.index].arrive();
    at.advance();
  }
};

// One thread: publish tiles in the order of their tickets. The next one is claimed when half of the
// current one is being loaded: early enough to hide the look-up, late enough that a few tiles
// spread over all CTAs.
__device__ inline void schedule_tiles(const ProducerParams& p, SharedStorage& s) {
  RingState<kRing> at;
  RingState<1> claim;
  for (bool more = true; more; at.advance(), claim.advance()) {
    const int t = static_cast<int>(atomicAdd(p.ticket, 1u));
    more = t < p.num_tiles;
    Tile tile{};
    tile.band = -1;
    if (more) tile = tile_at(p, t);
    s.tile_empty[at.index].wait(at.parity ^ 1);
    s.tiles[at.index] = tile;
    s.tile_full[at.index].arrive();
    if (more) s.may_claim.wait(claim.parity);
  }
}

// One thread: fill the stages with the boxes of every k block of every tile.
__device__ inline void load_tiles(const ProducerParams& p, SharedStorage& s) {
  const auto* map_a = reinterpret_cast<const TmaDescriptor*>(&p.map_a);
  const auto* map_b = reinterpret_cast<const TmaDescriptor*>(&p.map_b);
  const auto hint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
  // A's rows may have been stored by peers with ordinary stores before this kernel began.
  fence_proxy_async_global();
  const int claim_at = p.k / 2 / kTileK * kTileK;
  TileReader reader{s};
  RingState<kStages> stage;
  for (Tile tile = reader.wait(); tile.band >= 0; tile = reader.wait()) {
    const int b_row = tile.expert * (kGated ? 2 : 1) * p.n + tile.n_tile * kOutN;
    for (int k = 0; k < p.k; k += kTileK) {
      s.stage_empty[stage.index].wait(stage.parity ^ 1);
      Mbarrier& full = s.stage_full[stage.index];
      full.arrive_expecting(kStageBytes);
      auto* barrier = reinterpret_cast<uint64_t*>(&full);
      SM90_TMA_LOAD_2D::copy(map_a, barrier, hint, s.a[stage.index], k, tile.row);
      SM90_TMA_LOAD_2D::copy(map_b, barrier, hint, s.b[stage.index], k, b_row);
      if constexpr (kGated) {
        MmaElement* up = s.b[stage.index] + kTileN / 2 * kTileK;
        SM90_TMA_LOAD_2D::copy(map_b, barrier, hint, up, k, b_row + p.n);
      }
      if (k == claim_at) s.may_claim.arrive();
      stage.advance();
    }
    reader.release();
  }
}

// Where the 64 rows of one warpgroup go.
struct Box {
  int num_rows;    // valid rows
  int num_remote;  // leading rows for staging
  int staging_row;
  int local_row;  // row of box row `num_remote` in the own return buffer
  __device__ Box(const Tile& tile, int group) {
    const int first = group * 64;
    num_rows = max(0, min(64, tile.num_rows - first));
    num_remote = max(0, min(64, tile.num_remote - first));
    staging_row = tile.row + first;
    local_row = tile.local_row + max(0, first - tile.num_remote);
  }
  // A TMA store does not clip at the end of a run, so it takes only boxes that lie in one place.
  // NOTE: written as `num_remote == 64 || (num_remote == 0 && num_rows == 64)`, NVRTC 13.0 made code
  // for sm_90a that answered true for partial boxes.
  __device__ bool whole() const { return num_rows == 64 && num_remote % 64 == 0; }
};

// One warp: 16-byte stores of a chunk's valid rows, each row to where it belongs.
__device__ inline void store_rows(const ProducerParams& p, const Box& box, const MmaElement* chunk,
                                  int column, int lane) {
  const int vector = lane % 8;
  const int vector_column = column + vector * 8;
  if (vector_column < p.n) {
    for (int row = lane / 8; row < box.num_rows; row += 4) {
      const bool remote = row < box.num_remote;
      char* base = static_cast<char*>(remote ? p.staging : p.local);
      const int to = remote ? box.staging_row + row : box.local_row + row - box.num_remote;
      const size_t offset = (static_cast<size_t>(to) * p.n + vector_column) * sizeof(MmaElement);
      const int swizzled = row * kChunk + (vector ^ (row & 7)) * 8;
      *reinterpret_cast<int4*>(base + offset) = *reinterpret_cast<const int4*>(chunk + swizzled);
    }
  }
}

// One warp: drain the chunks of MMA warpgroup `group`, then raise the band's counter.
__device__ inline void store_tiles(const ProducerParams& p, SharedStorage& s, int group, int lane) {
  TileReader reader{s};
  RingState<kChunkBuffers> buffer;
  for (Tile tile = reader.wait(); tile.band >= 0; tile = reader.wait()) {
    __syncwarp();  // all lanes have read the tile before lane 0 can release it
    const Box box(tile, group);
    const bool remote = box.num_remote > 0;
    const void* map = remote ? &p.map_staging : &p.map_local;
    const int row = remote ? box.staging_row : box.local_row;
    for (int c = 0; c < kChunks; ++c, buffer.advance()) {
      const int column = tile.n_tile * kOutN + c * kChunk;
      const MmaElement* chunk = s.chunk[group][buffer.index];
      s.chunk_full[group][buffer.index].wait(buffer.parity);
      __syncwarp();  // no lane may still wait for this phase when lane 0 ends it
      if (box.whole()) {
        if (lane == 0) {
          if (column < p.n) {
            SM90_TMA_STORE_2D::copy(static_cast<const TmaDescriptor*>(map), chunk, column, row);
          }
          tma_store_arrive();
          // The store before this one has been read, so its buffer is free: at most one in flight.
          bulk_wait_group_read<1>();
          if (c > 0) s.chunk_empty[group][buffer.index ^ 1].arrive();
        }
      } else {
        store_rows(p, box, chunk, column, lane);
        __syncwarp();
        if (lane == 0) s.chunk_empty[group][buffer.index].arrive();
      }
    }
    if (lane == 0) {
      if (box.whole()) {
        bulk_wait_group_0();  // landed in memory, not only read
        s.chunk_empty[group][buffer.index ^ 1].arrive();
      }
      if (p.band_flags != nullptr) red_release_gpu_add(p.band_flags + tile.band, 1u);
      reader.release();
    } else {
      reader.at.advance();
    }
  }
}

// Output elements i and i + 1 of a thread, as they are stored. With kGated the up column of a gate
// column is kTileN / 2 further on: as many columns make half as many registers.
__device__ inline unsigned int output_pair(const float* sums, int i) {
  if constexpr (kGated) {
    const float* up = sums + kTileN / 4;
    return pack2(gated(sums[i], up[i]), gated(sums[i + 1], up[i + 1]));
  } else {
    return pack2(sums[i], sums[i + 1]);
  }
}

// One warpgroup: multiply, convert, hand over 64 rows of every tile.
__device__ inline void multiply_tiles(const ProducerParams& p, SharedStorage& s, int group) {
  using LayoutA = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<MmaElement>{},
                                         Shape<Int<kTileM>, Int<kTileK>, Int<kStages>>{}));
  using LayoutB = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<MmaElement>{},
                                         Shape<Int<kTileN>, Int<kTileK>, Int<kStages>>{}));
  using Atom = decltype(GMMA::ss_op_selector<MmaElement, MmaElement, float,
                                             Shape<Int<kTileM>, Int<kTileN>, Int<kTileK>>,
                                             GMMA::Major::K, GMMA::Major::K>());
  auto mma = make_tiled_mma(Atom{}, Layout<Shape<Int<kMmaGroups>, _1, _1>>{});
  auto slice = mma.get_slice(group * 128 + threadIdx.x % 128);
  Tensor a =
      slice.make_fragment_A(slice.partition_A(make_tensor(make_smem_ptr(s.a[0]), LayoutA{})));
  Tensor b =
      slice.make_fragment_B(slice.partition_B(make_tensor(make_smem_ptr(s.b[0]), LayoutB{})));
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int chunk_row = thread / 32 * 16 + lane % 16;  // the row that this lane addresses
  TileReader reader{s};
  RingState<kStages> stage;
  RingState<kChunkBuffers> buffer;
  for (Tile tile = reader.wait(); tile.band >= 0; tile = reader.wait()) {
    Tensor acc = partition_fragment_C(mma, Shape<Int<kTileM>, Int<kTileN>>{});
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    int previous = -1;
    for (int k = 0; k < p.k; k += kTileK) {
      s.stage_full[stage.index].wait(stage.parity);
      warpgroup_fence_operand(acc);
      warpgroup_arrive();
      CUTE_UNROLL
      for (int kk = 0; kk < size<2>(a); ++kk) {
        gemm(mma, a(_, _, kk, stage.index), b(_, _, kk, stage.index), acc);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      warpgroup_wait<1>();  // the k block before this one is done: its stage is free
      warpgroup_fence_operand(acc);
      if (previous >= 0 && thread == 0) s.stage_empty[previous].arrive();
      previous = stage.index;
      stage.advance();
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc);
    if (thread == 0) {
      s.stage_empty[previous].arrive();
      reader.release();
    } else {
      reader.at.advance();
    }
    const float* sums = acc.data();
    CUTE_UNROLL
    for (int c = 0; c < kChunks; ++c) {
      s.chunk_empty[group][buffer.index].wait(buffer.parity ^ 1);
      const uint32_t base = cast_smem_ptr_to_uint(s.chunk[group][buffer.index]);
      CUTE_UNROLL
      for (int j = 0; j < kChunk / 16; ++j) {
        const int i = (c * kChunk + j * 16) / 2;
        const int vector = j * 2 + lane / 16;
        const uint32_t to = base + chunk_row * (kChunk * 2) + (vector ^ (chunk_row & 7)) * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                     "r"(output_pair(sums, i)), "r"(output_pair(sums, i + 2)),
                     "r"(output_pair(sums, i + 4)), "r"(output_pair(sums, i + 6))
                     : "memory");
      }
      fence_proxy_async_shared_cta();  // the store warp's TMA reads what was just written
      s.chunk_full[group][buffer.index].arrive();
      buffer.advance();
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    producer_sm90(const __grid_constant__ ProducerParams p) {
  extern __shared__ __align__(1024) char raw[];
  SharedStorage& s = *reinterpret_cast<SharedStorage*>(raw);
  const int warpgroup = threadIdx.x / 128;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) init_barriers(s);
  __syncthreads();
  if (warpgroup == 0) {
    if constexpr (kMmaGroups == 2) cutlass::arch::warpgroup_reg_dealloc<56>();
    if (warp == 0) {
      if (lane == 0) load_tiles(p, s);
    } else if (warp == kScheduleWarp) {
      if (lane == 0) schedule_tiles(p, s);
    } else if (warp <= kMmaGroups) {
      store_tiles(p, s, warp - 1, lane);
    }
  } else {
    if constexpr (kMmaGroups == 2) cutlass::arch::warpgroup_reg_alloc<224>();
    multiply_tiles(p, s, warpgroup - 1);
  }
}
