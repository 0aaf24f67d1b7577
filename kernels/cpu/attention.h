// Attention of a step's queries to what their heads hold.
//
// Within a span the softmax runs online over tiles of kBlock tokens; the spans of a query are merged from the first
// kept one to the last raw one. The cut depends on the query's position and nothing else, so spans may be computed by
// any thread, alone or with other queries, and the result has the same bits.
#pragma once

#include <atomic>

#include "element.h"
#include "plan.h"
#include "step.h"
#include "tile.h"
#include "workspace.h"

namespace tangram {

struct Heads {
  void* out;          // [tokens, query_heads, head_size]
  const void* query;  // likewise
  const float* sinks;  // [query_heads], a score beside the tokens' that has no value, or null
  int64_t out_token, out_head, query_token, query_head, query_heads;
  double scale;
  double soft_cap;  // scores become soft_cap * tanh(score / soft_cap); 0 leaves them
};

template <class E>
class Attention {
 public:
  Attention(const Step& step, const Heads& heads)
      : step_(step),
        heads_(heads),
        group_(int(heads.query_heads / step.kv_heads)),
        size_(int(step.head_size)),
        stride_(int(round_up(step.head_size, kLanes))),
        room_(round_up(std::max<int64_t>(kRows, group_), kLanes)),
        plan_(step, group_, stride_) {}

  int64_t run() {
    static thread_local Workspace workspace, partial_workspace;
    const int64_t tasks = int64_t(plan_.tasks.size());
    std::vector<std::atomic<int64_t>> left(plan_.joins.size());  // spans that each join still waits for
    for (size_t i = 0; i < left.size(); ++i) left[i] = plan_.joins[i].parts;
    const int threads = int(std::max<int64_t>(1, std::min<int64_t>(step_.threads, tasks)));
    const int64_t floats = local(nullptr).floats;
    float* const shared = workspace.floats(floats * threads);
    partial_ = partial_workspace.floats(plan_.part_floats);
    std::atomic<int64_t> result{kNone};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      const Local mine = local(shared + floats * thread_number());
#pragma omp for schedule(dynamic, 1) nowait
      for (int64_t i = 0; i < tasks; ++i) {
        const Task& task = plan_.tasks[size_t(i)];
        if (!compute(task, mine)) result = fault(kPage, task.request);
        // Whoever finishes the last span of a history joins them all, in their order: no thread waits for another.
        if (task.join >= 0 && left[size_t(task.join)].fetch_sub(1, std::memory_order_acq_rel) == 1)
          join(plan_.joins[size_t(task.join)], mine);
      }
    }
    return result;
  }

 private:
  // One thread's part of the workspace.
  struct Local {
    float *query, *scores, *scratch, *keys, *values;
    int* limit;
    Softmax span, total;
    int64_t floats;
  };

  Local local(float* base) const {
    int64_t used = 0;
    auto take = [&](int64_t count) {
      float* here = base ? base + used : nullptr;
      used += round_up(count, 16);
      return here;
    };
    Local l;
    l.keys = take(int64_t(kBlock) * size_);
    l.values = take(int64_t(kBlock) * stride_);
    l.query = take(room_ * stride_);
    l.scores = take(room_ * kBlock);
    l.scratch = take(2 * room_);
    l.limit = reinterpret_cast<int*>(take(room_));
    for (Softmax* state : {&l.span, &l.total}) *state = {take(room_), take(room_), take(room_ * stride_)};
    l.floats = used;
    return l;
  }

  bool compute(const Task& task, const Local& l) const {
    const Request request = request_of(step_, task.request);
    const HeadView<E> view(step_, request, task.head);
    const int rows = int(task.count) * group_;
    load_queries(request, task, l);
    if (task.span >= 0) return add_span(view, task, task.span, l, softmax_at(partial_ + task.part, rows));
    const int64_t total = spans(view.kept()) + spans(visible(view, task.token + task.count - 1));
    before_any(task, rows, l.total);
    for (int64_t span = 0; span < total; ++span) {
      if (!add_span(view, task, span, l, l.span)) return false;
      merge(l.span, first_row(view, task, span), rows, stride_, l.total);
    }
    write(request, task, l.total);
    return true;
  }

  void join(const Task& task, const Local& l) const {
    const Request request = request_of(step_, task.request);
    const HeadView<E> view(step_, request, task.head);
    const int rows = int(task.count) * group_;
    before_any(task, rows, l.total);
    for (int64_t span = 0; span < task.parts; ++span) {
      const Softmax part = softmax_at(partial_ + task.part + span * softmax_floats(rows, stride_), rows);
      merge(part, first_row(view, task, span), rows, stride_, l.total);
    }
    write(request, task, l.total);
  }

