// CUDA's threads on a CPU, for kernels without tensor cores and asynchronous copies: what they compute can then be
// tested where there is no GPU. Each thread of a block is a fiber, which runs until it waits for others. Which goes on
// next is the caller's choice of order, so that a missing barrier shows as results that differ between orders.
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
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

struct __attribute__((aligned(8))) uint2 {
  uint32_t x, y;
};
struct __attribute__((aligned(16))) uint4 {
  uint32_t x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

using std::max;
using std::min;

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr int kWarpSize = 32, kMostThreads = 1024;
constexpr size_t kStackBytes = 128 << 10;

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
  uint32_t slots[kMostThreads];
  int count = 0, current = 0;
  bool moved = false;  // whether any thread got on in this round
  void (*body)(const void*) = nullptr;
  const void* argument = nullptr;
};
inline Block block;

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

// What a lane of this thread's warp gives, bit by bit.
template <typename T>
T exchange(T value, int from) {
  static_assert(sizeof(T) == sizeof(uint32_t), "four bytes");
  const int first = threadIdx.x / kWarpSize * kWarpSize;
  memcpy(&block.slots[threadIdx.x], &value, sizeof(value));
  wait(warp_barrier(), kWarpSize);
  T got;
  memcpy(&got, &block.slots[first + from], sizeof(got));
  wait(warp_barrier(), kWarpSize);
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

// Runs a kernel on a grid, block after block; `shared` is filled with ones before each, which as floats are no
// numbers. Returns 0, or 1 if threads waited in vain.
template <typename Body>
int launch(dim3 grid, int threads, Order order, char* shared, size_t shared_bytes, const Body& body) {
  block.count = threads;
  block.threads.resize(threads);
  for (Thread& thread : block.threads) thread.stack.resize(kStackBytes);
  block.body = [](const void* argument) { (*static_cast<const Body*>(argument))(); };
  block.argument = &body;
  gridDim = grid;
  blockDim = dim3(threads);
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = dim3(x, y, 0);
      memset(shared, 0xFF, shared_bytes);
      if (!run_block(order)) return 1;
    }
  return 0;
}

}  // namespace emulation

inline void __syncthreads() { emulation::wait(emulation::block.all, emulation::block.count); }
inline void __syncwarp() { emulation::wait(emulation::warp_barrier(), emulation::kWarpSize); }
inline int __syncthreads_or(int predicate) {
  emulation::block.slots[threadIdx.x] = predicate != 0;
  __syncthreads();
  int any = 0;
  for (int i = 0; i < emulation::block.count; ++i) any |= emulation::block.slots[i];
  __syncthreads();
  return any;
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int bits) {
  return emulation::exchange(value, emulation::lane() ^ bits);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  emulation::block.slots[threadIdx.x] = predicate != 0;
  __syncwarp();
  unsigned votes = 0;
  const int first = threadIdx.x / emulation::kWarpSize * emulation::kWarpSize;
  for (int i = 0; i < emulation::kWarpSize; ++i) votes |= emulation::block.slots[first + i] << i;
  __syncwarp();
  return votes;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
