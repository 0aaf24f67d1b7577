// The element types of a pool, their conversion to and from float32, and tiles of keys and values in float32.
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace tangram {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return as_float(uint32_t(x.bits) << 16); }
inline float to_float(Float16 x) {
  // Scale by powers of two instead of rebuilding the exponent: handles subnormals; infinities and NaN apart.
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  return as_float(sign | as_bits(as_float(rest << 13) * 0x1p112f));
}

// Round to nearest, ties to even.
inline void from_float(float x, float& to) { to = x; }
inline void from_float(float x, BFloat16& to) {
  const uint32_t bits = as_bits(x);
  if (x != x)
    to.bits = uint16_t(bits >> 16 | 0x40u);
  else
    to.bits = uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
inline void from_float(float x, Float16& to) {
  const uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u)
    to.bits = uint16_t(sign | 0x7e00u);
  else if (rest >= 0x477ff000u)  // 65520 and more round to infinity
    to.bits = uint16_t(sign | 0x7c00u);
  else if (rest < 0x38800000u)  // subnormal: let a float32 addition do the rounding
    to.bits = uint16_t(sign | (as_bits(as_float(rest) + 0.5f) - 0x3f000000u));
  else
    to.bits = uint16_t(sign | (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13);
}

// kLanes elements as float32.
inline Vec widen(const float* from) { return load<Vec>(from); }
inline Vec widen(const BFloat16* from) {
  return (Vec)(__builtin_convertvector(load<VecH>(from), VecI) << 16);
}
inline Vec widen(const Float16* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Vec out;
  for (int i = 0; i < kLanes; ++i) out[i] = to_float(from[i]);
  return out;
#endif
}

// The float32 of the low and the high half of each word that holds two neighbouring elements.
inline void split(VecI words, BFloat16, Vec& low, Vec& high) {
  low = (Vec)(words << 16);
  high = (Vec)(words & int32_t(0xffff0000u));
}
inline void split(VecI words, Float16, Vec& low, Vec& high) {
  Float16 half[2][kLanes];
  for (int i = 0; i < kLanes; ++i) {
    half[0][i].bits = uint16_t(uint32_t(words[i]) & 0xffffu);
    half[1][i].bits = uint16_t(uint32_t(words[i]) >> 16);
  }
  low = widen(half[0]);
  high = widen(half[1]);
}

// One row of `size` elements to float32; reads exactly `size` elements.
template <class E>
inline void widen_row(const E* from, int size, float* to) {
  int d = 0;
  for (; d + kLanes <= size; d += kLanes) store(to + d, widen(from + d));
  for (; d < size; ++d) to[d] = to_float(from[d]);
}

// Whether products of two elements stay packed in pairs: queries and keys are then kept as words of two.
template <class E>
constexpr bool pairs = kPairs && std::is_same_v<E, BFloat16>;

// Words of a packed row of keys or queries.
template <class E>
constexpr int depth(int head_size) {
  return pairs<E> ? head_size / 2 : head_size;
}

// One row of a query, in the form in which the scores take it.
template <class E>
inline void load_query(const E* from, int head_size, float* to) {
  if constexpr (pairs<E>)
    std::memcpy(to, from, size_t(head_size) * sizeof(E));
  else
    widen_row(from, head_size, to);
}

// Keys of `count` tokens, transposed: to[d * stride + token], d over words if the type is packed in pairs and over
// elements if not. Columns up to the next multiple of kLanes become 0.
template <class E>
inline void load_keys(const E* const* token, int count, int head_size, float* to, int stride) {
  constexpr int per_word = 4 / sizeof(E);
  for (int t = 0; t < count; t += kLanes) {
    for (int d = 0; d < head_size; d += kLanes * per_word) {
      VecI words[kLanes];
      const int wanted = std::min((head_size - d) / per_word, kLanes);
      if (wanted == kLanes && t + kLanes <= count) {
        for (int i = 0; i < kLanes; ++i) words[i] = load<VecI>(token[t + i] + d);
      } else {
        for (int i = 0; i < kLanes; ++i) {
          words[i] = VecI{};
          if (t + i < count) std::memcpy(&words[i], token[t + i] + d, size_t(wanted) * 4);
        }
      }
      transpose(words);
      for (int i = 0; i < wanted; ++i) {
        if constexpr (per_word == 1 || pairs<E>) {
          store(to + size_t(d / per_word + i) * stride + t, words[i]);
        } else {
          Vec low, high;
          split(words[i], E{}, low, high);
          store(to + size_t(d + 2 * i) * stride + t, low);
          store(to + size_t(d + 2 * i + 1) * stride + t, high);
        }
      }
    }
  }
}

}  // namespace tangram
