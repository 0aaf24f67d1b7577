// The work of a step, cut into tasks that threads take one by one.
//
// A head's tokens form two lists, kept and raw. Each list is cut into spans of kSpan tokens, counted from its start.
// A request with few query rows (decoding, above all) gives one task a span, so that threads share its history; their
// results are joined afterwards. A prefill gives one task a tile of queries. Both compute the same sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "step.h"
#include "tile.h"

namespace tangram {

constexpr int64_t kSpan = 256;
static_assert(kSpan % kBlock == 0, "a span is a whole number of tiles");

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
inline int64_t spans(int64_t tokens) { return (tokens + kSpan - 1) / kSpan; }

// A run of new tokens of one request, for the query heads of one KV head. Row = token * group + query head.
struct Task {
  int64_t request, head;
  int64_t token, count;  // new tokens `token .. token + count - 1` of the request
  int64_t span;          // the only span to compute, or -1 for all of them
  int64_t part;          // where the span's result goes among the partial results, or where a join finds the first
  int64_t parts;         // number of partial results of a join
  int64_t join;          // the join that waits for the span, or -1
};

// Floats of one softmax over `rows` rows.
inline int64_t softmax_floats(int64_t rows, int64_t stride) { return 2 * round_up(rows, kLanes) + rows * stride; }
inline Softmax softmax_at(float* at, int64_t rows) {
  return {at, at + round_up(rows, kLanes), at + 2 * round_up(rows, kLanes)};
}

struct Plan {
  std::vector<Task> tasks, joins;
  int64_t part_floats = 0;

  Plan(const Step& step, int64_t group, int64_t stride) {
    const int64_t tile = std::max<int64_t>(1, kRows / group);
    int64_t whole = 0;
    for (int64_t i = 0; i < step.requests; ++i)
      whole += step.kv_heads * round_up(request_of(step, i).count, tile) / tile;
    const bool scarce = whole < 4 * step.threads;
    for (int64_t i = 0; i < step.requests; ++i) {
      const Request request = request_of(step, i);
      if (request.count == 0) continue;
      const bool share = request.count <= tile && (scarce || request.count * group <= kRowStep);
      for (int64_t head = 0; head < step.kv_heads; ++head) {
        if (share)
          add_spans(step, request, i, head, request.count * group, stride);
        else  // the last tiles see the most tokens: begin with them
          for (int64_t t = (request.count - 1) / tile * tile; t >= 0; t -= tile)
            tasks.push_back({i, head, t, std::min(tile, request.count - t), -1, 0, 0, -1});
      }
    }
  }

 private:
  void add_spans(const Step& step, const Request& request, int64_t i, int64_t head, int64_t rows, int64_t stride) {
    const HeadView<float> view(step, request, head);
    const int64_t total = spans(view.kept()) + spans(request.length - view.raw_begin());
    if (total == 1) {
      tasks.push_back({i, head, 0, request.count, -1, 0, 0, -1});
      return;
    }
    joins.push_back({i, head, 0, request.count, -1, part_floats, total, -1});
    for (int64_t span = 0; span < total; ++span) {
      tasks.push_back({i, head, 0, request.count, span, part_floats, 0, int64_t(joins.size()) - 1});
      part_floats += softmax_floats(rows, stride);
    }
  }
};

}  // namespace tangram
