// What a thread owns while it works.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "plan.h"

namespace tangram {

// Aligned memory that lives as long as its thread and only grows.
class Workspace {
 public:
  float* floats(int64_t count) {
    if (count > size_) {
      std::free(data_);
      size_ = 0;
      data_ = static_cast<float*>(std::aligned_alloc(64, size_t(round_up(count, 16)) * sizeof(float)));
      if (!data_) throw std::bad_alloc();
      std::memset(data_, 0, size_t(count) * sizeof(float));
      size_ = count;
    }
    return data_;
  }
  ~Workspace() { std::free(data_); }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

inline int thread_number() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

}  // namespace tangram
