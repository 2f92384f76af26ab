// The element type of all matrices, fp16 or bf16, chosen by the prologue. Sums are fp32.
#pragma once

#if defined(TILEFLOW_DTYPE_FP16)
#include <cuda_fp16.h>
#elif defined(TILEFLOW_DTYPE_BF16)
#include <cuda_bf16.h>
#else
#error "the prologue defines TILEFLOW_DTYPE_FP16 or TILEFLOW_DTYPE_BF16"
#endif

namespace tileflow {

#if defined(TILEFLOW_DTYPE_FP16)
using Element = __half;
using Element2 = __half2;
__device__ inline Element2 to_element2(float lo, float hi) { return __floats2half2_rn(lo, hi); }
__device__ inline float2 to_float2(Element2 pair) { return __half22float2(pair); }
__device__ inline float to_float(Element value) { return __half2float(value); }
__device__ inline Element to_element(float value) { return __float2half_rn(value); }
#else
using Element = __nv_bfloat16;
using Element2 = __nv_bfloat162;
__device__ inline Element2 to_element2(float lo, float hi) { return __floats2bfloat162_rn(lo, hi); }
__device__ inline float2 to_float2(Element2 pair) { return __bfloat1622float2(pair); }
__device__ inline float to_float(Element value) { return __bfloat162float(value); }
__device__ inline Element to_element(float value) { return __float2bfloat16_rn(value); }
#endif
static_assert(sizeof(Element) == 2 && sizeof(Element2) == 4, "2-byte elements");

// Two elements as the 32-bit word that they occupy in memory, `lo` at the lower address.
__device__ inline unsigned pack2(float lo, float hi) {
  const Element2 pair = to_element2(lo, hi);
  return reinterpret_cast<const unsigned&>(pair);
}

__device__ inline float2 unpack2(unsigned word) {
  return to_float2(reinterpret_cast<const Element2&>(word));
}

}  // namespace tileflow
