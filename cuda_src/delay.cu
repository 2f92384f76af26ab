// Holds its stream for a while: measurements start with a full queue, tests delay one rank.
#include "sync.cuh"

struct DelayParams {
  long long nanoseconds;
};
TILEFLOW_CHECK_LAYOUT_DelayParams;

extern "C" __global__ void delay(const __grid_constant__ DelayParams p) {
  const unsigned long long start = tileflow::globaltimer_ns();
  while (static_cast<long long>(tileflow::globaltimer_ns() - start) < p.nanoseconds)
    __nanosleep(500);
}
