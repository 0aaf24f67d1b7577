// Steps that cross seal boundaries: what a dense attention kernel needs to attend them through page tables.
//
// Between two boundaries a request's queries, a segment, see the same sealed chunks. A segment and a KV head make one
// sequence: kept pages, which lie in the pool, then raw pages, which are staged in a buffer, as a ring is too short
// for them. Both are named by their distance from the pool's start in units that divide all distances, so that one
// table reaches both. A sequence's queries are packed side by side.
#pragma once

#include "step.cuh"

namespace tangram {

// Packed in kernels/cuda/native.py. Strides count elements.
struct Wide {
  const int32_t* requests;  // [count, kRequestFields]
  const int32_t* segments;  // [segments, kSegmentFields]
  const int32_t* starts;    // [segments * kv_heads + 1] first packed row of each sequence
  const char* query;        // [tokens, query_heads, head_size]
  const char* key;          // [tokens, kv_heads, head_size]
  const char* value;        // [tokens, kv_heads, head_size]
  char* staged;             // [pages, kv_heads, page_tokens, 2 * head_size]
  char* packed;             // [segments' tokens * kv_heads, group, head_size]
  int32_t* table;           // [segments * kv_heads, table_width]
  int32_t* used;            // [segments * kv_heads] tokens of each sequence
  int64_t query_token, query_head, key_token, key_head, value_token, value_head;
  int64_t unit, staged_at;  // elements of a unit, and units from the pool's start to the staged pages'
  int32_t count, segment_count, group, table_width;
  int32_t most_tail, most_new, most_tokens, unused;  // pages of a request, tokens of a segment, at most
};

constexpr int kRequestFields = 6, kSegmentFields = 6, kWideThreads = 256, kPackedTokens = 4;

// A request of the step that crosses a boundary. Positions are tokens of the sequence; the staged ones begin at
// `first`, which is a page's edge.
struct WideRequest {
  int row, token, cached, length, first, page;
  __device__ WideRequest(const Wide& wide, int index) {
    const int32_t* fields = wide.requests + index * kRequestFields;
    row = fields[0], token = fields[1], cached = fields[2], length = fields[3], first = fields[4], page = fields[5];
  }
};

struct Segment {
  int row, token, count, sealed, raw, page;  // raw: tokens that its last query sees raw, staged from `page` on
  __device__ Segment(const Wide& wide, int index) {
    const int32_t* fields = wide.segments + index * kSegmentFields;
    row = fields[0], token = fields[1], count = fields[2], sealed = fields[3], raw = fields[4], page = fields[5];
  }
};

// Copy one page's worth of raw tokens to the staged pages: those that the ring holds (kTail), or the step's own,
// which also go to the ring as far as it will hold them. One block for each (page, request).
template <typename T, int D, bool kTail>
__global__ void __launch_bounds__(kWideThreads) stage_kernel(const Step step, const Wide wide) {
  const WideRequest request(wide, blockIdx.y);
  const int size = step.page_tokens, kept = ceil_div(request.length, size) - step.ring_slots;
  const int page = (kTail ? request.first : request.cached) / size + blockIdx.x;  // of the sequence
  const int begin = max(page * size, kTail ? request.first : request.cached);
  const int end = min((page + 1) * size, kTail ? request.cached : request.length);
  if (begin >= end) return;
  constexpr int kPieces = 2 * D * sizeof(T) / 16;  // of a token
  const int32_t* row = step.rows + request.row * step.row_stride;
  const int64_t target = static_cast<int64_t>(request.page + page - request.first / size) * step.kv_heads;
  for (int index = threadIdx.x; index < (end - begin) * step.kv_heads * kPieces; index += kWideThreads) {
    const int piece = index % kPieces, head = index / kPieces % step.kv_heads;
    const int position = begin + index / kPieces / step.kv_heads;
    const int tier = step.head_tier[head], member = step.head_member[head];
    if (tier < 0 || tier >= step.tiers || member < 0 || member >= step.members) continue;
    const int entry = page % step.ring_slots * step.tiers + tier, id = entry < step.row_width ? row[entry] : -1;
    const int slot = position - page * size;
    uint4* ring = nullptr;
    if (id >= 0 && id < step.pages)
      ring = reinterpret_cast<uint4*>(step.pool + id * step.page_stride * static_cast<int64_t>(sizeof(T))) +
             (static_cast<int64_t>(member) * size + slot) * kPieces + piece;
    uint4 data = {};
    if constexpr (kTail) {
      if (ring != nullptr) data = *ring;
    } else {
      const int64_t token = request.token + position - request.cached;
      const bool is_key = piece < kPieces / 2;
      const int64_t at = is_key ? token * wide.key_token + head * wide.key_head
                                : token * wide.value_token + head * wide.value_head;
      const char* source = (is_key ? wide.key : wide.value) + at * static_cast<int64_t>(sizeof(T));
      data = reinterpret_cast<const uint4*>(source)[is_key ? piece : piece - kPieces / 2];
      if (page >= kept && ring != nullptr) *ring = data;
    }
    reinterpret_cast<uint4*>(wide.staged)[((target + head) * size + slot) * kPieces + piece] = data;
  }
}

// The pages of each sequence. One block for each (segment, KV head).
template <typename T, int D>
__global__ void __launch_bounds__(kWideThreads) table_kernel(const Step step, const Wide wide) {
  const Segment segment(wide, blockIdx.x);
  const int head_index = blockIdx.y, sequence = blockIdx.x * step.kv_heads + head_index;
  const Head head(step, head_index);
  const int kept = segment.sealed * head.kept, pages = kept + ceil_div(segment.raw, step.page_tokens);
  const int64_t slot = static_cast<int64_t>(step.page_tokens) * 2 * D;  // elements
  const int32_t* row = step.rows + segment.row * step.row_stride;
  int32_t* table = wide.table + static_cast<int64_t>(sequence) * wide.table_width;
  for (int i = threadIdx.x; i < min(pages, wide.table_width); i += kWideThreads) {
    if (i >= kept) {
      const int64_t page = static_cast<int64_t>(segment.page + i - kept) * step.kv_heads + head_index;
      table[i] = static_cast<int32_t>(wide.staged_at + page * (slot / wide.unit));
      continue;
    }
    const int chunk = i / head.kept;
    const int entry = step.ring_slots * step.tiers + chunk * step.tier_offset[step.tiers] + head.first + i -
                      chunk * head.kept;
    const int page = entry < step.row_width ? row[entry] : -1;
    const bool real = page >= 0 && page < step.pages && head.member >= 0;
    table[i] = real ? static_cast<int32_t>((page * step.page_stride + head.member * slot) / wide.unit) : 0;
  }
  if (threadIdx.x == 0) wide.used[sequence] = kept * step.page_tokens + segment.raw;
}

// Lay each sequence's queries side by side, or their outputs back where they belong. Blocks take a few tokens of a
// segment each. `rows`: what the step's tokens hold, with the strides of queries.
template <typename T, int D, bool kBack>
__global__ void __launch_bounds__(kWideThreads) pack_kernel(const Step step, const Wide wide, char* rows) {
  const Segment segment(wide, blockIdx.y);
  const int from = blockIdx.x * kPackedTokens, tokens = min(kPackedTokens, segment.count - from);
  constexpr int kPieces = D * sizeof(T) / 16;  // of a head
  const int heads = step.kv_heads * wide.group;
  for (int index = threadIdx.x; index < tokens * heads * kPieces; index += kWideThreads) {
    const int piece = index % kPieces, head = index / kPieces % heads, token = from + index / kPieces / heads;
    const int of = head / wide.group;
    const int64_t packed = wide.starts[blockIdx.y * step.kv_heads + of] + token;
    const int64_t at = (segment.token + token) * wide.query_token + head * wide.query_head;
    auto* loose = reinterpret_cast<uint4*>(rows + at * static_cast<int64_t>(sizeof(T))) + piece;
    auto* tight = reinterpret_cast<uint4*>(wide.packed) + (packed * wide.group + head - of * wide.group) * kPieces + piece;
    if constexpr (kBack) *loose = *tight; else *tight = *loose;
  }
}

}  // namespace tangram
