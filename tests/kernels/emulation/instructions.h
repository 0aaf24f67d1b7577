// kernels/cuda/instructions.cuh on a CPU. Fragments lie in lanes as the PTX manual says of m8n8 matrices of 16-bit
// elements and of m16n8k16 products.
#pragma once

#include <deque>
#include <vector>

#include "elements.cuh"

namespace tangram {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - emulation::shared);
}

struct Copy {
  uint32_t target;
  const void* source;
  bool exists;

  void make() const {
    if (exists) memcpy(emulation::shared + target, source, 16);
    else memset(emulation::shared + target, 0, 16);
  }
};
// A thread's copies: those not yet committed, and groups that are. They may be made at once or as late as they are
// waited for; which of the two, goes with the order of threads.
struct Copies {
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};
inline Copies copies[emulation::kMostThreads];
inline const bool copies_begin_with_a_block = [] {
  emulation::at_block_start = [] { std::fill(std::begin(copies), std::end(copies), Copies{}); };
  return true;
}();

inline void copy_async(uint32_t target, const void* source, bool exists) {
  const Copy copy{target, source, exists};
  if (emulation::block.order == emulation::kBackward) copy.make();
  else copies[threadIdx.x].open.push_back(copy);
}
inline void copy_commit() {
  Copies& own = copies[threadIdx.x];
  own.groups.push_back(std::move(own.open));
  own.open.clear();
}
template <int kPending>
void copy_wait() {
  Copies& own = copies[threadIdx.x];
  for (; own.groups.size() > kPending; own.groups.pop_front())
    for (const Copy& copy : own.groups.front()) copy.make();
}

// Row `row` of matrix i is where lane 8 i + row points to.
template <bool kTransposed>
void load_matrices_as(uint32_t (&to)[4], uint32_t row) {
  const int own_row = emulation::lane() / 4, column = emulation::lane() % 4 * 2;
  emulation::among_lanes(row, [&](auto of) {
    for (int i = 0; i < 4; ++i) {
      uint16_t pair[2];
      for (int e = 0; e < 2; ++e) {
        const int from_row = kTransposed ? column + e : own_row, from_column = kTransposed ? own_row : column + e;
        memcpy(&pair[e], emulation::shared + of(8 * i + from_row) + from_column * 2, 2);
      }
      memcpy(&to[i], pair, sizeof(pair));
    }
  });
}
inline void load_matrices(uint32_t (&to)[4], uint32_t row) { load_matrices_as<false>(to, row); }
inline void load_matrices_transposed(uint32_t (&to)[4], uint32_t row) { load_matrices_as<true>(to, row); }

template <typename T>
float half_of(uint32_t pair, int which) {
  T elements[2];
  memcpy(elements, &pair, sizeof(pair));
  return to_float(elements[which]);
}

template <typename T>
void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  const int lane = emulation::lane();
  emulation::among_lanes(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}}, [&](auto of) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      float products = 0.f;
      for (int k = 0; k < 16; ++k) {
        const Operands left = of(row % 8 * 4 + k % 8 / 2), right = of(column * 4 + k % 8 / 2);
        products += half_of<T>(left.a[row / 8 + k / 8 * 2], k % 2) * half_of<T>(right.b[k / 8], k % 2);
      }
      sum[i] += products;
    }
  });
}

inline float exp2_fast(float x) { return exp2f(x); }

}  // namespace tangram
