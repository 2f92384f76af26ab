// The plan's records, as NumPy writes them (tileflow/plan: tiles.py, schedule.py, segments.py).
//
// Sizes and offsets are compared with the NumPy dtypes in every compilation. The alignment lets a
// record be read as 16-byte vectors.
#pragma once

namespace tileflow {

// Up to kTileM output rows of one expert. The rank's own rows are the last ones of a band.
struct alignas(16) Band {
  int row;         // first row in the receive and staging buffers
  int num_rows;    // valid rows
  int num_remote;  // leading rows that belong to other ranks
  int expert;      // local index
  int local_row;   // row in the own return buffer of the first own row, 0 where there is none
  int target;      // arrivals that make the band's counter full
  int pad0;
  int pad1;
};
TILEFLOW_CHECK_LAYOUT_Band;

// One position of the order in which bands are computed.
struct alignas(16) ScheduleEntry {
  int band;         // index of the band at this position
  int group_first;  // position of the first band of this position's group
  int group_size;   // bands that are rasterised together
  int pad;
};
TILEFLOW_CHECK_LAYOUT_ScheduleEntry;

// What one put carries: consecutive rows of one run.
struct alignas(16) Segment {
  int src_row;         // first row in the staging buffer
  int num_rows;        // rows to send
  int owner;           // rank that they belong to
  int dst_row;         // first row in the owner's return buffer
  int band_first;      // first band that must be full
  int num_bands;       // consecutive bands that must be full
  int expert;          // global index
  int run;             // local index of the run: local expert * ranks + owner
  int run_segments;    // segments of that run
  int owner_segments;  // segments to that owner
  int pad0;
  int pad1;
};
TILEFLOW_CHECK_LAYOUT_Segment;

}  // namespace tileflow
