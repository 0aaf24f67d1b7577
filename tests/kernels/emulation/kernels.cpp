// The kernels as C functions that run them on the CPU's memory. Each takes what the functions of binding.cu take, the
// element type and head size, and an order of threads; it returns 0, or 1 where threads waited for others that did
// not come, or -1 for sizes that are not built here.
#include "emulator.h"

#define TANGRAM_INSTRUCTIONS "instructions.h"
#include "append.cuh"
#include "decode.cuh"
#include "prefill.cuh"
#include "seal.cuh"
#include "wide.cuh"

namespace {

using namespace tangram;
using emulation::kSharedBytes;
using emulation::Order;
constexpr int kNotEmulated = -1;
constexpr int kBlocks = 7;  // that the device would hold at a time

template <typename Kernel>
int run(dim3 grid, int threads, Order order, const Kernel& kernel) {
  return emulation::launch(grid, threads, order, kernel);
}

// As in binding.cu.
struct AppendAttend {
  Attend attend;
  Fresh fresh;
  int32_t dependent, unused;
};

template <typename T, int D>
struct Kernels {
  static int append(const Step& step, const Fresh& fresh, Order order) {
    const int64_t bytes = fresh.element_bytes;
    const uint64_t bits = reinterpret_cast<uint64_t>(step.pool) | reinterpret_cast<uint64_t>(fresh.key) |
                          reinterpret_cast<uint64_t>(fresh.value) | step.page_stride * bytes |
                          fresh.key_token * bytes | fresh.key_head * bytes | fresh.value_token * bytes |
                          fresh.value_head * bytes | fresh.head_size * bytes;
    for (int tokens : {1, kMostTokens}) {  // of a block: few for small steps, else more; the outcome is the same
      const dim3 grid(ceil_div(step.tokens, tokens));
      const auto kernel = [&] {
        if (bits % 16 == 0) append_kernel<uint4>(step, fresh, tokens);
        else append_kernel<uint16_t>(step, fresh, tokens);
      };
      if (int failed = run(grid, kMostTokens * kWarp, order, kernel)) return failed;
    }
    return 0;
  }

  static int64_t slot_floats() {
    return std::max<int64_t>(Decode<T, D>::kSlotFloats, Prefill<T, D>::kSlotFloats);
  }

  static int decode(const Step& step, const AppendAttend& rest, Order order) {
    return decode(step, rest.attend, rest.fresh, order);
  }

  static int attention(const Step& step, const Attend& attend, Order order) {
    const int group = attend.group(step);
    if (attend.singles && group <= kDecodeGroup)
      if (int failed = decode(step, attend, Fresh{}, order)) return failed;
    return attend.max_query == 1 && group <= kDecodeGroup ? 0 : prefill(step, attend, order);
  }

  static int seal(const Step& step, const Seal& seal, Order order) {
    if (SealSizes<T, D>::shared_bytes(step) > kSharedBytes) return kNotEmulated;
    const dim3 grid(seal.count, step.kv_heads > 0 ? step.kv_heads : step.tiers * step.members);
    return run(grid, kSealThreads, order, [&] { seal_kernel<T, D>(step, seal); });
  }

  static int stage(const Step& step, const Wide& wide, Order order) {
    const dim3 tails(wide.most_tail, wide.count), news(wide.most_new, wide.count);
    const dim3 tables(wide.segment_count, step.kv_heads);
    int failed = run(tails, kWideThreads, order, [&] { stage_kernel<T, D, true>(step, wide); });
    if (!failed) failed = run(news, kWideThreads, order, [&] { stage_kernel<T, D, false>(step, wide); });
    if (!failed) failed = run(tables, kWideThreads, order, [&] { table_kernel<T, D>(step, wide); });
    return failed ? failed : pack<false>(step, wide, order);
  }

  static int unpack(const Step& step, const Wide& wide, Order order) { return pack<true>(step, wide, order); }

 private:
  static int decode(const Step& step, const Attend& attend, const Fresh& fresh, Order order) {
    using Sizes = Decode<T, D>;
    if (Sizes::shared_bytes(step) > kSharedBytes) return kNotEmulated;
    return run(dim3(kBlocks), Sizes::kThreads, order, [&] { decode_kernel<T, D>(step, attend, fresh); });
  }

  static int prefill(const Step& step, const Attend& attend, Order order) {
    using Sizes = Prefill<T, D>;
    const int places = Sizes::places(step, attend.query_heads / step.kv_heads);
    int failed = run(dim3(1), kPlanThreads, order, [&] { plan_kernel<T, D>(step, attend, places); });
    if (!failed)
      failed = run(dim3(kBlocks), Sizes::kThreads, order, [&] { prefill_kernel<T, D>(step, attend, places); });
    const dim3 grid(kBlocks, D / 8 / Sizes::kColumns);
    if (!failed) failed = run(grid, Sizes::kThreads, order, [&] { merge_kernel<T, D>(step, attend, places); });
    return failed;
  }

  template <bool kBack>
  static int pack(const Step& step, const Wide& wide, Order order) {
    const dim3 grid(ceil_div(wide.most_tokens, kPackedTokens), wide.segment_count);
    auto* rows = const_cast<char*>(wide.query);
    return run(grid, kWideThreads, order, [&] { pack_kernel<T, D, kBack>(step, wide, rows); });
  }
};

template <typename T, typename Call>
int by_size(int head_size, const Call& call) {
  switch (head_size) {
    case 32: return call(Kernels<T, 32>());
    case 64: return call(Kernels<T, 64>());
    case 96: return call(Kernels<T, 96>());
    case 128: return call(Kernels<T, 128>());
    case 256: return call(Kernels<T, 256>());
  }
  return kNotEmulated;
}

template <typename Call>
int choose(int bfloat16, int head_size, const Call& call) {
  return bfloat16 ? by_size<__nv_bfloat16>(head_size, call) : by_size<__half>(head_size, call);
}

}  // namespace

#define EMULATED(name, Rest)                                                                                  \
  extern "C" int emulated_##name(const void* step, const void* rest, int bfloat16, int head_size, int order) { \
    return choose(bfloat16, head_size, [&](auto kernels) {                                                    \
      return kernels.name(*static_cast<const Step*>(step), *static_cast<const Rest*>(rest),                   \
                          static_cast<Order>(order));                                                         \
    });                                                                                                       \
  }
EMULATED(append, Fresh)
EMULATED(attention, Attend)
EMULATED(decode, AppendAttend)
EMULATED(seal, Seal)
EMULATED(stage, Wide)
EMULATED(unpack, Wide)

// What attention needs of workspace: numbers of float32, int32 and int32, and bytes.
extern "C" void emulated_workspace(int bfloat16, int head_size, int64_t* sizes) {
  int64_t floats = 0;
  choose(bfloat16, head_size, [&](auto kernels) {
    floats = kernels.slot_floats();
    return 0;
  });
  sizes[0] = 2 * kBlocks * floats, sizes[1] = kBlocks, sizes[2] = 1 << 12, sizes[3] = sizes[2] * sizeof(Piece);
}

// What the emulator must see: 0 has no fault, 1 reads what other threads may yet write, 2 has a barrier that only half of
// the threads come to. `numbers`: [64].
extern "C" int emulated_planted(int* numbers, int fault, int order) {
  const auto kernel = [&] {
    const int own = threadIdx.x;
    int* inside = reinterpret_cast<int*>(emulation::shared);
    inside[own] = own;
    if (fault == 0 || (fault == 2 && own < 32)) __syncthreads();
    numbers[own] = inside[63 - own];
  };
  return run(dim3(1), 64, static_cast<Order>(order), kernel);
}
