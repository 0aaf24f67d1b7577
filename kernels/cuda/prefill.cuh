// Attention of requests with several new tokens each, which see what their heads hold and each other causally.
//
// A piece of work is one KV head and as many new tokens as fill a block's rows with all query heads of the group:
// row r is token r / group and query head r % group. It walks the head's history and the new tokens, which are
// in the ring already, in tiles of 64, one tile's copy ahead of its products.
//
// Heads keep different shares, and a step may have few tokens: so the tiles of all pieces are laid end to end and
// cut into equal runs, one for each block that the device holds at a time, as share.cuh does for decoding. Sums of
// a piece that several blocks share go to the workspace, and another launch adds them up in the blocks' order.
#pragma once

#include "rows.cuh"
#include "share.cuh"

namespace tangram {

// Fewest tiles of a run: shorter ones cost more in merging than they gain.
constexpr int kLeastTiles = 3;
constexpr int kPlanThreads = 1024;

// plan[i]: tiles before piece i, where the places of a head follow one another. Also writes what the pieces are. One
// block.
template <typename T, int D>
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const Step step, const Attend attend, int places) {
  using Sizes = Prefill<T, D>;
  __shared__ int scratch[kPlanThreads / kWarp];
  const int group = attend.group(step);
  const auto find = [](int count, int wanted, auto key) { return last_at_most(count, wanted, key); };
  running_sums<kPlanThreads>(places * step.kv_heads, attend.plan, scratch, [&](int i) {
    const Piece piece(step, group, Sizes::kRows / group, i % places, i / places, find);
    attend.pieces[i] = piece;
    return piece.tiles(Sizes::kTokens);
  });
}

// Walk the tiles first .. last - 1 of a piece. By the whole block.
template <typename T, int D>
__device__ void walk(Rows<T, D>& rows, const Step& step, const Attend& attend, const Piece& piece, int group, int first,
                     int last, char* shared) {
  using Sizes = Prefill<T, D>;
  using Shape = Tile<T, D>;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t query_base = shared_address(shared), tile_base = query_base + Sizes::kQueryBytes;
  Head head;
  head.tier = piece.tier, head.member = piece.member, head.first = piece.first, head.kept = piece.kept;
  const int32_t* pages = step.rows + piece.request * step.row_stride;
  const T* query = static_cast<const T*>(attend.query) + piece.token * attend.query_token;
  __syncthreads();  // everyone is done with the piece before
  for (int i = threadIdx.x; i < Sizes::kQueryBytes / 16; i += Sizes::kThreads) {
    const int row = i / (D / 8), part = i - row * (D / 8), token = row / group;
    const int query_head = piece.head * group + row - token * group;
    const T* source = query + token * attend.query_token + query_head * attend.query_head + part * 8;
    copy_async(query_base + Sizes::query_at(row, part), token < piece.count ? source : query, token < piece.count);
  }
  Span known{step.pool, 0};  // lane i: where this warp's unit of tile first + 32 j + i lies
  const auto issue = [&](int tile) {
    if (tile < last) {
      const int from = (tile - first) % kWarp;
      if (from == 0) {
        known = {step.pool, 0};
        const int unit = (tile + lane) * Sizes::kWarps + warp;
        if (tile + lane < last)
          known = locate<Shape::kTokenBytes>(step, pages, head, piece.sealed, piece.raw, unit);
      }
      const auto address = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(known.source), from);
      const int valid = __shfl_sync(~0u, known.valid, from);
      Shape::copy_unit(tile_base + (tile & 1) * Sizes::kTileBytes + warp * Shape::kUnitBytes,
                       {reinterpret_cast<const char*>(address), valid});
    }
    copy_commit();
  };
  issue(first);
  const Scoring scoring{attend.scale, attend.soft_cap};
  for (int tile = first; tile < last; ++tile) {
    copy_wait<0>();
    __syncthreads();  // this tile is there, and everyone is done with the one before
    issue(tile + 1);
    int limit[Sizes::kRowTiles][2];
#pragma unroll
    for (int m = 0; m < Sizes::kRowTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        limit[m][r] = piece.seen + Rows<T, D>::row(m, r) / group - tile * Sizes::kTokens;
    rows.add(query_base, tile_base + (tile & 1) * Sizes::kTileBytes, scoring, (tile + 1) * Sizes::kTokens > piece.seen,
             limit);
  }
  rows.gather_sums();
}

// How the blocks of prefill_kernel share a plan, and where each leaves sums of its own: of a piece that began
// before its run in the first slot, of one that goes on after it in the second.
struct Runs {
  const int* plan;
  int pieces, total, run;

  __device__ Runs(const int* of_plan, int of_pieces, int blocks)
      : plan(of_plan), pieces(of_pieces), total(plan[pieces]), run(max(kLeastTiles, ceil_div(total, blocks))) {}

  __device__ int piece(int tile) const {
    return warp_last_at_most(pieces, tile, [&](int i) { return plan[i]; });
  }
  template <typename Sizes>
  static __device__ float* slot(const Attend& attend, int block, bool begins) {
    return attend.partial + (2 * static_cast<int64_t>(block) + begins) * Sizes::kSlotFloats;
  }
};

