// The elements of keys, values and queries.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace tangram {

__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

}  // namespace tangram
