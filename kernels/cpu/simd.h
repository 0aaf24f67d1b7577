// Vectors of float32 as wide as the target allows, written once with the compiler's vector extension.
//
// Nothing here may depend on contraction by the compiler (the build turns it off): a multiply-add is fused where
// fma() says so and nowhere else, so every kernel that reaches a sum in the same order reaches the same bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace tangram {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecH __attribute__((vector_size(kLanes * 2)));

template <class V>
inline V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

template <class V>
inline void store(void* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

inline Vec broadcast(float x) {
#if defined(__AVX512F__)
  return (Vec)_mm512_set1_ps(x);
#else
  return x - Vec{};  // exact for every x, the sign of zero included
#endif
}

// a[0] * b[0] + a[1] * b[1] + c for words that hold two bfloat16 each; exists where the target has it.
#if defined(__AVX512BF16__) && defined(__AVX512F__)
constexpr bool kPairs = true;
inline Vec fma_pairs(Vec a, Vec b, Vec c) {
  return (Vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}
#else
constexpr bool kPairs = false;
#endif

inline VecI broadcast(int32_t x) { return x - VecI{}; }

// a * b + c, rounded once where the target can.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline Vec select(VecI mask, Vec yes, Vec no) { return (Vec)((mask & (VecI)yes) | (~mask & (VecI)no)); }

inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }

// Lane numbers 0, 1, 2, ...
inline VecI lane_index() {
  VecI index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  return index;
}

// Halve a vector again and again: a fixed tree, so the sum of the same lanes always has the same bits.
inline float sum_lanes(Vec x) {
  float part[kLanes];
  store(part, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  return part[0];
}

inline float max_lanes(Vec x) {
  float part[kLanes];
  store(part, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) part[i] = part[i] > part[i + width] ? part[i] : part[i + width];
  return part[0];
}

// e^x for x <= 0, to about one unit in the last place; exactly 0 below -87 (and for -inf), NaN for NaN.
inline Vec exp_nonpositive(Vec x) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const VecI vanishes = x < broadcast(-87.0f);
  const Vec shifted = fma(x, broadcast(1.44269504088896341f), magic);
  const Vec n = shifted - magic;
  Vec r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r) + broadcast(1.0f);
  const Vec scaled = (Vec)((VecI)p + ((VecI)shifted << 23));
  return select(vanishes, Vec{}, scaled);
}

// tanh(x), from e^(-2|x|): within about 1e-7 of the true value, NaN for NaN.
inline Vec tanh(Vec x) {
  const VecI sign = (VecI)x & broadcast(int32_t(0x80000000u));
  const Vec e = exp_nonpositive((Vec)((VecI)x | broadcast(int32_t(0x80000000u))) * broadcast(2.0f));
  const Vec size = (broadcast(1.0f) - e) / (broadcast(1.0f) + e);
  return (Vec)((VecI)size | sign);
}

namespace detail {
template <int Half, int... I>
inline VecI interleave(VecI a, VecI b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (Half * kLanes / 2 + I / 2 + (I % 2) * kLanes)...);
}
}  // namespace detail

// Transpose a kLanes x kLanes matrix of 32-bit words held in kLanes vectors.
#if defined(__AVX512F__)
inline void transpose(VecI (&rows)[kLanes]) {
  // In each 4 x 4 block of words first, where shuffles are cheap, then the blocks among each other.
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int half = 0; half < 2; ++half) {
      b[i + 2 * half] = _mm512_unpacklo_epi64(a[i + half], a[i + half + 2]);
      b[i + 2 * half + 1] = _mm512_unpackhi_epi64(a[i + half], a[i + half + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = i; j < i + 4; ++j) {
      a[j] = _mm512_shuffle_i32x4(b[j], b[j + 4], 0x88);
      a[j + 4] = _mm512_shuffle_i32x4(b[j], b[j + 4], 0xdd);
    }
  for (int i = 0; i < 8; ++i) {
    rows[i] = (VecI)_mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
    rows[i + 8] = (VecI)_mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
  }
}
#else
inline void transpose(VecI (&rows)[kLanes]) {
  using Lanes = std::make_integer_sequence<int, kLanes>;
  for (int stage = 1; stage < kLanes; stage *= 2) {
    VecI next[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = detail::interleave<0>(rows[i], rows[i + kLanes / 2], Lanes{});
      next[2 * i + 1] = detail::interleave<1>(rows[i], rows[i + kLanes / 2], Lanes{});
    }
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}
#endif

}  // namespace tangram
