// What a warp of decode.cuh holds, the running softmax of up to 16 query heads, and how such sums are merged.
#pragma once

#include "attend.cuh"
#include "share.cuh"
#include "tile.cuh"

namespace tangram {

template <typename T, int D>
struct Decode {
  using Shape = Tile<T, D>;
  static constexpr int kWarps = 4, kThreads = kWarps * kWarp;
  static constexpr int kStages = D <= 64 ? 6 : D <= 96 ? 4 : D <= 128 ? 3 : 2;
  static constexpr int kTileBytes = kWarps * kStages * Shape::kUnitBytes;
  static constexpr int kSlotFloats = kDecodeGroup * (D + 2);  // of the workspace: sums, then (top, sum) a row

  struct Extra {
    char* slots[kWarps][kStages];       // where the newest token of the unit in a tile is to be written, or null
    float2 tops[kWarps][kDecodeGroup];  // highest score and sum of weights of each row
    int tile[kWarps];                   // which of its tiles holds a warp's sums, or -1
    int scratch[kWarps];
    int parts[kMostAligned + 1];        // blocks before each pair, where each has blocks of its own
    int last;
  };
  static size_t shared_bytes(const Step& step) { return kTileBytes + sizeof(Extra) + Share::bytes(step); }

  // Where two elements of a row of sums lie in a tile: rows are spread over the banks.
  static __device__ int sums_at(int row, int pair) {
    return row * (D / 2) + (pair ^ ((row & (D % 64 == 0 ? 7 : 3)) << 2));
  }
};

// The running softmax of up to 16 rows over the units that one warp has seen.
template <typename T, int D>
struct Running {
  float sums[D / 8][4], top[2], sum[2];

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0.f;
    top[0] = top[1] = -INFINITY;
    sum[0] = sum[1] = 0.f;
  }

  // Add a tile of 16 tokens, of which the first `valid` (at least one) exist.
  __device__ void add(const uint32_t (&query)[D / 16][4], uint32_t tile, int valid, const Scoring& scoring) {
    using Shape = Tile<T, D>;
    const int column = threadIdx.x % 4 * 2;
    float scores[2][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t keys[4];
      Shape::keys(keys, tile, 0, k);
      multiply_add<T>(scores[0], query[k], keys[0], keys[1]);
      multiply_add<T>(scores[1], query[k], keys[2], keys[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scores[n][i] = n * 8 + column + (i & 1) < valid ? scoring(scores[n][i]) : -INFINITY;
    uint32_t weights[4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float high = quad_max(fmaxf(fmaxf(scores[0][2 * r], scores[0][2 * r + 1]),
                                        fmaxf(scores[1][2 * r], scores[1][2 * r + 1])));
      const float next = fmaxf(top[r], high), shrink = exp2_fast(top[r] - next);
      top[r] = next;
      sum[r] *= shrink;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) sums[n][2 * r] *= shrink, sums[n][2 * r + 1] *= shrink;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float even = exp2_fast(scores[n][2 * r] - next), odd = exp2_fast(scores[n][2 * r + 1] - next);
        sum[r] += even + odd;
        weights[2 * n + r] = pack<T>(even, odd);
      }
    }
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      uint32_t values[4];
      Shape::values(values, tile, 0, n);
      multiply_add<T>(sums[2 * n], weights, values[0], values[1]);
      multiply_add<T>(sums[2 * n + 1], weights, values[2], values[3]);
    }
  }
};

// The query heads of a KV head as left operands; rows from `group` on are zero.
template <typename T, int D>
__device__ void load_query(uint32_t (&query)[D / 16][4], const Attend& attend, int64_t token, int head, int group) {
  const int lane = threadIdx.x % kWarp;
  const T* base = static_cast<const T*>(attend.query) + token * attend.query_token + lane % 4 * 2;
#pragma unroll
  for (int k = 0; k < D / 16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + (i & 1) * 8;
      const T* from = base + (head * group + row) * attend.query_head + k * 16 + (i >> 1) * 8;
      query[k][i] = row < group ? *reinterpret_cast<const uint32_t*>(from) : 0u;
    }
}

// Blocks whose sums are loaded at once when they are merged: a load takes longer than all the arithmetic on it.
constexpr int kMergedAtOnce = 16;

// Add up what the blocks c0 .. c1 left of a pair, and write its output. By the whole block.
template <typename T, int D>
__device__ void merge_blocks(const Attend& attend, int c0, int c1, int64_t token, int head, int group) {
  constexpr int kSlot = Decode<T, D>::kSlotFloats;
  const auto slot = [&](int c) { return attend.partial + static_cast<int64_t>(2 * c + (c == c0)) * kSlot; };
  for (int index = threadIdx.x; index < group * (D / 4); index += blockDim.x) {
    const int row = index / (D / 4), piece = index - row * (D / 4);
    float top = -INFINITY, sum = 0.f;
    float4 total = {0.f, 0.f, 0.f, 0.f};
    for (int base = c0; base <= c1; base += kMergedAtOnce) {
      float2 ends[kMergedAtOnce];
      float4 parts[kMergedAtOnce];
#pragma unroll
      for (int i = 0; i < kMergedAtOnce; ++i) {
        ends[i] = {-INFINITY, 0.f};
        parts[i] = {0.f, 0.f, 0.f, 0.f};
        if (base + i > c1) continue;
        ends[i] = __ldcg(reinterpret_cast<const float2*>(slot(base + i) + kDecodeGroup * D) + row);
        parts[i] = __ldcg(reinterpret_cast<const float4*>(slot(base + i) + row * D) + piece);
      }
      float high = top;
#pragma unroll
      for (int i = 0; i < kMergedAtOnce; ++i) high = fmaxf(high, ends[i].x);
      const float shrink = exp2f(top - high);
      top = high;
      sum *= shrink, total.x *= shrink, total.y *= shrink, total.z *= shrink, total.w *= shrink;
#pragma unroll
      for (int i = 0; i < kMergedAtOnce; ++i) {
        const float weight = exp2f(ends[i].x - top);
        sum += ends[i].y * weight;
        total.x += parts[i].x * weight, total.y += parts[i].y * weight;
        total.z += parts[i].z * weight, total.w += parts[i].w * weight;
      }
    }
    const int query_head = head * group + row;
    const float factor = finish(attend, query_head, top, sum);
    T* out = static_cast<T*>(attend.out) + token * attend.out_token + query_head * attend.out_head + piece * 4;
    reinterpret_cast<uint32_t*>(out)[0] = pack<T>(total.x * factor, total.y * factor);
    reinterpret_cast<uint32_t*>(out)[1] = pack<T>(total.z * factor, total.w * factor);
  }
}

}  // namespace tangram
