// Write the step's new keys and values into the rings: one block for each token.
#pragma once

#include "step.cuh"

namespace tangram {

// Packed in kernels/cuda/native.py.
struct Fresh {
  const char* key;    // [tokens, kv_heads, head_size]; decode.cuh: null where the rings hold the step's tokens
  const char* value;  // [tokens, kv_heads, head_size]
  int64_t key_token, key_head, value_token, value_head;  // strides in elements
  int32_t head_size, element_bytes;

  __device__ const char* key_of(int token, int head) const {
    return key + (token * key_token + head * key_head) * element_bytes;
  }
  __device__ const char* value_of(int token, int head) const {
    return value + (token * value_token + head * value_head) * element_bytes;
  }
};

constexpr int kMostTokens = 4;  // of a block

// Word: the widest type to which all addresses are aligned; the copy does not care what an element is. A block has a
// warp for each of its tokens, at least.
template <typename Word>
__global__ void append_kernel(const Step step, const Fresh fresh, const int tokens) {
  __shared__ int32_t s_offset[kMostTokens];      // of the token in its page, or -1
  __shared__ const int32_t* s_pages[kMostTokens];  // of the token, one a tier
  __shared__ int s_entry[kMostTokens];
  const int base = blockIdx.x * tokens, warp = threadIdx.x / kWarp;
  if (warp < tokens) {
    const int token = base + warp;
    const int index = warp_last_at_most(step.requests, token, [&](int i) { return step.query_start_loc[i]; });
    if (threadIdx.x % kWarp == 0) {
      const Request request(step, index);
      const bool real = token >= request.start && token < request.start + request.count;
      const int position = request.length - request.count + token - request.start;
      s_offset[warp] = real ? position % step.page_tokens : -1;
      s_entry[warp] = position / step.page_tokens % step.ring_slots * step.tiers;
      s_pages[warp] = step.rows + index * step.row_stride;
    }
  }
  __syncthreads();
  const int half = fresh.head_size * fresh.element_bytes / static_cast<int>(sizeof(Word));  // words of a key
  for (int index = threadIdx.x; index < step.kv_heads * 2 * half; index += blockDim.x) {
    const int head = index / (2 * half), word = index - head * 2 * half;
    const int tier = step.head_tier[head], member = step.head_member[head];
    if (tier < 0 || tier >= step.tiers || member < 0 || member >= step.members) continue;
    const bool is_key = word < half;
    const int64_t stride = is_key ? fresh.key_token : fresh.value_token;
    const int64_t first = head * (is_key ? fresh.key_head : fresh.value_head);
    const char* source = (is_key ? fresh.key : fresh.value) + first * fresh.element_bytes;
    // All loads come before the stores, which might otherwise write what is loaded next, for all the compiler knows.
    Word data[kMostTokens];
    char* target[kMostTokens];
#pragma unroll
    for (int i = 0; i < kMostTokens; ++i) {
      target[i] = nullptr;
      if (i >= tokens || s_offset[i] < 0) continue;
      const int entry = s_entry[i] + tier, page = entry < step.row_width ? s_pages[i][entry] : -1;
      if (page < 0 || page >= step.pages) continue;
      target[i] = step.pool + page * step.page_stride * fresh.element_bytes;
      data[i] = reinterpret_cast<const Word*>(source + (base + i) * stride * fresh.element_bytes)
          [is_key ? word : word - half];
    }
#pragma unroll
    for (int i = 0; i < kMostTokens; ++i) {
      if (target[i] == nullptr) continue;
      const int64_t slot = static_cast<int64_t>(member) * step.page_tokens + s_offset[i];
      reinterpret_cast<Word*>(target[i])[slot * 2 * half + word] = data[i];
    }
  }
}

}  // namespace tangram
