// Sealing: choose the tokens of a chunk that each head keeps and write them to their pages. One block for each
// (chunk, head of a tier); nothing depends on the layer, as a page's heads come from any layers.
#pragma once

#include <cstring>

#include "elements.cuh"
#include "step.cuh"

namespace tangram {

// Packed in kernels/cuda/native.py; Step's queries and lengths are not used. Where Step has heads, only those of its
// layer are sealed; where it has none, all members of all tiers.
struct Seal {
  const int32_t* due;         // [count, 2] request and chunk
  const int32_t* tier_heads;  // [tiers] heads of each tier's pages
  const float* scores;        // [count, tiers, members, chunk], or null: keydiff
  char* staged;               // [pages, kv_heads, page_tokens, 2 * head_size] with the tokens, or null: the rings
  const int32_t* origin;      // [count] where a chunk's staged pages begin
  const float* asked;         // [count, heads, head_size] what each of the grid's heads is asked, or null; with values
  int32_t count, sink;
  int32_t values;  // whether keydiff is joined by the norms of values, and by `asked`
};

constexpr int kSealThreads = 256;

// Order of scores as unsigned numbers; NaN above all, as torch sorts.
__device__ inline uint32_t rank_of(float score) {
  if (isnan(score)) return 0xFFFFFFFFu;
  const uint32_t bits = __float_as_uint(score + 0.f);  // -0 and 0 are equal
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Eight lanes share a token, so that a warp looks at four at once; `i` counts the words of 4 elements of a lane.
constexpr int kLanes = 8, kTokensAtOnce = kWarp / kLanes;

template <int kLowest, int kPast>
__device__ inline float sum_over(float x) {  // lanes that differ in the bits kLowest .. kPast / 2
#pragma unroll
  for (int bit = kLowest; bit < kPast; bit *= 2) x += __shfl_xor_sync(~0u, x, bit);
  return x;
}

template <typename T, int D>
__device__ void load_key(float (&key)[D / kLanes], const T* token) {
  const auto* from = reinterpret_cast<const uint2*>(token) + threadIdx.x % kLanes;
#pragma unroll
  for (int i = 0; i < D / kLanes / 4; ++i) {
    const uint2 word = from[i * kLanes];
    T four[4];
    memcpy(four, &word, sizeof(word));
#pragma unroll
    for (int e = 0; e < 4; ++e) key[4 * i + e] = to_float(four[e]);
  }
}

// Minus the cosine between each key and the mean of the unit keys (arXiv 2504.15364), as rank_of gives it.
// The chunk is a multiple of four tokens.
template <typename T, int D, typename Token>
__device__ void keydiff(const Step& step, int sink, uint32_t* ranks, float* norms, float (*means)[D], Token token) {
  constexpr int kWarps = kSealThreads / kWarp, kOwn = D / kLanes;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, part = lane % kLanes;
  const int first = warp * kTokensAtOnce + lane / kLanes, stride = kWarps * kTokensAtOnce;
  const auto element = [&](int own) { return (own / 4 * kLanes + part) * 4 + own % 4; };
  float mean[kOwn] = {};
#pragma unroll 2
  for (int index = first; index < step.chunk; index += stride) {
    float key[kOwn], square = 0.f;
    load_key<T, D>(key, token(index));
#pragma unroll
    for (int i = 0; i < kOwn; ++i) square += key[i] * key[i];
    const float norm = sqrtf(sum_over<1, kLanes>(square)), inverse = 1.f / fmaxf(norm, 1e-12f);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) mean[i] += key[i] * inverse;
    if (part == 0) norms[index] = norm;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const float sum = sum_over<kLanes, kWarp>(mean[i]);
    if (lane < kLanes) means[warp][element(i)] = sum;
  }
  __syncthreads();
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    mean[i] = 0.f;
    for (int w = 0; w < kWarps; ++w) mean[i] += means[w][element(i)];
    mean[i] /= step.chunk;
    square += mean[i] * mean[i];
  }
  const float inverse = 1.f / fmaxf(sqrtf(sum_over<1, kLanes>(square)), 1e-8f);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) mean[i] *= inverse;
#pragma unroll 2
  for (int index = first; index < step.chunk; index += stride) {
    float key[kOwn], product = 0.f;
    load_key<T, D>(key, token(index));
#pragma unroll
    for (int i = 0; i < kOwn; ++i) product += key[i] * mean[i];
    product = sum_over<1, kLanes>(product);
    if (part == 0) ranks[index] = rank_of(index < sink ? INFINITY : -product / fmaxf(norms[index], 1e-8f));
  }
}

__device__ inline int lower(const uint4& four, uint32_t than) {
  return (four.x < than) + (four.y < than) + (four.z < than) + (four.w < than);
}

