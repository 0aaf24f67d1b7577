// CUDA's threads on a CPU: what kernels compute can then be tested where there is no GPU. Each thread of a block is a
// fiber, which runs until it waits for others. Which goes on next is the caller's choice of order, so that a missing
// barrier shows as results that differ between orders.
#pragma once

#include <math.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static  // one block runs at a time
#define TANGRAM_SHARED(name) char* const name = emulation::shared
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

struct __attribute__((aligned(8))) uint2 {
  uint32_t x, y;
};
struct __attribute__((aligned(16))) uint4 {
  uint32_t x, y, z, w;
};
struct __attribute__((aligned(8))) float2 {
  float x, y;
};
struct __attribute__((aligned(16))) float4 {
  float x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned min(int a, unsigned b) { return static_cast<unsigned>(a) < b ? static_cast<unsigned>(a) : b; }

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr int kWarpSize = 32, kMostThreads = 1024;
constexpr size_t kStackBytes = 64 << 10, kSharedBytes = 1 << 18;
alignas(128) inline char shared[kSharedBytes];  // what a launch gives a block

enum Order { kForward, kBackward, kScattered };

struct Barrier {
  int arrived = 0;
  unsigned generation = 0;
};

struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  bool done;
};

struct Block {
  ucontext_t scheduler;
  std::vector<Thread> threads;
  Barrier all, warps[kMostThreads / kWarpSize];
  uint32_t slots[kMostThreads][8];  // what a thread gives to others
  int count = 0, current = 0;
  Order order = kForward;
  bool moved = false;  // whether any thread got on in this round
  void (*body)(const void*) = nullptr;
  const void* argument = nullptr;
};
inline Block block;
inline void (*at_block_start)() = [] {};

inline void yield() { swapcontext(&block.threads[block.current].context, &block.scheduler); }

inline void wait(Barrier& barrier, int count) {
  const unsigned mine = barrier.generation;
  block.moved = true;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == mine) yield();
  block.moved = true;
}

inline int lane() { return threadIdx.x % kWarpSize; }
inline Barrier& warp_barrier() { return block.warps[threadIdx.x / kWarpSize]; }

// Gives something to the other lanes of this thread's warp, and has `take` look at what they give.
template <typename T, typename Take>
void among_lanes(const T& given, const Take& take) {
  static_assert(sizeof(T) <= sizeof(block.slots[0]), "more room is needed");
  const int first = threadIdx.x / kWarpSize * kWarpSize;
  memcpy(block.slots[threadIdx.x], &given, sizeof(given));
  wait(warp_barrier(), kWarpSize);
  take([first](int of) {
    T got;
    memcpy(&got, block.slots[first + of], sizeof(got));
    return got;
  });
  wait(warp_barrier(), kWarpSize);
}

template <typename T>
T exchange(T value, int from) {
  T got;
  among_lanes(value, [&](auto of) { got = of(from); });
  return got;
}

inline void start() {
  block.body(block.argument);
  block.threads[block.current].done = true;
  block.moved = true;
}

// Runs one block. Returns whether all its threads came to their end: where some wait for others that do not come,
// none ever would.
inline bool run_block(Order order) {
  std::fill(std::begin(block.warps), std::end(block.warps), Barrier{});
  block.all = Barrier{};
  at_block_start();
  for (Thread& thread : block.threads) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = &block.scheduler;
    thread.done = false;
    makecontext(&thread.context, start, 0);
  }
  for (bool left = true; left;) {
    left = false;
    block.moved = false;
    for (int turn = 0; turn < block.count; ++turn) {
      const int last = block.count - 1;
      block.current = order == kForward ? turn : order == kBackward ? last - turn : (turn * 97 + 31) % block.count;
      Thread& thread = block.threads[block.current];
      if (thread.done) continue;
      left = true;
      threadIdx = dim3(block.current, 0, 0);
      swapcontext(&block.scheduler, &thread.context);
    }
    if (left && !block.moved) return false;
  }
  return true;
}

// Runs a kernel on a grid, block after block; shared memory is filled with ones before each, which as floats are no
// numbers. Returns 0, or 1 if threads waited in vain.
template <typename Body>
int launch(dim3 grid, int threads, Order order, const Body& body) {
  block.count = threads;
  block.order = order;
  block.threads.resize(threads);
  for (Thread& thread : block.threads) thread.stack.resize(kStackBytes);
  block.body = [](const void* argument) { (*static_cast<const Body*>(argument))(); };
  block.argument = &body;
  gridDim = grid;
  blockDim = dim3(threads);
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = dim3(x, y, 0);
      memset(shared, 0xFF, kSharedBytes);
      if (!run_block(order)) return 1;
    }
  return 0;
}

}  // namespace emulation

inline void __syncthreads() { emulation::wait(emulation::block.all, emulation::block.count); }
inline void __syncwarp() { emulation::wait(emulation::warp_barrier(), emulation::kWarpSize); }
inline int __syncthreads_or(int predicate) {
  emulation::block.slots[threadIdx.x][0] = predicate != 0;
  __syncthreads();
  int any = 0;
  for (int i = 0; i < emulation::block.count; ++i) any |= emulation::block.slots[i][0];
  __syncthreads();
  return any;
}
template <typename T>
T __shfl_sync(unsigned, T value, int from) {
  return emulation::exchange(value, from % emulation::kWarpSize);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int bits) {
  return emulation::exchange(value, emulation::lane() ^ bits);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int steps) {
  const int from = emulation::lane() - steps;
  return emulation::exchange(value, from < 0 ? emulation::lane() : from);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  unsigned votes = 0;
  emulation::among_lanes(predicate != 0, [&](auto of) {
    for (int i = 0; i < emulation::kWarpSize; ++i) votes |= static_cast<unsigned>(of(i)) << i;
  });
  return votes;
}
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == ~0u; }
inline void __threadfence() {}
inline int32_t atomicAdd(int32_t* to, int32_t value) {
  const int32_t before = *to;
  *to += value;
  return before;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
