// The C functions of one library: one element type and head size, named by the two macros of build.py.
#include <cuda_runtime.h>

#include <mutex>

#include "append.cuh"
#include "decode.cuh"
#include "prefill.cuh"
#include "seal.cuh"

namespace {

using namespace tangram;

using Element = TANGRAM_ELEMENT;
constexpr int kSize = TANGRAM_HEAD_SIZE;

constexpr int kMostBlocks = 4;  // of a multiprocessor, in decode.cuh
constexpr int kMostDevices = 64;

struct Device {
  int processors = 0;
  size_t decode_bytes = 0;  // of shared memory, for which `decode_blocks` was found
  int decode_blocks = 0;
  size_t prefill_bytes = 0, seal_bytes = 0;  // that the kernels were allowed to take
};
std::mutex mutex;
Device devices[kMostDevices];

// Make the device current, and read its sizes at the first call.
cudaError_t select(int index, Device** device) {
  if (index < 0 || index >= kMostDevices) return cudaErrorInvalidDevice;
  int current = -1;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != index) error = cudaSetDevice(index);
  *device = &devices[index];
  if (error == cudaSuccess && (*device)->processors == 0)
    error = cudaDeviceGetAttribute(&(*device)->processors, cudaDevAttrMultiProcessorCount, index);
  return error;
}

// Let a kernel take so much dynamic shared memory; more than a device has is an error.
template <typename Kernel>
cudaError_t allow(Kernel kernel, size_t bytes, size_t* allowed) {
  if (bytes <= *allowed) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error == cudaSuccess) *allowed = bytes;
  return error;
}

template <typename Word>
void launch_append(const Step& step, const Fresh& fresh, cudaStream_t stream) {
  const int words = step.kv_heads * 2 * fresh.head_size * fresh.element_bytes / static_cast<int>(sizeof(Word));
  const int threads = words >= 256 ? 256 : (words + kWarp - 1) / kWarp * kWarp;
  append_kernel<Word><<<step.tokens, threads, 0, stream>>>(step, fresh);
}

cudaError_t decode(const Step& step, const Attend& attend, Device& device, cudaStream_t stream) {
  using Sizes = Decode<Element, kSize>;
  auto* kernel = decode_kernel<Element, kSize>;
  const size_t bytes = Sizes::shared_bytes(step);
  if (bytes != device.decode_bytes) {
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    int blocks = 0;
    if (error == cudaSuccess)
      error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, Sizes::kThreads, bytes);
    if (error != cudaSuccess) return error;
    if (blocks == 0) return cudaErrorLaunchOutOfResources;
    device.decode_bytes = bytes;
    device.decode_blocks = blocks < kMostBlocks ? blocks : kMostBlocks;
  }
  kernel<<<device.processors * device.decode_blocks, Sizes::kThreads, bytes, stream>>>(step, attend);
  return cudaGetLastError();
}

cudaError_t prefill(const Step& step, const Attend& attend, Device& device, cudaStream_t stream) {
  using Sizes = Prefill<Element, kSize>;
  auto* kernel = prefill_kernel<Element, kSize>;
  const cudaError_t error = allow(kernel, Sizes::kSharedBytes, &device.prefill_bytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(Sizes::places(step, attend.query_heads / step.kv_heads), step.kv_heads);
  kernel<<<grid, Sizes::kThreads, Sizes::kSharedBytes, stream>>>(step, attend);
  return cudaGetLastError();
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Each returns a cudaError_t. `step` and the second argument are structures packed by native.py.

EXPORT int tangram_append(const void* step_bytes, const void* fresh_bytes, int index, void* stream) {
  const Step step = *static_cast<const Step*>(step_bytes);
  const Fresh fresh = *static_cast<const Fresh*>(fresh_bytes);
  if (step.requests == 0 || step.tokens == 0 || step.kv_heads == 0) return cudaSuccess;
  std::lock_guard<std::mutex> guard(mutex);
  Device* device;
  const cudaError_t error = select(index, &device);
  if (error != cudaSuccess) return error;
  const int64_t bytes = fresh.element_bytes;
  const uint64_t bits = reinterpret_cast<uint64_t>(step.pool) | reinterpret_cast<uint64_t>(fresh.key) |
                        reinterpret_cast<uint64_t>(fresh.value) | step.page_stride * bytes | fresh.key_token * bytes |
                        fresh.key_head * bytes | fresh.value_token * bytes | fresh.value_head * bytes |
                        fresh.head_size * bytes;
  const auto custream = static_cast<cudaStream_t>(stream);
  if (bits % 16 == 0) launch_append<uint4>(step, fresh, custream);
  else if (bytes == 2) launch_append<uint16_t>(step, fresh, custream);
  else if (bytes == 4) launch_append<uint32_t>(step, fresh, custream);
  else return cudaErrorInvalidValue;
  return cudaGetLastError();
}

EXPORT int tangram_attention(const void* step_bytes, const void* attend_bytes, int index, void* stream) {
  const Step step = *static_cast<const Step*>(step_bytes);
  const Attend attend = *static_cast<const Attend*>(attend_bytes);
  if (step.requests == 0 || step.tokens == 0) return cudaSuccess;
  std::lock_guard<std::mutex> guard(mutex);
  Device* device;
  cudaError_t error = select(index, &device);
  const int group = attend.query_heads / step.kv_heads;
  const auto custream = static_cast<cudaStream_t>(stream);
  if (error == cudaSuccess && group <= kDecodeGroup) error = decode(step, attend, *device, custream);
  if (error == cudaSuccess && !(attend.max_query == 1 && group <= kDecodeGroup))
    error = prefill(step, attend, *device, custream);
  return error;
}

EXPORT int tangram_seal(const void* step_bytes, const void* seal_bytes, int index, void* stream) {
  const Step step = *static_cast<const Step*>(step_bytes);
  const Seal seal = *static_cast<const Seal*>(seal_bytes);
  if (seal.count == 0) return cudaSuccess;
  std::lock_guard<std::mutex> guard(mutex);
  Device* device;
  cudaError_t error = select(index, &device);
  const size_t bytes = SealSizes<Element, kSize>::shared_bytes(step);
  auto* kernel = seal_kernel<Element, kSize>;
  if (error == cudaSuccess) error = allow(kernel, bytes, &device->seal_bytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(seal.count, step.tiers * step.members);
  kernel<<<grid, kSealThreads, bytes, static_cast<cudaStream_t>(stream)>>>(step, seal);
  return cudaGetLastError();
}

// How much workspace attention needs on a device: bytes of partial sums and number of counters.
EXPORT int tangram_workspace(int index, int64_t* partial_bytes, int64_t* counters) {
  std::lock_guard<std::mutex> guard(mutex);
  Device* device;
  const cudaError_t error = select(index, &device);
  *counters = static_cast<int64_t>(device->processors) * kMostBlocks;
  *partial_bytes = *counters * 2 * Decode<Element, kSize>::kSlotFloats * sizeof(float);
  return error;
}

EXPORT const char* tangram_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