// Adds a token's place in the order of the products of keys with what the head is asked, [head_size]. `products` is for
// a while. Each thread adds to sums of its own only.
template <typename T, int D, typename Token>
__device__ void add_asked(const Step& step, int sink, uint32_t* products, int* sums, const float* asked, Token token) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, part = lane % kLanes;
  const int first = warp * kTokensAtOnce + lane / kLanes, stride = kSealThreads / kWarp * kTokensAtOnce;
  float query[D / kLanes];
#pragma unroll
  for (int i = 0; i < D / kLanes; ++i) query[i] = asked[(i / 4 * kLanes + part) * 4 + i % 4];
#pragma unroll 2
  for (int index = first; index < step.chunk; index += stride) {
    float key[D / kLanes], product = 0.f;
    load_key<T, D>(key, token(index));
#pragma unroll
    for (int i = 0; i < D / kLanes; ++i) product += key[i] * query[i];
    product = sum_over<1, kLanes>(product);
    if (part == 0) products[index] = rank_of(index < sink ? INFINITY : product);
  }
  __syncthreads();
  for (int own = threadIdx.x; own < step.chunk; own += kSealThreads) {
    const uint32_t product = products[own];
    int sum = 0;
#pragma unroll 8
    for (int i = 0; i < step.chunk; i += 4) sum += lower(*reinterpret_cast<const uint4*>(products + i), product);
    sums[own] += sum;
  }
}

// Replaces keydiff's ranks by the sum of a token's places in two orders, that of these ranks and that of the norms of
// values, and in a third one, where the head is asked something: that of the products of keys with what it is asked.
// A place says how many tokens are lower. The first `sink` are above all others in each. `sums` is for a while.
template <typename T, int D, typename Token>
__device__ void join_values(const Step& step, int sink, uint32_t* ranks, uint32_t* norms, int* sums,
                            const float* asked, Token token) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int first = warp * kTokensAtOnce + lane / kLanes, stride = kSealThreads / kWarp * kTokensAtOnce;
  __syncthreads();
#pragma unroll 2
  for (int index = first; index < step.chunk; index += stride) {
    float value[D / kLanes], square = 0.f;
    load_key<T, D>(value, token(index) + D);
#pragma unroll
    for (int i = 0; i < D / kLanes; ++i) square += value[i] * value[i];
    square = sum_over<1, kLanes>(square);
    if (lane % kLanes == 0) norms[index] = rank_of(index < sink ? INFINITY : sqrtf(square));
  }
  __syncthreads();
  // Two tokens of a thread at once: what they are compared with is read half as often.
  for (int own = threadIdx.x; own < step.chunk; own += 2 * kSealThreads) {
    const int next = own + kSealThreads < step.chunk ? own + kSealThreads : own;
    const uint32_t rank = ranks[own], norm = norms[own], next_rank = ranks[next], next_norm = norms[next];
    int sum = 1, next_sum = 1;  // no rank is 0
#pragma unroll 8
    for (int i = 0; i < step.chunk; i += 4) {
      const uint4 keys = *reinterpret_cast<const uint4*>(ranks + i);
      const uint4 values = *reinterpret_cast<const uint4*>(norms + i);
      sum += lower(keys, rank) + lower(values, norm);
      next_sum += lower(keys, next_rank) + lower(values, next_norm);
    }
    sums[own] = sum;
    sums[next] = next_sum;
  }
  __syncthreads();
  if (asked != nullptr) add_asked<T, D>(step, sink, norms, sums, asked, token);
  for (int own = threadIdx.x; own < step.chunk; own += kSealThreads) ranks[own] = sums[own];
}

template <typename T, int D>
struct SealSizes {
  static size_t shared_bytes(const Step& step) {
    return (3 * step.chunk + kSealThreads / kWarp) * sizeof(int) + kSealThreads / kWarp * D * sizeof(float) +
           2 * (step.chunk / step.page_tokens) * sizeof(char*);
  }
};

