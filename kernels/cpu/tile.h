// The arithmetic of attention on one tile: up to kRows query rows against up to kBlock tokens, all float32.
//
// Each number of a row is summed in an order that the tokens' places alone decide: scores along the head dimension,
// outputs along the tokens. How many rows are worked on together changes how often a value is loaded, never a sum.
#pragma once

#include <type_traits>

#include "simd.h"

namespace tangram {

constexpr int kBlock = 64;  // tokens of a tile, counted from the start of a list of kept or raw tokens
constexpr int kRows = 64;   // query rows of a tile, unless one token alone has more

#if defined(__AVX512F__)
constexpr int kRowStep = 6, kVecStep = 4;  // 24 sums of the 32 registers
#elif defined(__AVX2__)
constexpr int kRowStep = 3, kVecStep = 4;  // 12 sums of 16
#else
constexpr int kRowStep = 4, kVecStep = 4;
#endif

// Call f with the number of rows as a constant: Most, or what is left.
template <int Most, class F>
inline void with_rows(int rows, F f) {
  if constexpr (Most > 1) {
    if (rows < Most) return with_rows<Most - 1>(rows, f);
  }
  f(std::integral_constant<int, Most>{});
}

// What becomes of a product of query and key.
struct Scoring {
  float scale;
  float soft_cap;  // 0 for none
};

// scores[r][j] = scale * sum_d query[r][d] * keys[d][j], for all kBlock columns. With Pairs, d counts words of two
// bfloat16; without, float32.
template <int Rows, bool Pairs>
inline void score(const float* query, int query_stride, const float* keys, int depth, float scale, float* scores) {
  constexpr int span = kVecStep * kLanes;
  static_assert(kBlock % span == 0, "a tile is a whole number of steps");
  for (int c = 0; c < kBlock; c += span) {
    Vec sum[Rows][kVecStep] = {};
    for (int d = 0; d < depth; ++d) {
      Vec key[kVecStep];
      for (int v = 0; v < kVecStep; ++v) key[v] = load<Vec>(keys + d * kBlock + c + v * kLanes);
      for (int r = 0; r < Rows; ++r) {
        const Vec q = broadcast(query[r * query_stride + d]);
        for (int v = 0; v < kVecStep; ++v) {
          if constexpr (Pairs)
            sum[r][v] = fma_pairs(q, key[v], sum[r][v]);
          else
            sum[r][v] = fma(q, key[v], sum[r][v]);
        }
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < kVecStep; ++v) store(scores + r * kBlock + c + v * kLanes, sum[r][v] * broadcast(scale));
  }
}

// out[r][d] += sum over j in [begin, end) of weights[r][j] * values(j, d), for Width vectors from d on.
template <int Rows, int Width, class Values>
inline void mix_columns(const float* weights, Values values, int stride, int begin, int end, int d, float* out) {
  Vec sum[Rows][Width];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Width; ++v) sum[r][v] = load<Vec>(out + r * stride + d + v * kLanes);
  for (int j = begin; j < end; ++j) {
    Vec value[Width];
    for (int v = 0; v < Width; ++v) value[v] = values(j, d + v * kLanes);
    for (int r = 0; r < Rows; ++r) {
      const Vec weight = broadcast(weights[r * kBlock + j]);
      for (int v = 0; v < Width; ++v) sum[r][v] = fma(weight, value[v], sum[r][v]);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Width; ++v) store(out + r * stride + d + v * kLanes, sum[r][v]);
}

template <int Rows, class Values>
inline void mix(const float* weights, Values values, int stride, int begin, int end, float* out) {
  int d = 0;
  for (; d + kVecStep * kLanes <= stride; d += kVecStep * kLanes)
    mix_columns<Rows, kVecStep>(weights, values, stride, begin, end, d, out);
  if (d < stride)
    with_rows<kVecStep - 1>((stride - d) / kLanes, [&](auto width) {
      mix_columns<Rows, decltype(width)::value>(weights, values, stride, begin, end, d, out);
    });
}

// The softmax of a set of rows over the tokens seen so far: maximum, sum of weights, weighted sum of values.
struct Softmax {
  float* top;  // [rows rounded up to kLanes]
  float* sum;  // likewise
  float* out;  // [rows, stride]

  void clear(int rows, int stride) const {
    for (int r = 0; r < rows; ++r) {
      top[r] = -__builtin_inff();
      sum[r] = 0.0f;
    }
    std::memset(out, 0, sizeof(float) * size_t(rows) * size_t(stride));
  }
};

// Replace scores s by limit * tanh(s / limit).
inline void cap(float* scores, float limit) {
  const Vec inverse = broadcast(1.0f / limit);
  for (int j = 0; j < kBlock; j += kLanes)
    store(scores + j, tanh(load<Vec>(scores + j) * inverse) * broadcast(limit));
}

// The largest of the first `limit` scores; those after it become -inf.
inline float mask_and_max(float* scores, int limit) {
  const Vec none = broadcast(-__builtin_inff());
  Vec top = none;
  for (int j = 0; j < kBlock; j += kLanes) {
    Vec s = load<Vec>(scores + j);
    if (j + kLanes > limit) {
      s = select(lane_index() + broadcast(int32_t(j)) < broadcast(int32_t(limit)), s, none);
      store(scores + j, s);
    }
    top = max(s, top);
  }
  return max_lanes(top);
}

// Replace scores by weights exp(score - top) and return their sum.
inline float weigh(float* scores, float top) {
  Vec sum{};
  for (int j = 0; j < kBlock; j += kLanes) {
    const Vec weight = exp_nonpositive(load<Vec>(scores + j) - broadcast(top));
    store(scores + j, weight);
    sum += weight;
  }
  return sum_lanes(sum);
}

// Add one tile to the softmax of the rows [first, rows); row r sees the first limit[r] > 0 tokens of it, and limits
// do not decrease with r. `keys` is transposed, [depth][kBlock]; values(j, d) is the vector at d of token j's value.
template <bool Pairs, class Values>
inline void add_tile(const float* query, int query_stride, int first, int rows, const int* limit, const float* keys,
                     int depth, Values values, int stride, Scoring scoring, float* scores, float* scratch,
                     const Softmax& state) {
  for (int r = first; r < rows; r += kRowStep)
    with_rows<kRowStep>(rows - r, [&](auto count) {
      score<decltype(count)::value, Pairs>(query + r * query_stride, query_stride, keys, depth, scoring.scale,
                                           scores + r * kBlock);
    });
  if (scoring.soft_cap > 0)
    for (int r = first; r < rows; ++r) cap(scores + r * kBlock, scoring.soft_cap);
  float* top = scratch;
  for (int r = first; r < rows; ++r) top[r] = mask_and_max(scores + r * kBlock, limit[r]);
  float* fade = scratch + (rows + kLanes - 1) / kLanes * kLanes;
  for (int r = first / kLanes * kLanes; r < rows; r += kLanes) {
    const Vec before = load<Vec>(state.top + r), now = max(load<Vec>(top + r), before);
    store(fade + r, exp_nonpositive(before - now));
    store(top + r, now);
  }
  for (int r = first; r < rows; ++r) {
    state.top[r] = top[r];
    const float weight = weigh(scores + r * kBlock, top[r]);
    state.sum[r] = state.sum[r] * fade[r] + weight;
    const Vec factor = broadcast(fade[r]);
    for (int d = 0; d < stride; d += kLanes)
      store(state.out + r * stride + d, load<Vec>(state.out + r * stride + d) * factor);
  }
  for (int r = first; r < rows; r += kRowStep)
    with_rows<kRowStep>(rows - r, [&](auto count) {
      constexpr int Rows = decltype(count)::value;
      const int shared = limit[r];
      mix<Rows>(scores + r * kBlock, values, stride, 0, shared, state.out + r * stride);
      for (int i = 1; i < Rows; ++i)
        if (limit[r + i] > shared)
          mix<1>(scores + (r + i) * kBlock, values, stride, shared, limit[r + i], state.out + (r + i) * stride);
    });
}

// Merge `part` into `total` for the rows [first, rows). The order of merges is the order of the tokens.
inline void merge(const Softmax& part, int first, int rows, int stride, const Softmax& total) {
  for (int r = first; r < rows; ++r) {
    const float top = part.top[r] > total.top[r] ? part.top[r] : total.top[r];
    const Vec old = exp_nonpositive(broadcast(total.top[r] - top));
    const Vec fresh = exp_nonpositive(broadcast(part.top[r] - top));
    total.top[r] = top;
    total.sum[r] = fma(broadcast(part.sum[r]), fresh, broadcast(total.sum[r]) * old)[0];
    float* to = total.out + r * stride;
    for (int d = 0; d < stride; d += kLanes)
      store(to + d, fma(load<Vec>(part.out + r * stride + d), fresh, load<Vec>(to + d) * old));
  }
}

}  // namespace tangram
