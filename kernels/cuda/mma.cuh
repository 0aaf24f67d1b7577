// What the attention kernels are made of: the device's instructions, and a little around them.
#pragma once

#include <cstdint>

#include "elements.cuh"
#ifdef TANGRAM_INSTRUCTIONS  // a stand-in for them, where there is no GPU: tests/kernels/emulation
#include TANGRAM_INSTRUCTIONS
#else
#include "instructions.cuh"
#endif

namespace tangram {

constexpr float kLog2E = 1.4426950408889634f;

// Two floats rounded to two elements, the first in the low half.
template <typename T>
__device__ inline uint32_t pack(float low, float high);
template <>
__device__ inline uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}
template <>
__device__ inline uint32_t pack<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}

// A score in units of log 2, from the product of query and key.
struct Scoring {
  float scale, soft_cap;  // soft_cap 0: none

  __device__ float operator()(float product) const {
    return soft_cap > 0.f ? soft_cap * kLog2E * tanhf(product * (scale / soft_cap)) : product * (scale * kLog2E);
  }
};

// Over the four lanes that hold one row of a product's result.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

}  // namespace tangram
