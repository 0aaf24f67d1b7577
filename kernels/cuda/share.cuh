// How decoding is shared out: the histories of all (request, KV head) pairs laid end to end, in units of 16
// tokens, cut into equal runs, one for each block.
//
// A pair's units follow from its request's length and its head's pages by a formula, so no plan is made or sent:
// each block adds up the requests' units and finds its run. The cut depends on nothing but lengths and budgets:
// heads of any budgets spread as evenly as equal ones.
#pragma once

#include "step.cuh"

namespace tangram {

// Fewest units of a run: shorter ones cost more in merging than they gain.
constexpr int kLeastRun = 8;

// A run that holds the end of one pair and the beginning of another merges twice. Where that would take longer than
// the reading, each pair gets blocks of its own: for few pairs, and as long as a block has few units.
constexpr int kMostAligned = 128, kAlignedUnits = 64;

// total[i] = value(0) + .. + value(i - 1), for i in 0 .. count. By a whole block of kThreads; `scratch` holds one
// number for each of its warps.
template <int kThreads, typename Value>
__device__ void running_sums(int count, int* total, int* scratch, Value value) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int before = 0;
  for (int base = 0; base < count; base += kThreads) {
    const int index = base + threadIdx.x;
    int sum = index < count ? value(index) : 0;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == kWarp - 1) scratch[warp] = sum;
    __syncthreads();
    int all = 0;
#pragma unroll
    for (int w = 0; w < kThreads / kWarp; ++w) {
      if (w < warp) sum += scratch[w];
      all += scratch[w];
    }
    if (index < count) total[index + 1] = before + sum;
    before += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) total[0] = 0;
  __syncthreads();
}

// The batch as a block sees it, in shared memory.
struct Share {
  int* first;   // [requests + 1] units before each request
  int* length;  // [requests] tokens; 0 where there is nothing to decode
  int* kept;    // [kv_heads + 1] units of a sealed chunk before each head
  Head* heads;  // [kv_heads]

  static size_t bytes(const Step& step) {
    return (2 * step.requests + 1 + step.kv_heads + 1) * sizeof(int) + step.kv_heads * sizeof(Head);
  }

  __device__ Share(const Step& step, int* memory)
      : first(memory), length(first + step.requests + 1), kept(length + step.requests),
        heads(reinterpret_cast<Head*>(kept + step.kv_heads + 1)) {}

  template <int kThreads>
  __device__ void fill(const Step& step, int group, int* scratch) {
    const int units_per_page = step.page_tokens / kUnit;
    const Request early(step, min(static_cast<int>(threadIdx.x), step.requests - 1));  // its loads overlap the heads'
    running_sums<kThreads>(step.kv_heads, kept, scratch, [&](int index) {
      const Head head(step, index);
      heads[index] = head;
      return head.kept * units_per_page;
    });
    const int all = kept[step.kv_heads];
    running_sums<kThreads>(step.requests, first, scratch, [&](int index) {
      const Request request = index < kThreads ? early : Request(step, index);
      const bool mine = decodes(request.count, group);
      length[index] = mine ? request.length : 0;
      return mine ? step.kv_heads * ceil_div(request.raw(step), kUnit) + request.sealed * all : 0;
    });
  }
};

// A (request, KV head) pair and the units [first, stop) that it has.
struct Pair {
  int request, head, sealed, raw, first, stop;

  // The pair that holds unit number `unit`.
  __device__ Pair(const Step& step, const Share& share, int unit) {
    request = last_at_most(step.requests, unit, [&](int i) { return share.first[i]; });
    measure(step, share);
    const int base = share.first[request], tail = ceil_div(raw, kUnit);
    head = last_at_most(step.kv_heads, unit - base, [&](int h) { return h * tail + sealed * share.kept[h]; });
    bounds(share);
  }
  __device__ Pair(const Step& step, const Share& share, int of_request, int of_head)
      : request(of_request), head(of_head) {
    measure(step, share);
    bounds(share);
  }
  __device__ void measure(const Step& step, const Share& share) {
    const int length = share.length[request];
    sealed = step.sealed(length - 1);
    raw = length - sealed * step.chunk;
  }
  __device__ void bounds(const Share& share) {
    const int base = share.first[request], tail = ceil_div(raw, kUnit);
    first = base + head * tail + sealed * share.kept[head];
    stop = base + (head + 1) * tail + sealed * share.kept[head + 1];
  }
};

}  // namespace tangram
