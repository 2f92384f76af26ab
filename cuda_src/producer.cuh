// Parameters shared by the producers: one launch computes every local expert's rows.
//
// All matrices are row-major with 2-byte elements. Rows whose owner is another rank go to
// `staging` (the consumer sends them on), own rows straight into the own return buffer `local`.
#pragma once

#include "plan.cuh"

namespace tileflow {

// A CUtensorMap without the driver's header.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

}  // namespace tileflow

struct ProducerParams {
  tileflow::TensorMap map_a;        // [a_rows, k], box kTileM x 64 columns
  tileflow::TensorMap map_b;        // [experts_local * n, k], box kTileN x 64 columns
  tileflow::TensorMap map_staging;  // [a_rows, n], box 64 x 64
  tileflow::TensorMap map_local;    // [*, n], box 64 x 64
  const void* a;
  const void* b;
  void* staging;
  void* local;
  const tileflow::Band* bands;              // [num_bands]
  const tileflow::ScheduleEntry* schedule;  // [num_bands]
  unsigned int* ticket;
  unsigned int* band_flags;  // [num_bands], null: raise no flags
  int num_tiles;
  int tiles_n;
  int n;
  int k;
  int a_rows;
  int all_to_staging;  // 1: own rows go to staging too
};
TILEFLOW_CHECK_LAYOUT_ProducerParams;
