// What attention takes beside the step, and how a row of its output is finished.
#pragma once

#include "mma.cuh"
#include "step.cuh"

namespace tangram {

struct Piece;

// Packed in kernels/cuda/native.py. Strides count elements.
struct Attend {
  void* out;           // [tokens, query_heads, head_size]
  const void* query;   // [tokens, query_heads, head_size]
  const float* sinks;  // [query_heads], or null
  float* partial;      // workspace: two slots for each block
  int32_t* arrived;    // one counter for each block, all 0 between launches
  int32_t* plan;       // workspace of prefill.cuh, or null: no run is shared out
  Piece* pieces;       // more of it
  int64_t out_token, out_head, query_token, query_head;
  int32_t query_heads;
  int32_t max_query;  // no request has more new tokens; 0 where that is not known
  int32_t singles;    // whether there may be requests with one new token
  int32_t tables_first;  // of a dependent launch: whether the step's tables are read before the launch before is done
  float scale, soft_cap;

  __host__ __device__ int group(const Step& step) const { return query_heads / step.kv_heads; }
};

// Query heads of a KV head that decode.cuh takes: the rows of one matrix product.
constexpr int kDecodeGroup = 16;

// Single new tokens go to decode.cuh, all others to prefill.cuh.
__host__ __device__ inline bool decodes(int count, int group) { return count == 1 && group <= kDecodeGroup; }

// In a dependent launch, which begins while the launch before is ending: wait until that is done and what it wrote can
// be seen. Nothing waits in other launches, and on older devices, which have no such launches.
__device__ inline void wait_for_earlier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The factor that turns a row's sum of weighted values, taken relative to `top`, into its output. A sink is one
// more score, without a value. Scores are in units of log 2.
__device__ inline float finish(const Attend& attend, int query_head, float top, float sum) {
  if (attend.sinks == nullptr) return 1.f / sum;
  const float sink = attend.sinks[query_head] * kLog2E, highest = fmaxf(top, sink);
  const float weight = exp2f(top - highest);
  return weight / (sum * weight + exp2f(sink - highest));
}

// Count one of the blocks first .. last, which share something, as done. True for the last one that comes.
__device__ inline bool arrive(int32_t* arrived, int first, int last) {
  const bool all = atomicAdd(arrived + first, 1) == last - first;
  if (all) arrived[first] = 0;  // for the next launch
  return all;
}

}  // namespace tangram
