// float16 as far as the kernels use it, in place of CUDA's header.
#pragma once

struct __half {
  _Float16 value;
};
struct __half2 {
  __half x, y;
};
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half2 __floats2half2_rn(float x, float y) {
  return {{static_cast<_Float16>(x)}, {static_cast<_Float16>(y)}};
}
