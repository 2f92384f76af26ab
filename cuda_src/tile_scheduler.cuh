// From a tile number to the rows, columns and expert of that tile.
//
// Tile numbers are claimed in ascending order; the plan's schedule decides what they mean, so a
// GEMM body knows nothing about experts, owners or the order of bands.
#pragma once

#include "plan.cuh"
#include "producer.cuh"

namespace tileflow {

struct Tile {
  int band;        // index of the band, and of its counter
  int n_tile;      // columns n_tile * kTileN ...
  int row;         // first row in the receive and staging buffers
  int num_rows;    // valid rows; further rows belong to the next band and are never stored
  int num_remote;  // leading rows that go to staging
  int expert;      // local index
  int local_row;   // row in the own return buffer of row `num_remote` of this tile
};

// A group is a few whole bands; its tiles are numbered column by column, so that the bands of a
// group share a column of weights while that is in L2.
__device__ inline Tile tile_at(const ProducerParams& p, int t) {
  const ScheduleEntry at = p.schedule[t / p.tiles_n];
  const int in_group = t - at.group_first * p.tiles_n;
  Tile tile;
  tile.band = p.schedule[at.group_first + in_group % at.group_size].band;
  tile.n_tile = in_group / at.group_size;
  const Band band = p.bands[tile.band];
  tile.row = band.row;
  tile.num_rows = band.num_rows;
  tile.num_remote = p.all_to_staging ? band.num_rows : band.num_remote;
  tile.expert = band.expert;
  tile.local_row = band.local_row;
  return tile;
}

}  // namespace tileflow
