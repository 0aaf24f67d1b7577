// The C interface of the CPU kernels. Every function returns 0 or a fault: its kind in the low byte, above it the
// request (or the head, for a fault of the head table) that caused it.

#include <exception>

#include "append.h"
#include "attention.h"

namespace {

using namespace tangram;

template <class Call>
int64_t guarded(const Step& step, Call call) noexcept {
  try {
    const int64_t wrong = check(step);
    if (wrong) return wrong;
    switch (step.element) {
      case kBFloat16: return call(BFloat16{});
      case kFloat16: return call(Float16{});
      case kFloat32: return call(float{});
      default: return kElement;
    }
  } catch (const std::exception&) {
    return kMemory;  // allocations are all that throws here
  }
}

}  // namespace

#define TANGRAM_EXPORT extern "C" __attribute__((visibility("default")))

TANGRAM_EXPORT int64_t tangram_append(const Step* step, const Fresh* fresh) {
  return guarded(*step, [&](auto element) { return append<decltype(element)>(*step, *fresh); });
}

TANGRAM_EXPORT int64_t tangram_attention(const Step* step, const Heads* heads) {
  return guarded(*step, [&](auto element) { return Attention<decltype(element)>(*step, *heads).run(); });
}