template <typename T, int D>
__global__ void __launch_bounds__(kSealThreads, 3) seal_kernel(const Step step, const Seal seal) {
  TANGRAM_SHARED(shared);
  constexpr int kWarps = kSealThreads / kWarp, kPieces = 2 * D * sizeof(T) / 16;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  auto* means = reinterpret_cast<float(*)[D]>(shared);
  auto* sources = reinterpret_cast<char**>(means + kWarps);  // of the chunk's pages, then of those to write
  const int size = step.page_tokens, pages = step.chunk / size;
  auto* ranks = reinterpret_cast<uint32_t*>(sources + 2 * pages);
  auto* norms = reinterpret_cast<float*>(ranks + step.chunk);
  auto* chosen = reinterpret_cast<int*>(norms + step.chunk);
  auto* found = chosen + step.chunk;  // [kWarps]

  const bool layer = step.kv_heads > 0;
  const int tier = layer ? step.head_tier[blockIdx.y] : blockIdx.y / step.members;
  const int member = layer ? step.head_member[blockIdx.y] : blockIdx.y % step.members;
  if (tier < 0 || tier >= step.tiers || member < 0 || member >= (layer ? step.members : seal.tier_heads[tier])) return;
  const int request = seal.due[2 * blockIdx.x], chunk = seal.due[2 * blockIdx.x + 1];
  if (request < 0 || request >= step.requests || chunk < 0) return;
  const int32_t* row = step.rows + request * step.row_stride;
  const int per_chunk = step.tier_offset[step.tiers];
  const int first = step.tier_offset[tier], keep = (step.tier_offset[tier + 1] - first) * size;
  const int sealed_at = step.ring_slots * step.tiers + chunk * per_chunk + first;
  if (sealed_at + keep / size > step.row_width) return;

  // A page id out of range must not be followed: such a request is left alone.
  bool bad = false;
  const int64_t slot_bytes = static_cast<int64_t>(size) * 2 * D * sizeof(T);
  for (int i = threadIdx.x; i < pages + keep / size; i += kSealThreads) {
    if (i < pages && seal.staged != nullptr) {
      const int64_t page = static_cast<int64_t>(seal.origin[blockIdx.x]) + i;
      sources[i] = seal.staged + (page * step.kv_heads + blockIdx.y) * slot_bytes;
      continue;
    }
    const int slot = (chunk * pages + i) % step.ring_slots;
    const int page = row[i < pages ? slot * step.tiers + tier : sealed_at + i - pages];
    bad |= page < 0 || page >= step.pages;
    sources[i] = step.pool + page * step.page_stride * static_cast<int64_t>(sizeof(T)) + member * slot_bytes;
  }
  if (__syncthreads_or(bad)) return;
  const auto token = [&](int index) {
    const int page = index / size;
    return reinterpret_cast<const T*>(sources[page]) + (index - page * size) * 2 * D;
  };

  if (keep < step.chunk) {
    const int sink = max(0, min(step.chunk, seal.sink - min(chunk, 1 << 20) * step.chunk));
    const int64_t head = static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y;  // of all chunks' heads
    if (seal.scores == nullptr) {
      keydiff<T, D>(step, sink, ranks, norms, means, token);
      const float* asked = seal.asked == nullptr ? nullptr : seal.asked + head * D;
      if (seal.values) join_values<T, D>(step, sink, ranks, reinterpret_cast<uint32_t*>(norms), chosen, asked, token);
    } else {
      const float* scores = seal.scores + head * step.chunk;
      for (int i = threadIdx.x; i < step.chunk; i += kSealThreads) ranks[i] = rank_of(i < sink ? INFINITY : scores[i]);
    }
    __syncthreads();
    // A token is kept if fewer than `keep` come before it: higher ones, and equal ones that are earlier. Kept tokens
    // stay in order, so a token's place is the number of kept ones before it.
    int before = 0;
    for (int base = 0; base < step.chunk; base += kSealThreads) {
      const int own = base + threadIdx.x;
      bool kept = false;
      if (own < step.chunk) {
        const uint32_t rank = ranks[own];
        int ahead = 0;
#pragma unroll 4
        for (int i = 0; i < step.chunk; i += 4) {
          const uint4 four = *reinterpret_cast<const uint4*>(ranks + i);
          // No rank is 0, so that `at least rank` is `more than rank - 1`.
          ahead += four.x > rank - (i < own);
          ahead += four.y > rank - (i + 1 < own);
          ahead += four.z > rank - (i + 2 < own);
          ahead += four.w > rank - (i + 3 < own);
        }
        kept = ahead < keep;
      }
      const uint32_t votes = __ballot_sync(~0u, kept);
      if (lane == 0) found[warp] = __popc(votes);
      __syncthreads();
      int place = before + __popc(votes & ((1u << lane) - 1));
      for (int w = 0; w < kWarps; ++w) {
        if (w < warp) place += found[w];
        before += found[w];
      }
      if (kept) chosen[place] = own;
      __syncthreads();
    }
  }
#pragma unroll 4
  for (int i = threadIdx.x; i < keep * kPieces; i += kSealThreads) {
    const int place = i / kPieces, piece = i - place * kPieces;
    const int index = keep < step.chunk ? chosen[place] : place;
    const auto* source = reinterpret_cast<const uint4*>(token(index)) + piece;
    const int page = place / size;
    auto* target = reinterpret_cast<uint4*>(sources[pages + page]) + (place - page * size) * kPieces;
    target[piece] = *source;
  }
}

}  // namespace tangram
