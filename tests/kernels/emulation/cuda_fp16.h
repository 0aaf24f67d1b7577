// float16 as far as the emulated kernels use it, in place of CUDA's header.
#pragma once

struct __half {
  _Float16 value;
};
inline float __half2float(__half x) { return static_cast<float>(x.value); }