template <typename T, int D>
__global__ void __launch_bounds__(Prefill<T, D>::kThreads, Prefill<T, D>::kBlocks)
    prefill_kernel(const Step step, const Attend attend, const int places) {
  using Sizes = Prefill<T, D>;
  TANGRAM_SHARED(shared);
  const int group = attend.group(step), room = Sizes::kRows / group, pieces = places * step.kv_heads;
  Rows<T, D> rows;
  if (attend.plan == nullptr) {  // too many pieces for a plan, hence enough for every block
    const auto find = [](int count, int wanted, auto key) { return warp_last_at_most(count, wanted, key); };
    for (int index = blockIdx.x; index < pieces; index += gridDim.x) {
      const Piece piece(step, group, room, index % places, index / places, find);
      if (piece.count == 0) continue;
      rows.clear();
      walk<T, D>(rows, step, attend, piece, group, 0, piece.tiles(Sizes::kTokens), shared);
      rows.write(attend, piece, group);
    }
    return;
  }
  const Runs runs(attend.plan, pieces, gridDim.x);
  const int end = min(runs.total, (blockIdx.x + 1) * runs.run);
  for (int at = blockIdx.x * runs.run; at < end;) {
    const int index = runs.piece(at), first = runs.plan[index];
    const Piece piece = attend.pieces[index];
    const int tiles = piece.tiles(Sizes::kTokens), stop = min(end - first, tiles);
    rows.clear();
    walk<T, D>(rows, step, attend, piece, group, at - first, stop, shared);
    if (at == first && stop == tiles) {
      rows.write(attend, piece, group);
    } else {
      rows.store(Runs::slot<Sizes>(attend, blockIdx.x, at == first));
    }
    at = first + stop;
  }
}

// Add up the sums of the piece that begins in run blockIdx.x and goes on in the next ones, if there is one: elements
// 8 n .. 8 n + 7 of its rows, n = blockIdx.y * kColumns and on. Threads hold what prefill_kernel's hold.
template <typename T, int D>
__global__ void __launch_bounds__(Prefill<T, D>::kThreads)
    merge_kernel(const Step step, const Attend attend, const int places) {
  using Sizes = Prefill<T, D>;
  constexpr int kRowTiles = Sizes::kRowTiles, kThreads = Sizes::kThreads;
  const int group = attend.group(step);
  const Runs runs(attend.plan, places * step.kv_heads, gridDim.x);
  const int end = (blockIdx.x + 1) * runs.run;
  if (end >= runs.total) return;
  const int index = runs.piece(end), first = runs.plan[index], stop = runs.plan[index + 1];
  if (first >= end || first / runs.run != blockIdx.x) return;
  const int c1 = (stop - 1) / runs.run;
  const auto number = [&](int block, int at) {
    const float* slot = Runs::slot<Sizes>(attend, block, block == static_cast<int>(blockIdx.x));
    return __ldcg(slot + at * kThreads + threadIdx.x);
  };
  constexpr int kEnds = Sizes::kRows * D / kThreads;
  float sums[Sizes::kColumns][kRowTiles][4] = {}, top[kRowTiles][2], sum[kRowTiles][2] = {};
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) top[m][0] = top[m][1] = -INFINITY;
  // First the rows' highest scores and sums, then, by weights that are final, what may be many elements.
#pragma unroll 4
  for (int block = blockIdx.x; block <= c1; ++block)
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float theirs = number(block, kEnds + m * 4 + r), added = number(block, kEnds + m * 4 + 2 + r);
        const float high = fmaxf(top[m][r], theirs), base = high == -INFINITY ? 0.f : high;
        sum[m][r] = sum[m][r] * exp2_fast(top[m][r] - base) + added * exp2_fast(theirs - base);
        top[m][r] = high;
      }
#pragma unroll 4
  for (int block = blockIdx.x; block <= c1; ++block) {
    float weight[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) weight[m][r] = exp2_fast(number(block, kEnds + m * 4 + r) - top[m][r]);
#pragma unroll
    for (int n = 0; n < Sizes::kColumns; ++n)
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = ((blockIdx.y * Sizes::kColumns + n) * kRowTiles + m) * 4 + i;
          sums[n][m][i] += number(block, at) * weight[m][i >> 1];
        }
  }
  const Piece piece = attend.pieces[index];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      T* out = output<T, D>(attend, piece, group, Rows<T, D>::row(m, r));
      if (out == nullptr) continue;
      const int row = Rows<T, D>::row(m, r), query_head = piece.head * group + row % group;
      const float factor = finish(attend, query_head, top[m][r], sum[m][r]);
#pragma unroll
      for (int n = 0; n < Sizes::kColumns; ++n)
        reinterpret_cast<uint32_t*>(out)[(blockIdx.y * Sizes::kColumns + n) * 4] =
            pack<T>(sums[n][m][2 * r] * factor, sums[n][m][2 * r + 1] * factor);
    }
}

}  // namespace tangram
