// Attention of requests with several new tokens each, which see what their heads hold and each other causally.
//
// A block takes one KV head and as many new tokens as fill its rows with all query heads of the group: row r is
// token r / group and query head r % group. It walks the head's history and the new tokens, which are in the
// ring already, in tiles of 64, one tile's copy ahead of its products.
#pragma once

#include "attend.cuh"
#include "tile.cuh"

namespace tangram {

template <typename T, int D>
struct Prefill {
  using Shape = Tile<T, D>;
  static constexpr int kWarps = 4, kThreads = kWarps * kWarp;
  static constexpr int kRowTiles = D <= 128 ? 2 : 1;  // 16 rows each, of a warp
  static constexpr int kRows = kWarps * kRowTiles * 16;
  static constexpr int kTokens = kWarps * kUnit;  // each warp copies one unit of a tile
  static constexpr int kTileBytes = kTokens * Shape::kTokenBytes;
  static constexpr int kQueryBytes = kRows * D * sizeof(T);
  static constexpr int kSharedBytes = kQueryBytes + 2 * kTileBytes;

  // Places for blocks along the tokens: request i's begin at start / tokens + i, so none needs to count the others'.
  static int places(const Step& step, int group) { return step.tokens / (kRows / group) + step.requests; }

  static __device__ uint32_t query_at(int row, int piece) { return row * D * sizeof(T) + ((piece ^ (row & 7)) << 4); }
};

template <typename T, int D>
__global__ void __launch_bounds__(Prefill<T, D>::kThreads) prefill_kernel(const Step step, const Attend attend) {
  using Sizes = Prefill<T, D>;
  using Shape = Tile<T, D>;
  constexpr int kRowTiles = Sizes::kRowTiles, kTokens = Sizes::kTokens, kBlocks = kTokens / 8;
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int group = attend.group(step), room = Sizes::kRows / group;  // tokens of a block
  const int index = warp_last_at_most(step.requests, blockIdx.x,
                                      [&](int i) { return step.query_start_loc[i] / room + i; });
  const Request request(step, index);
  const int from = (static_cast<int>(blockIdx.x) - (request.start / room + index)) * room;
  if (from >= request.count || decodes(request.count, group)) return;
  const int head_index = blockIdx.y, count = min(room, request.count - from);
  const Head head(step, head_index);
  const int raw = request.raw(step);
  // Tokens that the block's first row sees; its last one sees `count - 1` more, and so on for those between.
  const int seen = request.sealed * head.kept * step.page_tokens + raw - request.count + from + 1;
  const int tiles = ceil_div(seen + count - 1, kTokens);

  const uint32_t query_base = shared_address(shared), tile_base = query_base + Sizes::kQueryBytes;
  const T* query = static_cast<const T*>(attend.query) + (request.start + from) * attend.query_token;
  for (int i = threadIdx.x; i < Sizes::kQueryBytes / 16; i += Sizes::kThreads) {
    const int row = i / (D / 8), piece = i - row * (D / 8), token = row / group;
    const int query_head = head_index * group + row - token * group;
    const T* source = query + token * attend.query_token + query_head * attend.query_head + piece * 8;
    copy_async(query_base + Sizes::query_at(row, piece), token < count ? source : query, token < count);
  }
  const int32_t* row_of_pages = step.rows + index * step.row_stride;
  Span known{step.pool, 0};  // lane i: where this warp's unit of tile 32 j + i lies
  const auto issue = [&](int tile) {
    if (tile < tiles) {
      if (tile % kWarp == 0) {
        const int unit = (tile + lane) * Sizes::kWarps + warp;
        known = (tile + lane) < tiles ? locate<Shape::kTokenBytes>(step, row_of_pages, head, request.sealed, raw, unit)
                                      : Span{step.pool, 0};
      }
      const int lane_of = tile % kWarp;
      const auto address = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(known.source), lane_of);
      const int valid = __shfl_sync(~0u, known.valid, lane_of);
      Shape::copy_unit(tile_base + (tile & 1) * Sizes::kTileBytes + warp * Shape::kUnitBytes,
                       {reinterpret_cast<const char*>(address), valid});
    }
    copy_commit();
  };
  issue(0);

  const Scoring scoring{attend.scale, attend.soft_cap};
  float sums[kRowTiles][D / 8][4] = {}, top[kRowTiles][2], sum[kRowTiles][2] = {};
  int limit[kRowTiles][2];  // tokens that this lane's rows see
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[m][r] = -INFINITY;
      limit[m][r] = seen + ((warp * kRowTiles + m) * 16 + r * 8 + lane / 4) / group;
    }

  for (int tile = 0; tile < tiles; ++tile) {
    copy_wait<0>();
    __syncthreads();  // this tile is there, and everyone is done with the one before
    issue(tile + 1);
    const uint32_t keys_at = tile_base + (tile & 1) * Sizes::kTileBytes;
    float scores[kRowTiles][kBlocks][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t left[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
        load_matrices(left[m], query_base + Sizes::query_at((warp * kRowTiles + m) * 16 + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
      for (int n = 0; n < kTokens / 16; ++n) {
        uint32_t keys[4];
        Shape::keys(keys, keys_at, n * 16, k);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          multiply_add<T>(scores[m][2 * n], left[m], keys[0], keys[1]);
          multiply_add<T>(scores[m][2 * n + 1], left[m], keys[2], keys[3]);
        }
      }
    }
    const bool masked = (tile + 1) * kTokens > seen;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int visible = limit[m][r] - tile * kTokens - lane % 4 * 2;
        float high = top[m][r];
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = scores[m][n][2 * r + e];
            score = masked && n * 8 + e >= visible ? -INFINITY : scoring(score);
            high = fmaxf(high, score);
          }
        high = quad_max(high);
        const float shrink = exp2_fast(top[m][r] - high);
        top[m][r] = high;
        float added = 0.f;
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = scores[m][n][2 * r + e];
            score = exp2_fast(score - high);
            added += score;
          }
        sum[m][r] = sum[m][r] * shrink + added;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) sums[m][n][2 * r] *= shrink, sums[m][n][2 * r + 1] *= shrink;
      }
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) {
      uint32_t weights[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&pair)[4] = scores[m][2 * k + (i >> 1)];
          weights[m][i] = pack<T>(pair[(i & 1) * 2], pair[(i & 1) * 2 + 1]);
        }
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        uint32_t values[4];
        Shape::values(values, keys_at, k * 16, n);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          multiply_add<T>(sums[m][2 * n], weights[m], values[0], values[1]);
          multiply_add<T>(sums[m][2 * n + 1], weights[m], values[2], values[3]);
        }
      }
    }
  }

#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = quad_sum(sum[m][r]);
      const int row = (warp * kRowTiles + m) * 16 + r * 8 + lane / 4, token = row / group;
      if (token >= count) continue;
      const int query_head = head_index * group + row - token * group;
      const float factor = finish(attend, query_head, top[m][r], total);
      T* out = static_cast<T*>(attend.out) + (request.start + from + token) * attend.out_token +
               query_head * attend.out_head + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        reinterpret_cast<uint32_t*>(out)[n * 4] = pack<T>(sums[m][n][2 * r] * factor, sums[m][n][2 * r + 1] * factor);
    }
}

}  // namespace tangram
