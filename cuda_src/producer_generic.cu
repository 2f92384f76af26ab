// Grouped GEMM for every GPU from sm_80 on: out[row, :] = a[row, :] @ b[expert(row)]^T, one
// persistent launch for all local experts, a flag per finished tile.
//
// A ring of kStages stages in shared memory is filled by cp.async and read by ldmatrix; eight warps
// multiply with mma.sync. The first stages of the next tile are on their way while the results of
// this one are stored, and its ticket was claimed a whole tile earlier. K is never split and the
// order of additions is fixed: an output row's bits depend on its own inputs alone.
#include "dtype.cuh"
#include "mma.cuh"
#include "producer.cuh"
#include "sync.cuh"
#include "tile_scheduler.cuh"

using namespace tileflow;

namespace {

constexpr int kCtaThreads = 256;
constexpr int kWarpsN = 4;          // two rows of four warps share a tile
constexpr int kWarpM = kTileM / 2;  // rows and columns of one warp
constexpr int kWarpN = kTileN / kWarpsN;
constexpr int kBlocksM = kWarpM / 16;  // products of one warp per 16 columns of K
constexpr int kBlocksN = kWarpN / 8;
constexpr int kSteps = kTileK / 16;      // products of one stage along K
constexpr int kRowVectors = kTileK / 8;  // 16-byte vectors in a stage's row
constexpr int kRowBytes = kRowVectors * 16;
constexpr int kPassRows = kCtaThreads / kRowVectors;  // rows that all threads copy at once
constexpr int kStageBytes = (kTileM + kTileN) * kRowBytes;
static_assert(kTileK == 32 || kTileK == 64, "the swizzle knows rows of 64 and 128 bytes");
static_assert(kTileM % kPassRows == 0 && kTileN % kPassRows == 0, "whole passes");
static_assert(kBlocksM >= 1 && kBlocksN % 4 == 0, "a quad of lanes stores four blocks of columns");
static_assert(kSteps % 2 == 0 && kStages >= 3, "two sets of fragments, one stage to spare");
static_assert(kStages * kStageBytes == kSharedBytes, "the launch gives what the ring needs");

// Vector v of a row lies at v ^ swizzle(row). Eight consecutive rows, which one ldmatrix reads,
// then touch all banks once: a row is all 32 banks (kTileK 64) or every second row is (32).
__device__ inline int swizzle(int row) { return kTileK == 64 ? row & 7 : (row >> 1) & 3; }

// Copies kRows rows of a K-contiguous matrix, one stage at a time. What lies outside the matrix
// becomes zero. A thread copies the same vector of every kPassRows-th row.
template <int kRows>
struct Operand {
  const Element* from;  // the vector of this thread's first row, at k = 0
  int valid_rows;       // counted from this thread's first row
  unsigned to;          // offset in the operand's part of a stage

  __device__ Operand(const void* matrix, long long first_row, int num_rows, int k) {
    const int row = threadIdx.x / kRowVectors;
    const int vector = threadIdx.x % kRowVectors;
    from = static_cast<const Element*>(matrix) + (first_row + row) * k + vector * 8;
    valid_rows = num_rows - row;
    to = row * kRowBytes + (vector ^ swizzle(row)) * 16;
  }

  __device__ void load(unsigned part, int k_first, int k) const {
    const bool valid = k_first + static_cast<int>(threadIdx.x % kRowVectors) * 8 < k;
#pragma unroll
    for (int row = 0; row < kRows; row += kPassRows) {
      copy_async(part + to + row * kRowBytes, from + static_cast<long long>(row) * k + k_first,
                 valid && row < valid_rows);
    }
  }
};

// Both operands of one tile.
struct Loader {
  Operand<kTileM> a;
  Operand<kTileN> b;
  int k;

  // Rows of A behind the band's last are never stored, so they are not read either.
  __device__ Loader(const ProducerParams& p, const Tile& tile)
      : a(p.a, tile.row, tile.num_rows, p.k),
        b(p.b, static_cast<long long>(tile.expert) * p.n + tile.n_tile * kTileN,
          p.n - tile.n_tile * kTileN, p.k),
        k(p.k) {}

  // Always commits a group, so that waits may count groups up to the last block of K.
  __device__ void load(unsigned stage, int k_first) const {
    if (k_first < k) {
      a.load(stage, k_first, k);
      b.load(stage + kTileM * kRowBytes, k_first, k);
    }
    copy_commit();
  }

  // Fill all stages but one; the caller has made sure that nobody reads them any more.
  __device__ void start(unsigned stages) const {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) load(stages + i * kStageBytes, i * kTileK);
  }
};

// What one warp multiplies in one step: kBlocksM blocks of 16 rows, pairs of 8 columns.
struct Fragments {
  unsigned a[kBlocksM][4];
  unsigned b[kBlocksN / 2][4];
};

using Sums = float[kBlocksM][kBlocksN][4];

// Where this lane's ldmatrix rows lie in a stage. Lanes 0-15 address the 16 rows of a block of A
// at the lower 8 columns of K, lanes 16-31 at the upper 8. In B, 8 lanes address 8 rows (output
// columns): lower K, upper K, then the same for the next 8 rows.
struct FragmentReader {
  unsigned a, b;                // offset of the row in a stage
  unsigned a_vector, b_vector;  // swizzled offset in the row at step 0

