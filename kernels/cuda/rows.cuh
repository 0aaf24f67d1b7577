// What a block of prefill.cuh works on and holds: a piece of work, and the running softmax of its rows.
#pragma once

#include "attend.cuh"
#include "tile.cuh"

namespace tangram {

template <typename T, int D>
struct Prefill {
  using Shape = Tile<T, D>;
  static constexpr int kWarps = 4, kThreads = kWarps * kWarp;
  static constexpr int kRowTiles = D <= 128 ? 2 : 1;  // 16 rows each, of a warp
  static constexpr int kBlocks = D <= 128 ? 2 : 1;    // of a multiprocessor, at the least
  static constexpr int kRows = kWarps * kRowTiles * 16;
  static constexpr int kTokens = kWarps * kUnit;  // each warp copies one unit of a tile
  static constexpr int kTileBytes = kTokens * Shape::kTokenBytes;
  static constexpr int kQueryBytes = kRows * D * sizeof(T);
  static constexpr int kSharedBytes = kQueryBytes + 2 * kTileBytes;
  // Of the workspace: sums, then (top, sum) of each row as each of four lanes holds it.
  static constexpr int kSlotFloats = kRows * D + kRows * 8;
  static constexpr int kColumns = 2;  // of 8 elements each, that a block of merge_kernel adds up

  // Places for pieces along the tokens: request i's begin at start / room + i, so none needs to count the others'.
  static int places(const Step& step, int group) { return step.tokens / (kRows / group) + step.requests; }

  // Where a piece of 16 bytes of a query lies. Rows are spread over the banks.
  static __device__ uint32_t query_at(int row, int piece) {
    const int turn = D % 64 == 0 ? row & 7 : row >> 1 & 3;  // a row's pieces are a multiple of 8, or else of 4
    return row * D * sizeof(T) + ((piece ^ turn) << 4);
  }
};

// `count` new tokens of a request, from row `token` of the step's on, seen by one KV head.
struct alignas(16) Piece {
  int request, head, token, count;  // count 0: no work
  int seen, sealed, raw, tier;      // seen: tokens that the first of them sees
  int member, first, kept, unused;  // as in Head

  template <typename Find>
  __device__ Piece(const Step& step, int group, int room, int place, int head_index, Find find) {
    request = find(step.requests, place, [&](int i) { return step.query_start_loc[i] / room + i; });
    head = head_index;
    const Request of(step, request);
    const Head held(step, head);
    tier = held.tier, member = held.member, first = held.first, kept = held.kept;
    sealed = of.sealed, raw = of.raw(step);
    const int from = (place - (of.start / room + request)) * room;
    token = of.start + from;
    count = decodes(of.count, group) ? 0 : max(0, min(room, of.count - from));
    seen = sealed * kept * step.page_tokens + raw - of.count + from + 1;
    unused = 0;
  }
  __device__ int tiles(int tokens) const { return count == 0 ? 0 : ceil_div(seen + count - 1, tokens); }
};

// Where this lane's first two elements of a row of a piece go, or null if the row is of nobody.
template <typename T, int D>
__device__ T* output(const Attend& attend, const Piece& piece, int group, int row) {
  const int token = row / group, query_head = piece.head * group + row - token * group;
  if (token >= piece.count) return nullptr;
  const int64_t place = piece.token + token;
  return static_cast<T*>(attend.out) + place * attend.out_token + query_head * attend.out_head + threadIdx.x % 4 * 2;
}

// The running softmax of a block's rows: a warp's are in row tiles of 16, a lane's at lane / 4 and 8 below.
template <typename T, int D>
struct Rows {
  using Sizes = Prefill<T, D>;
  using Shape = Tile<T, D>;
  static constexpr int kRowTiles = Sizes::kRowTiles, kTokens = Sizes::kTokens, kBlocks = kTokens / 8;
  float sums[kRowTiles][D / 8][4], top[kRowTiles][2], sum[kRowTiles][2];

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.f;
      top[m][0] = top[m][1] = -INFINITY;
      sum[m][0] = sum[m][1] = 0.f;
    }
  }
  static __device__ int row(int m, int r) {
    return (threadIdx.x / kWarp * kRowTiles + m) * 16 + r * 8 + threadIdx.x % kWarp / 4;
  }

  // Add a tile of 64 tokens. limit: the number of the tile's tokens that each row sees, where `masked`. The highest
  // scores are kept in units of log 2; a tile's own are not until they are exponents.
  __device__ void add(uint32_t query_base, uint32_t keys_at, const Scoring& scoring, bool masked,
                      const int (&limit)[kRowTiles][2]) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    float scores[kRowTiles][kBlocks][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t left[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const int row = (warp * kRowTiles + m) * 16 + (lane & 15);
        load_matrices(left[m], query_base + Sizes::query_at(row, 2 * k + (lane >> 4)));
      }
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
    float unit = scoring.scale * kLog2E;
    if (scoring.soft_cap > 0.f || scoring.scale <= 0.f) {  // rare: scores must be whole before they are compared
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[m][n][i] = scoring(scores[m][n][i]);
      unit = 1.f;
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (masked) {
          const int visible = limit[m][r] - lane % 4 * 2;
#pragma unroll
          for (int n = 0; n < kBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (n * 8 + e >= visible) scores[m][n][2 * r + e] = -INFINITY;
        }
        float high = scores[m][0][2 * r];
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) high = fmaxf(high, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
        high = fmaxf(top[m][r], quad_max(high) * unit);
        // A run may begin beyond what a row sees: its scores are all -inf then, and must not become NaN.
        const float base = high == -INFINITY ? 0.f : high, shrink = exp2_fast(top[m][r] - base);
        top[m][r] = high;
        float added = 0.f;
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = scores[m][n][2 * r + e];
            score = exp2_fast(fmaf(score, unit, -base));
            added += score;
          }
        sum[m][r] = sum[m][r] * shrink + added;
        if (__all_sync(~0u, shrink == 1.f)) continue;  // as for most tiles: no row has a new highest score
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

  // A row's sum over the four lanes that hold it.
  __device__ void gather_sums() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[m][r] = quad_sum(sum[m][r]);
  }

  // The workspace's slots hold what the threads hold, each number of all threads side by side.
  __device__ void store(float* slot) const {
    float* at = slot + threadIdx.x;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) at[((n * kRowTiles + m) * 4 + i) * Sizes::kThreads] = sums[m][n][i];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        at[Sizes::kRows * D + (m * 4 + r) * Sizes::kThreads] = top[m][r];
        at[Sizes::kRows * D + (m * 4 + 2 + r) * Sizes::kThreads] = sum[m][r];
      }
    }
  }

  __device__ void write(const Attend& attend, const Piece& piece, int group) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        T* out = output<T, D>(attend, piece, group, row(m, r));
        if (out == nullptr) continue;
        const float factor = finish(attend, piece.head * group + row(m, r) % group, top[m][r], sum[m][r]);
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
          reinterpret_cast<uint32_t*>(out)[n * 4] = pack<T>(sums[m][n][2 * r] * factor, sums[m][n][2 * r + 1] * factor);
      }
  }
};

}  // namespace tangram
