// bfloat16 as far as the emulated kernels use it, in place of CUDA's header.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
