// One step of a batch as raw pointers, and where its tokens lie. The rules are those of kernels/layout.py.
#pragma once

#include <cstdint>

namespace tangram {

// Tokens that a warp reads at once, and the unit in which histories are counted and shared out. Pages hold
// whole units, so that a unit is one contiguous piece of memory.
constexpr int kUnit = 16;

constexpr int kWarp = 32;

// The shared memory that a launch gives a block. A stand-in is in tests/kernels/emulation.
#ifndef TANGRAM_SHARED
#define TANGRAM_SHARED(name) extern __shared__ __align__(128) char name[]
#endif

// Packed field by field in kernels/cuda/native.py. Strides count elements; tables are int32.
struct Step {
  const int32_t* rows;             // [requests, row_stride]
  const int32_t* query_start_loc;  // [requests + 1]
  const int32_t* seq_lens;         // [requests]
  const int32_t* head_tier;        // [kv_heads]
  const int32_t* head_member;      // [kv_heads]
  const int32_t* tier_offset;      // [tiers + 1]
  char* pool;                      // [pages, members, page_tokens, 2 * head_size]
  int64_t row_stride, page_stride, pages;
  int32_t row_width, requests, tokens, kv_heads, tiers, members;
  int32_t page_tokens, ring_slots, chunk, window;

  __device__ int sealed(int cached) const { return cached > window ? (cached - window) / chunk : 0; }
};

__host__ __device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A request of the step: its new tokens are the rows start .. start + count - 1, at the positions
// length - count .. length - 1. Bounds that make no sense give count 0, which every kernel skips.
struct Request {
  int start, count, length, sealed;

  __device__ Request(const Step& step, int index) {
    start = step.query_start_loc[index];
    count = step.query_start_loc[index + 1] - start;
    length = step.seq_lens[index];
    if (start < 0 || count < 0 || length < count || start + count > step.tokens) count = 0;
    sealed = step.sealed(length - count);
  }
  __device__ int raw(const Step& step) const { return length - sealed * step.chunk; }
};

// What a head holds of each sealed chunk, and where. A table entry out of range gives pages that do not exist.
struct Head {
  int tier, member, first, kept;  // kept: its pages of a chunk, from page `first` of the chunk's pages on

  Head() = default;
  __device__ Head(const Step& step, int index) {
    tier = step.head_tier[index];
    member = step.head_member[index];
    if (tier < 0 || tier >= step.tiers || member < 0 || member >= step.members) tier = 0, member = -1;
    first = step.tier_offset[tier];
    kept = step.tier_offset[tier + 1] - first;
  }
};

// The largest index in [0, count) whose key is at most `wanted`; keys rise, and the first is at most `wanted`.
template <typename Key>
__device__ int last_at_most(int count, int wanted, Key key) {
  int low = 0, high = count;  // the answer lies in [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (key(middle) <= wanted) low = middle; else high = middle;
  }
  return low;
}

// The same by a whole warp, which looks at 32 keys at a time: for keys in global memory.
template <typename Key>
__device__ int warp_last_at_most(int count, int wanted, Key key) {
  const int lane = threadIdx.x % kWarp;
  int low = 0;
  while (count > 1) {
    const int stride = ceil_div(count, kWarp), at = lane * stride;
    const bool below = at < count && (at == 0 || key(low + at) <= wanted);
    const int found = __popc(__ballot_sync(~0u, below)) - 1;
    low += found * stride;
    count = min(stride, count - found * stride);
  }
  return low;
}

// A unit of a head's history in memory; valid: how many of its tokens exist.
struct Span {
  const char* source;
  int valid;
};

// Unit number `unit` of what a head holds of a request: first the kept tokens, chunk by chunk, then the raw ones.
template <int kTokenBytes>
__device__ Span locate(const Step& step, const int32_t* row, const Head& head, int sealed, int raw, int unit) {
  const int units_per_page = step.page_tokens / kUnit;
  const int page_index = unit / units_per_page, part = (unit - page_index * units_per_page) * kUnit;
  const int kept = sealed * head.kept;
  int entry, valid = kUnit;
  if (page_index < kept) {
    const int chunk = page_index / head.kept;
    entry = step.ring_slots * step.tiers + chunk * step.tier_offset[step.tiers] + head.first + page_index -
            chunk * head.kept;
  } else {
    const int ring = page_index - kept;
    entry = (sealed * (step.chunk / step.page_tokens) + ring) % step.ring_slots * step.tiers + head.tier;
    valid = min(kUnit, raw - ring * step.page_tokens - part);
  }
  const int page = entry < step.row_width ? row[entry] : -1;
  // A page that does not exist is never read: its tokens count as zeros.
  if (page < 0 || page >= step.pages || head.member < 0) return {step.pool, 0};
  const int64_t token = static_cast<int64_t>(head.member) * step.page_tokens + part;
  const int64_t bytes = page * step.page_stride * 2 + token * kTokenBytes;
  return {step.pool + bytes, max(valid, 0)};
}

}  // namespace tangram
