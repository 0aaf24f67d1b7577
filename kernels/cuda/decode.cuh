// Attention of requests with one new token each: bound by memory, so that every key and value is read once and
// all blocks read equally much (share.cuh).
//
// A block of four warps walks its run of units; warp w takes every fourth one into tiles of its own, several
// copies ahead of its products, and all query heads of a KV head are the rows of one product. Where a pair ends,
// the warps' sums are merged. A pair that a block holds whole is finished there; sums of a pair that several
// blocks share go to the workspace, and the block that arrives last adds them up in the blocks' order.
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
        const float low_weight = exp2_fast(scores[n][2 * r] - next), high_weight = exp2_fast(scores[n][2 * r + 1] - next);
        sum[r] += low_weight + high_weight;
        weights[2 * n + r] = pack<T>(low_weight, high_weight);
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

// Add up what the blocks c0 .. c1 left of a pair, and write its output. By the whole block.
template <typename T, int D>
__device__ void merge_blocks(const Attend& attend, int c0, int c1, int64_t token, int head, int group) {
  constexpr int kSlot = Decode<T, D>::kSlotFloats;
  const auto slot = [&](int c) { return attend.partial + static_cast<int64_t>(2 * c + (c == c0)) * kSlot; };
  for (int index = threadIdx.x; index < group * (D / 4); index += blockDim.x) {
    const int row = index / (D / 4), piece = index - row * (D / 4);
    float top = -INFINITY;
#pragma unroll 16
    for (int c = c0; c <= c1; ++c) top = fmaxf(top, __ldcg(slot(c) + kDecodeGroup * D + 2 * row));
    float4 total = {0.f, 0.f, 0.f, 0.f};
    float sum = 0.f;
#pragma unroll 16
    for (int c = c0; c <= c1; ++c) {
      const float2 ends = __ldcg(reinterpret_cast<const float2*>(slot(c) + kDecodeGroup * D) + row);
      const float4 part = __ldcg(reinterpret_cast<const float4*>(slot(c) + row * D) + piece);
      const float weight = exp2f(ends.x - top);
      sum += ends.y * weight;
      total.x += part.x * weight, total.y += part.y * weight;
      total.z += part.z * weight, total.w += part.w * weight;
    }
    const int query_head = head * group + row;
    const float factor = finish(attend, query_head, top, sum);
    T* out = static_cast<T*>(attend.out) + token * attend.out_token + query_head * attend.out_head + piece * 4;
    reinterpret_cast<uint32_t*>(out)[0] = pack<T>(total.x * factor, total.y * factor);
    reinterpret_cast<uint32_t*>(out)[1] = pack<T>(total.z * factor, total.w * factor);
  }
}

