// Write the step's new keys and values into the rings: one block for each token.
#pragma once

#include "step.cuh"

namespace tangram {

// Packed in kernels/cuda/native.py.
struct Fresh {
  const char* key;    // [tokens, kv_heads, head_size]
  const char* value;  // [tokens, kv_heads, head_size]
  int64_t key_token, key_head, value_token, value_head;  // strides in elements
  int32_t head_size, element_bytes;
};

// Word: the widest type to which all addresses are aligned; the copy does not care what an element is.
template <typename Word>
__global__ void append_kernel(const Step step, const Fresh fresh) {
  __shared__ int s_request;
  const int token = blockIdx.x;
  if (threadIdx.x < kWarp) {
    const int last = step.requests - 1;
    const int found = warp_last_at_most(step.requests, token, [&](int i) { return step.query_start_loc[i]; });
    if (threadIdx.x == 0) s_request = token < step.query_start_loc[last + 1] ? found : -1;
  }
  __syncthreads();
  if (s_request < 0) return;
  const Request request(step, s_request);
  if (token < request.start || token >= request.start + request.count) return;
  const int position = request.length - request.count + token - request.start;
  const int slot = position / step.page_tokens % step.ring_slots * step.tiers, offset = position % step.page_tokens;
  const int32_t* row = step.rows + s_request * step.row_stride;
  const int half = fresh.head_size * fresh.element_bytes / static_cast<int>(sizeof(Word));  // words of a key
  for (int index = threadIdx.x; index < step.kv_heads * 2 * half; index += blockDim.x) {
    const int head = index / (2 * half), word = index - head * 2 * half;
    const int tier = step.head_tier[head], member = step.head_member[head];
    if (tier < 0 || tier >= step.tiers || member < 0 || member >= step.members) continue;
    const int entry = slot + tier, page = entry < step.row_width ? row[entry] : -1;
    if (page < 0 || page >= step.pages) continue;
    const bool is_key = word < half;
    const int64_t from = is_key ? token * fresh.key_token + head * fresh.key_head
                                : token * fresh.value_token + head * fresh.value_head;
    const char* source = (is_key ? fresh.key : fresh.value) + from * fresh.element_bytes;
    const int64_t slot_index = static_cast<int64_t>(member) * step.page_tokens + offset;
    char* target = step.pool + page * step.page_stride * fresh.element_bytes;
    reinterpret_cast<Word*>(target)[slot_index * 2 * half + word] =
        reinterpret_cast<const Word*>(source)[is_key ? word : word - half];
  }
}

}  // namespace tangram