  __device__ FragmentReader() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int a_row = lane % 16;
    const int b_row = lane % 8 + lane / 16 * 8;
    a = (warp / kWarpsN * kWarpM + a_row) * kRowBytes;
    b = (kTileM + warp % kWarpsN * kWarpN + b_row) * kRowBytes;
    a_vector = (lane / 16 ^ swizzle(a_row)) * 16;
    b_vector = (lane / 8 % 2 ^ swizzle(b_row)) * 16;
  }

  // A step is two vectors along K: an exclusive or commutes with the swizzle's.
  __device__ void load(Fragments& f, unsigned stage, int step) const {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      load_matrices(f.a[m], stage + a + m * 16 * kRowBytes + (a_vector ^ step * 32));
    }
#pragma unroll
    for (int n = 0; n < kBlocksN / 2; ++n) {
      load_matrices(f.b[n], stage + b + n * 16 * kRowBytes + (b_vector ^ step * 32));
    }
  }
};

__device__ inline void multiply(Sums& sums, const Fragments& f) {
#pragma unroll
  for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
      multiply_add(sums[m][n], f.a[m], &f.b[n / 2][n % 2 * 2]);
    }
  }
}

// Offset of the stage behind `stage` in the ring.
__device__ inline unsigned next_stage(unsigned stage) {
  return stage == (kStages - 1) * kStageBytes ? 0 : stage + kStageBytes;
}

// Every block of K of one tile; its first kStages - 1 stages are on their way.
//
// Before the fragments of block i are read, kStages - 1 + i groups were committed and group i must
// have landed: kStages - 2 may be pending. The barrier behind that wait shows every thread all
// parts of block i, and says that all have read block i - 1, whose stage is filled next.
__device__ inline void multiply_tile(Sums& sums, const Loader& loader, const FragmentReader& reader,
                                     unsigned stages) {
  Fragments fragments[2];  // one is multiplied while the other is read
  unsigned read = 0, fill = (kStages - 1) * kStageBytes;
  copy_wait<kStages - 2>();
  __syncthreads();
  reader.load(fragments[0], stages, 0);
  for (int k_first = 0; k_first < loader.k; k_first += kTileK) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step == kSteps - 1) {
        copy_wait<kStages - 2>();
        __syncthreads();
        read = next_stage(read);
      }
      // Behind the last block this reads a stage that holds nothing, and nobody uses it.
      reader.load(fragments[(step + 1) % 2], stages + read, (step + 1) % kSteps);
      if (step == 0) {
        loader.load(stages + fill, k_first + (kStages - 1) * kTileK);
        fill = next_stage(fill);
      }
      multiply(sums, fragments[step % 2]);
    }
  }
}

// Where a valid row of a tile begins in memory.
__device__ inline Element* row_target(const ProducerParams& p, const Tile& tile, int row) {
  const bool remote = row < tile.num_remote;
  const long long to = remote ? tile.row + row : tile.local_row + (row - tile.num_remote);
  return static_cast<Element*>(remote ? p.staging : p.local) + to * p.n;
}

// Convert and store: the four lanes that share a row swap words, then each holds 8 neighbouring
// columns, one 16-byte store. Rows and columns outside the band and the matrix are left alone.
__device__ inline void store_tile(const ProducerParams& p, const Tile& tile, const Sums& sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_column = tile.n_tile * kTileN + warp % kWarpsN * kWarpN + lane % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2 * kBlocksM; ++half) {  // 8 rows each
    const int row = warp / kWarpsN * kWarpM + half * 8 + lane / 4;
    const bool valid = row < tile.num_rows;
    Element* target = row_target(p, tile, row);
#pragma unroll
    for (int n = 0; n < kBlocksN; n += 4) {
      unsigned words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* pair = &sums[half / 2][n + j][half % 2 * 2];
        words[j] = pack2(pair[0], pair[1]);
      }
      transpose_quad(words);
      const int column = first_column + n * 8;
      if (valid && column < p.n) {
        *reinterpret_cast<uint4*>(target + column) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kCtaThreads)
    producer_generic(const __grid_constant__ ProducerParams p) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ unsigned claimed;
  const unsigned stages = shared_address(ring);
  const FragmentReader reader;
  if (threadIdx.x == 0) claimed = atomicAdd(p.ticket, 1u);
  __syncthreads();
  int t = static_cast<int>(claimed);
  if (t >= p.num_tiles) return;
  Tile tile = tile_at(p, t);
  Loader loader(p, tile);
  loader.start(stages);
  while (true) {
    unsigned ticket = 0;
    if (threadIdx.x == 0) ticket = atomicAdd(p.ticket, 1u);  // needed only behind the products
    Sums sums = {};
    multiply_tile(sums, loader, reader, stages);
    if (threadIdx.x == 0) claimed = ticket;
    __syncthreads();  // the ticket is visible, and nobody reads the ring any more
    t = static_cast<int>(claimed);
    const Tile done = tile;
    if (t < p.num_tiles) {
      tile = tile_at(p, t);
      loader = Loader(p, tile);
      loader.start(stages);
    }
    store_tile(p, done, sums);
    __syncthreads();  // the flag stands for the stores of all threads
    if (threadIdx.x == 0 && p.band_flags != nullptr) {
      red_release_gpu_add(p.band_flags + done.band, 1u);
    }
    if (t >= p.num_tiles) return;
  }
}
