// Write new keys and values into the rings: a copy, so any element type of the same size does.
#pragma once

#include <atomic>
#include <cstring>

#include "step.h"

namespace tangram {

struct Fresh {
  const void *key, *value;  // [tokens, kv_heads, head_size]
  int64_t key_token, key_head, value_token, value_head;
};

template <class E>
int64_t append(const Step& step, const Fresh& fresh) {
  const size_t bytes = size_t(step.head_size) * sizeof(E);
  const E* key = static_cast<const E*>(fresh.key);
  const E* value = static_cast<const E*>(fresh.value);
  std::atomic<int64_t> result{kNone};
  const bool many = step.tokens * step.kv_heads * step.head_size > 1 << 15;  // below, threads cost more than copies
#pragma omp parallel for collapse(2) schedule(static) num_threads(int(step.threads)) if (many && step.threads > 1)
  for (int64_t h = 0; h < step.kv_heads; ++h) {
    for (int64_t i = 0; i < step.requests; ++i) {
      const Request request = request_of(step, i);
      const HeadView<E> view(step, request, h);
      E* block = nullptr;
      for (int64_t n = 0; n < request.count; ++n) {
        const int64_t position = request.length - request.count + n, offset = position % step.page_tokens;
        if (!block || offset == 0) block = view.raw_block(position / step.page_tokens);
        if (!block) {
          result = fault(kPage, i);
          break;
        }
        E* to = block + offset * 2 * step.head_size;
        const int64_t token = request.start + n;
        std::memcpy(to, key + token * fresh.key_token + h * fresh.key_head, bytes);
        std::memcpy(to + step.head_size, value + token * fresh.value_token + h * fresh.value_head, bytes);
      }
    }
  }
  return result;
}

}  // namespace tangram
