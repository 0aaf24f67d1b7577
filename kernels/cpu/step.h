// One step of a batch as raw pointers, and where its tokens lie. The rules are those of kernels/layout.py.
#pragma once

#include <cstdint>

namespace tangram {

// What a call can find wrong with the values of its tables; 0 is success.
enum Fault : int64_t {
  kNone = 0,
  kQueryBounds = 1,   // query_start_loc decreases or passes the tokens there are
  kLength = 2,        // a sequence is shorter than its new tokens
  kBoundary = 3,      // the step crosses a seal boundary
  kRowWidth = 4,      // the row ends before the sealed chunks do
  kPage = 5,          // a page id outside the pool
  kHeadTable = 6,     // a tier or member outside the layout
  kMemory = 7,        // no memory for the workspace
  kElement = 8,       // an element type this library does not know
};

enum Element : int64_t { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

// Packed field by field in kernels/cpu/native.py; every field is 8 bytes wide. Strides count
// elements; tables are int32.
struct Step {
  const int32_t* rows;             // [requests, row_stride]
  const int32_t* query_start_loc;  // [requests + 1]
  const int32_t* seq_lens;         // [requests]
  const int32_t* head_tier;        // [kv_heads]
  const int32_t* head_member;      // [kv_heads]
  const int32_t* tier_offset;      // [tiers + 1]
  void* pool;                      // [pages, members, page_tokens, 2 * head_size]
  int64_t row_stride, row_width, requests, tokens, kv_heads, tiers;
  int64_t pages, page_stride, members, head_size;
  int64_t page_tokens, ring_slots, chunk, window;
  int64_t element, threads;

  int64_t sealed(int64_t tokens_cached) const {
    return tokens_cached > window ? (tokens_cached - window) / chunk : 0;
  }
  int64_t pages_per_chunk() const { return tier_offset[tiers]; }
};

// A request of the step: its new tokens are the rows start .. start + count - 1, at positions length - count ...
// One of length 0 is skipped: it has no tokens.
struct Request {
  const int32_t* row;
  int64_t start, count, length, sealed;
};

inline Request request_of(const Step& step, int64_t index) {
  const int64_t start = step.query_start_loc[index], length = step.seq_lens[index];
  const int64_t count = length == 0 ? 0 : step.query_start_loc[index + 1] - start;
  return {step.rows + index * step.row_stride, start, count, length, step.sealed(length - count)};
}

// Check everything but the page ids, which are checked where they are used. Returns a fault and its request.
inline int64_t fault(Fault kind, int64_t index) { return kind | index << 8; }

inline int64_t check(const Step& step) {
  for (int64_t h = 0; h < step.kv_heads; ++h) {
    const int64_t tier = step.head_tier[h], member = step.head_member[h];
    if (tier < 0 || tier >= step.tiers || member < 0 || member >= step.members) return fault(kHeadTable, h);
  }
  if (step.query_start_loc[0] < 0) return fault(kQueryBounds, 0);
  for (int64_t i = 0; i < step.requests; ++i) {
    const Request r = request_of(step, i);
    if (r.count < 0 || r.start + r.count > step.tokens) return fault(kQueryBounds, i);
    if (r.count == 0) continue;
    if (r.length < r.count) return fault(kLength, i);
    if (r.length > (r.sealed + 1) * step.chunk + step.window) return fault(kBoundary, i);
    if (step.ring_slots * step.tiers + r.sealed * step.pages_per_chunk() > step.row_width)
      return fault(kRowWidth, i);
  }
  return kNone;
}

// The tokens one head of one request can see: a list of kept tokens, then a list of raw ones.
template <class E>
struct HeadView {
  const Step& step;
  const Request& request;
  int64_t tier, member_offset, first_page, pages_kept;

  HeadView(const Step& s, const Request& r, int64_t head)
      : step(s),
        request(r),
        tier(s.head_tier[head]),
        member_offset(s.head_member[head] * s.page_tokens * 2 * s.head_size),
        first_page(s.tier_offset[tier]),
        pages_kept(s.tier_offset[tier + 1] - first_page) {}

  int64_t kept() const { return request.sealed * pages_kept * step.page_tokens; }
  int64_t raw_begin() const { return request.sealed * step.chunk; }

  // The head's block [page_tokens, 2 * head_size] in the page of a row entry, or null for an id outside the pool.
  E* block(int64_t entry) const {
    const int64_t id = request.row[entry];
    if (id < 0 || id >= step.pages) return nullptr;
    return static_cast<E*>(step.pool) + id * step.page_stride + member_offset;
  }
  E* kept_block(int64_t page) const {
    const int64_t chunk = page / pages_kept, within = page % pages_kept;
    return block(step.ring_slots * step.tiers + chunk * step.pages_per_chunk() + first_page + within);
  }
  E* raw_block(int64_t page) const { return block(page % step.ring_slots * step.tiers + tier); }

  // Pointers to the tokens begin .. begin + count - 1 of a list; false if one of them has no page.
  bool kept_tokens(int64_t begin, int64_t count, const E** out) const {
    return fill(begin, count, out, [this](int64_t page) { return kept_block(page); });
  }
  bool raw_tokens(int64_t begin, int64_t count, const E** out) const {
    return fill(raw_begin() + begin, count, out, [this](int64_t page) { return raw_block(page); });
  }

 private:
  template <class Find>
  bool fill(int64_t at, int64_t count, const E** out, Find find) const {
    const int64_t size = step.page_tokens, row = 2 * step.head_size, end = at + count;
    while (at < end) {
      const E* base = find(at / size);
      if (!base) return false;
      for (int64_t offset = at % size; offset < size && at < end; ++offset, ++at) *out++ = base + offset * row;
    }
    return true;
  }
};

}  // namespace tangram