  // The softmax of the task's rows before any token: nothing, or the sink of each row's head.
  void before_any(const Task& task, int rows, const Softmax& total) const {
    total.clear(rows, stride_);
    if (!heads_.sinks) return;
    for (int r = 0; r < rows; ++r) {
      total.top[r] = heads_.sinks[task.head * group_ + r % group_];
      total.sum[r] = 1.0f;
    }
  }

  // Raw tokens that a new token of the request sees, itself included.
  int64_t visible(const HeadView<E>& view, int64_t token) const {
    return view.request.length - view.request.count + token + 1 - view.raw_begin();
  }

  // The first row that sees anything of a span.
  int first_row(const HeadView<E>& view, const Task& task, int64_t span) const {
    const int64_t kept = spans(view.kept());
    if (span < kept) return 0;
    const int64_t hidden = (span - kept) * kSpan + 1 - visible(view, task.token);
    return int(std::max<int64_t>(0, hidden)) * group_;
  }

  // The softmax of the task's rows over one span, from nothing.
  bool add_span(const HeadView<E>& view, const Task& task, int64_t span, const Local& l, const Softmax& to) const {
    const int rows = int(task.count) * group_;
    const int64_t kept = spans(view.kept());
    const bool raw = span >= kept;
    const int64_t begin = (raw ? span - kept : span) * kSpan;
    const int64_t list = raw ? visible(view, task.token + task.count - 1) : view.kept();
    const int64_t end = std::min(begin + kSpan, list);
    const auto find = [&](int64_t at, const E** token) {
      const int64_t count = std::min<int64_t>(kBlock, end - at);
      return raw ? view.raw_tokens(at, count, token) : view.kept_tokens(at, count, token);
    };
    to.clear(rows, stride_);
    const E *token[kBlock], *next[kBlock];
    if (!find(begin, next)) return false;
    for (int64_t at = begin; at < end; at += kBlock) {
      const int count = int(std::min<int64_t>(kBlock, end - at));
      std::copy_n(next, count, token);
      if (at + kBlock < end) {
        if (!find(at + kBlock, next)) return false;
        prefetch(next, int(std::min<int64_t>(kBlock, end - at - kBlock)));
      }
      int first = rows;
      for (int r = rows - 1; r >= 0; --r) {
        const int64_t seen = raw ? visible(view, task.token + r / group_) - at : count;
        if (seen <= 0) break;
        l.limit[r] = int(std::min<int64_t>(seen, count));
        first = r;
      }
      load_keys(token, count, size_, l.keys, kBlock);
      const auto add = [&](auto values) {
        add_tile<pairs<E>>(l.query, stride_, first, rows, l.limit, l.keys, depth<E>(size_), values, stride_,
                           {float(heads_.scale), float(heads_.soft_cap)}, l.scores, l.scratch, to);
      };
      if (rows - first <= kRowStep && size_ == stride_) {
        add([&](int j, int d) { return widen(token[j] + size_ + d); });  // each value is used once: no tile
      } else {
        for (int j = 0; j < count; ++j) widen_row(token[j] + size_, size_, l.values + j * stride_);
        add([&](int j, int d) { return load<Vec>(l.values + j * stride_ + d); });
      }
    }
    return true;
  }

  // Begin to fetch tokens: their pages are scattered, so the hardware cannot guess where the next tile lies.
  void prefetch(const E* const* token, int count) const {
    const int bytes = 2 * size_ * int(sizeof(E));
    for (int j = 0; j < count; ++j)
      for (int b = 0; b < bytes; b += 64) __builtin_prefetch(reinterpret_cast<const char*>(token[j]) + b, 0, 2);
  }

  void load_queries(const Request& request, const Task& task, const Local& l) const {
    const E* query = static_cast<const E*>(heads_.query);
    for (int64_t t = 0; t < task.count; ++t)
      for (int g = 0; g < group_; ++g)
        load_query(query + (request.start + task.token + t) * heads_.query_token +
                       (task.head * group_ + g) * heads_.query_head,
                   size_, l.query + (t * group_ + g) * stride_);
  }

  void write(const Request& request, const Task& task, const Softmax& state) const {
    E* out = static_cast<E*>(heads_.out);
    for (int64_t t = 0; t < task.count; ++t)
      for (int g = 0; g < group_; ++g) {
        const int64_t row = t * group_ + g;
        E* to = out + (request.start + task.token + t) * heads_.out_token +
                (task.head * group_ + g) * heads_.out_head;
        for (int d = 0; d < size_; ++d) from_float(state.out[row * stride_ + d] / state.sum[row], to[d]);
      }
  }

  const Step& step_;
  const Heads& heads_;
  const int group_, size_, stride_;
  const int64_t room_;
  const Plan plan_;
  float* partial_ = nullptr;
};

}  // namespace tangram