template <typename T, int D>
__global__ void __launch_bounds__(Decode<T, D>::kThreads) decode_kernel(const Step step, const Attend attend) {
  using Shape = Tile<T, D>;
  using Sizes = Decode<T, D>;
  extern __shared__ __align__(128) char shared[];
  auto& extra = *reinterpret_cast<typename Sizes::Extra*>(shared + Sizes::kTileBytes);
  Share share(step, reinterpret_cast<int*>(&extra + 1));
  const int group = attend.group(step), lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  share.fill<Sizes::kThreads>(step, group, extra.scratch);
  const int units = share.first[step.requests];
  const int pairs = step.requests * step.kv_heads, blocks = gridDim.x;
  const bool aligned = pairs <= kMostAligned && 4 * pairs <= blocks && units < kAlignedUnits * blocks;
  const int run = max(kLeastRun, ceil_div(units, aligned ? blocks - pairs : blocks));
  int begin = blockIdx.x * run, end = min(units, begin + run);
  int first_block = 0, last_block = 0;  // that share this block's pair, where aligned
  if (aligned) {
    running_sums<Sizes::kThreads>(pairs, extra.parts, extra.scratch, [&](int i) {
      const Pair pair(step, share, i / step.kv_heads, i % step.kv_heads);
      return ceil_div(pair.stop - pair.first, run);
    });
    if (blockIdx.x >= extra.parts[pairs]) return;
    const int own = last_at_most(pairs, blockIdx.x, [&](int i) { return extra.parts[i]; });
    const Pair pair(step, share, own / step.kv_heads, own % step.kv_heads);
    first_block = extra.parts[own], last_block = extra.parts[own + 1] - 1;
    const int part = ceil_div(pair.stop - pair.first, last_block - first_block + 1);
    begin = pair.first + (blockIdx.x - first_block) * part, end = min(pair.stop, begin + part);
  }
  if (begin >= end) return;

  const Scoring scoring{attend.scale, attend.soft_cap};
  char* tiles = shared + warp * Sizes::kStages * Shape::kUnitBytes;
  const uint32_t tile_address = shared_address(tiles);
  // Lane i knows where unit number 32 j + i of this warp lies; all lanes look their units up at once.
  Span known{step.pool, 0};
  const auto issue = [&](int number, int stage) {
    if (number % kWarp == 0) {
      const int unit = begin + Sizes::kWarps * (number + lane) + warp;
      known.valid = 0;
      if (unit < end) {
        const Pair pair(step, share, unit);
        known = locate<Shape::kTokenBytes>(step, step.rows + pair.request * step.row_stride, Head(step, pair.head),
                                           pair.sealed, pair.raw, unit - pair.first);
      }
    }
    const int from = number % kWarp;
    const auto address = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(known.source), from);
    const int valid = __shfl_sync(~0u, known.valid, from);
    if (begin + Sizes::kWarps * number + warp < end)
      Shape::copy_unit(tile_address + stage * Shape::kUnitBytes, {reinterpret_cast<const char*>(address), valid});
    copy_commit();  // also when nothing was copied: the waits count commits
  };
  for (int stage = 0; stage < Sizes::kStages; ++stage) issue(stage, stage);

  Pair pair(step, share, begin);
  int number = 0, stage = 0;  // of this warp's next unit
  Running<T, D> running;
  for (int at = begin; at < end;) {
    const int stop = min(pair.stop, end), tokens_end = pair.sealed * (share.kept[pair.head + 1] - share.kept[pair.head]) * kUnit + pair.raw;
    const int64_t token = step.query_start_loc[pair.request];
    uint32_t query[D / 16][4];
    load_query<T, D>(query, attend, token, pair.head, group);
    running.clear();
    int used = -1;  // the tile whose unit was added last, to be filled anew
    for (int unit = begin + Sizes::kWarps * number + warp; unit < stop; unit += Sizes::kWarps) {
      if (used >= 0) issue(number - 1 + Sizes::kStages, used);
      copy_wait<Sizes::kStages - 1>();
      __syncwarp();
      running.add(query, tile_address + stage * Shape::kUnitBytes, min(kUnit, tokens_end - (unit - pair.first) * kUnit), scoring);
      __syncwarp();
      used = stage;
      stage = stage + 1 == Sizes::kStages ? 0 : stage + 1;
      ++number;
    }

    // The tile that was read last has room for exactly 16 rows of sums.
    auto* mine = reinterpret_cast<float2*>(tiles + max(used, 0) * Shape::kUnitBytes);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane / 4 + 8 * r;
      const float sum = quad_sum(running.sum[r]);
      if (row >= group) continue;
      if (lane % 4 == 0) extra.tops[warp][row] = {running.top[r], sum};
      if (used < 0) continue;
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        mine[Sizes::sums_at(row, n * 4 + lane % 4)] = {running.sums[n][2 * r], running.sums[n][2 * r + 1]};
    }
    if (lane == 0) extra.tile[warp] = used;
    __syncthreads();
    const bool whole = at == pair.first && stop == pair.stop;
    float* slot = attend.partial + static_cast<int64_t>(2 * blockIdx.x + (at == pair.first)) * Sizes::kSlotFloats;
    for (int index = threadIdx.x; index < group * (D / 2); index += Sizes::kThreads) {
      const int row = index / (D / 2), piece = index - row * (D / 2);
      float top = -INFINITY, sum = 0.f;
      float2 total = {0.f, 0.f};
#pragma unroll
      for (int w = 0; w < Sizes::kWarps; ++w) top = fmaxf(top, extra.tops[w][row].x);
#pragma unroll
      for (int w = 0; w < Sizes::kWarps; ++w) {
        if (extra.tile[w] < 0) continue;
        const float weight = exp2f(extra.tops[w][row].x - top);
        const auto* sums = reinterpret_cast<const float2*>(shared + (w * Sizes::kStages + extra.tile[w]) * Shape::kUnitBytes);
        const float2 part = sums[Sizes::sums_at(row, piece)];
        sum += extra.tops[w][row].y * weight;
        total.x += part.x * weight, total.y += part.y * weight;
      }
      if (whole) {
        const int query_head = pair.head * group + row;
        const float factor = finish(attend, query_head, top, sum);
        T* out = static_cast<T*>(attend.out) + token * attend.out_token + query_head * attend.out_head;
        reinterpret_cast<uint32_t*>(out)[piece] = pack<T>(total.x * factor, total.y * factor);
      } else {
        reinterpret_cast<float2*>(slot + row * D)[piece] = total;
        if (piece == 0) reinterpret_cast<float2*>(slot + kDecodeGroup * D)[row] = {top, sum};
      }
    }
    if (!whole) {
      const int c0 = aligned ? first_block : pair.first / run, c1 = aligned ? last_block : (pair.stop - 1) / run;
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) extra.last = arrive(attend.arrived, c0, c1);
      __syncthreads();
      if (extra.last) {
        __threadfence();
        merge_blocks<T, D>(attend, c0, c1, token, pair.head, group);
      }
    }
    __syncthreads();
    if (used >= 0) issue(number - 1 + Sizes::kStages, used);
    at = stop;
    if (at < end) pair = Pair(step, share, at);
  }
}

}  // namespace tangram
