// Attention of requests with one new token each: bound by memory, so that every key and value is read once and
// all blocks read equally much (share.cuh).
//
// A block of four warps walks its run of units; warp w takes every fourth one into tiles of its own, several
// copies ahead of its products, and all query heads of a KV head are the rows of one product. Where a pair ends,
// the warps' sums are merged. A pair that a block holds whole is finished there; sums of a pair that several
// blocks share go to the workspace, and the block that arrives last adds them up in the blocks' order.
//
// Where the step's keys and values are given, they are not in the rings yet. A pair's newest token lies in its last
// unit, which one warp alone reads: that warp takes the token from what is given, and writes it into the ring for the
// steps to come.
#pragma once

#include "append.cuh"
#include "running.cuh"

namespace tangram {

template <typename T, int D>
__global__ void __launch_bounds__(Decode<T, D>::kThreads)
    decode_kernel(const Step step, const Attend attend, const Fresh fresh) {
  using Shape = Tile<T, D>;
  using Sizes = Decode<T, D>;
  TANGRAM_SHARED(shared);
  auto& extra = *reinterpret_cast<typename Sizes::Extra*>(shared + Sizes::kTileBytes);
  Share share(step, reinterpret_cast<int*>(&extra + 1));
  const int group = attend.group(step), lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const bool appends = fresh.key != nullptr;
  // All threads pass one of the two waits: a block that ended without would let later launches overtake earlier ones.
  if (!attend.tables_first) wait_for_earlier();
  share.fill<Sizes::kThreads>(step, group, extra.scratch);
  if (attend.tables_first) wait_for_earlier();
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
  // Lane i knows where unit number 32 j + i of this warp lies; all lanes look their units up at once. newest: where the
  // unit's last token is a new one, still to be written, its row of the step x KV heads + its head; else -1.
  Span known{step.pool, 0};
  int newest = -1;
  const auto issue = [&](int number, int stage) {
    if (number % kWarp == 0) {
      const int unit = begin + Sizes::kWarps * (number + lane) + warp;
      known.valid = 0, newest = -1;
      if (unit < end) {
        const Pair pair(step, share, unit);
        known = locate<Shape::kTokenBytes>(step, step.rows + pair.request * step.row_stride, share.heads[pair.head],
                                           pair.sealed, pair.raw, unit - pair.first);
        if (appends && unit + 1 == pair.stop && known.valid > 0)
          newest = step.query_start_loc[pair.request] * step.kv_heads + pair.head;
      }
    }
    const int from = number % kWarp;
    const auto address = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(known.source), from);
    const int valid = __shfl_sync(~0u, known.valid, from);
    const int owner = __shfl_sync(~0u, newest, from);
    const Span span{reinterpret_cast<const char*>(address), valid};
    const uint32_t target = tile_address + stage * Shape::kUnitBytes;
    if (owner >= 0) {
      const int token = owner / step.kv_heads, head = owner - token * step.kv_heads;
      Shape::copy_unit(target, span, fresh.key_of(token, head), fresh.value_of(token, head));
    } else if (begin + Sizes::kWarps * number + warp < end) {
      Shape::copy_unit(target, span);
    }
    // Read by the same warp, which meets in between, where the tile is added.
    if (appends && lane == 0)
      extra.slots[warp][stage] = owner < 0 ? nullptr : const_cast<char*>(span.source) + (valid - 1) * Shape::kTokenBytes;
    copy_commit();  // also when nothing was copied: the waits count commits
  };
  for (int stage = 0; stage < Sizes::kStages; ++stage) issue(stage, stage);

  Pair pair(step, share, begin);
  int number = 0, stage = 0;  // of this warp's next unit
  Running<T, D> running;
  for (int at = begin; at < end;) {
    const int stop = min(pair.stop, end);
    const int tokens = pair.sealed * (share.kept[pair.head + 1] - share.kept[pair.head]) * kUnit + pair.raw;
    const int64_t token = step.query_start_loc[pair.request];
    uint32_t query[D / 16][4];
    load_query<T, D>(query, attend, token, pair.head, group);
    running.clear();
    int used = -1;  // the tile whose unit was added last, to be filled anew
    for (int unit = begin + Sizes::kWarps * number + warp; unit < stop; unit += Sizes::kWarps) {
      if (used >= 0) issue(number - 1 + Sizes::kStages, used);
      copy_wait<Sizes::kStages - 1>();
      __syncwarp();
      const int valid = min(kUnit, tokens - (unit - pair.first) * kUnit);
      if (appends && unit + 1 == pair.stop)
        Shape::store_token(extra.slots[warp][stage], tiles + stage * Shape::kUnitBytes, valid - 1);
      running.add(query, tile_address + stage * Shape::kUnitBytes, valid, scoring);
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
        const char* tile = shared + (w * Sizes::kStages + extra.tile[w]) * Shape::kUnitBytes;
        const float2 part = reinterpret_cast<const float2*>(tile)[Sizes::sums_at(row, piece)];
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
