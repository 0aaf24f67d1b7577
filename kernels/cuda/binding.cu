// The C functions of one library: one element type and head size, named by the two macros of build.py.
#include <cuda_runtime.h>

#include <mutex>

#include "append.cuh"
#include "decode.cuh"
#include "prefill.cuh"
#include "seal.cuh"
#include "wide.cuh"

namespace {

using namespace tangram;

using Element = TANGRAM_ELEMENT;
constexpr int kSize = TANGRAM_HEAD_SIZE;

constexpr int kMostBlocks = 4;  // of a multiprocessor
constexpr int kMostPieces = 1 << 17;  // that are planned for
constexpr int kMostDevices = 64;

// How many blocks of a kernel a multiprocessor holds, for so much dynamic shared memory.
struct Fit {
  size_t bytes = 0;
  int blocks = 0;
};

struct Device {
  int processors = 0, major = 0;  // major: of the compute capability
  Fit decode, prefill;
  size_t seal_bytes = 0;  // of shared memory that the kernel may take
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
    error = cudaDeviceGetAttribute(&(*device)->major, cudaDevAttrComputeCapabilityMajor, index);
  if (error == cudaSuccess && (*device)->processors == 0)
    error = cudaDeviceGetAttribute(&(*device)->processors, cudaDevAttrMultiProcessorCount, index);
  return error;
}

// Let a kernel take so much dynamic shared memory; more than a device has is an error.
template <typename Kernel>
cudaError_t allow(Kernel kernel, size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

template <typename Kernel>
cudaError_t fit(Kernel kernel, int threads, size_t bytes, Fit* found) {
  if (bytes == found->bytes) return cudaSuccess;
  cudaError_t error = allow(kernel, bytes);
  int blocks = 0;
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, bytes);
  if (error != cudaSuccess) return error;
  if (blocks == 0) return cudaErrorLaunchOutOfResources;
  *found = {bytes, blocks < kMostBlocks ? blocks : kMostBlocks};
  return cudaSuccess;
}

template <typename Word>
void launch_append(const Step& step, const Fresh& fresh, cudaStream_t stream) {
  const int words = step.kv_heads * 2 * fresh.head_size * fresh.element_bytes / static_cast<int>(sizeof(Word));
  const int least = words < kMostTokens * kWarp ? kMostTokens * kWarp : words;
  const int threads = least < 256 ? ceil_div(least, kWarp) * kWarp : 256;
  const int tokens = step.tokens >= 2048 ? kMostTokens : 1;  // few tokens are spread over more blocks
  append_kernel<Word><<<ceil_div(step.tokens, tokens), threads, 0, stream>>>(step, fresh, tokens);
}

// `dependent`: the launch may begin while the one before is ending, where the device can do that.
cudaError_t decode(const Step& step, const Attend& attend, const Fresh& fresh, bool dependent, Device& device,
                   cudaStream_t stream) {
  using Sizes = Decode<Element, kSize>;
  auto* kernel = decode_kernel<Element, kSize>;
  const size_t bytes = Sizes::shared_bytes(step);
  const cudaError_t error = fit(kernel, Sizes::kThreads, bytes, &device.decode);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(device.processors * device.decode.blocks);
  config.blockDim = dim3(Sizes::kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = dependent && device.major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, step, attend, fresh);
}

cudaError_t prefill(const Step& step, Attend attend, Device& device, cudaStream_t stream) {
  using Sizes = Prefill<Element, kSize>;
  auto* kernel = prefill_kernel<Element, kSize>;
  const cudaError_t error = fit(kernel, Sizes::kThreads, Sizes::kSharedBytes, &device.prefill);
  if (error != cudaSuccess) return error;
  const int places = Sizes::places(step, attend.query_heads / step.kv_heads);
  const int64_t pieces = static_cast<int64_t>(places) * step.kv_heads;
  const int blocks = device.processors * device.prefill.blocks;
  if (pieces < kMostPieces) {
    plan_kernel<Element, kSize><<<1, kPlanThreads, 0, stream>>>(step, attend, places);
  } else {
    attend.plan = nullptr;
  }
  kernel<<<blocks, Sizes::kThreads, Sizes::kSharedBytes, stream>>>(step, attend, places);
  if (attend.plan != nullptr) {
    const dim3 grid(blocks, kSize / 8 / Sizes::kColumns);
    merge_kernel<Element, kSize><<<grid, Sizes::kThreads, 0, stream>>>(step, attend, places);
  }
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
  if (error == cudaSuccess && attend.singles && group <= kDecodeGroup)
    error = decode(step, attend, Fresh{}, false, *device, custream);
  if (error == cudaSuccess && !(attend.max_query == 1 && group <= kDecodeGroup))
    error = prefill(step, attend, *device, custream);
  return error;
}

// Decode requests with one new token each, whose keys and values are given and written into the rings.
struct AppendAttend {
  Attend attend;
  Fresh fresh;
  int32_t dependent, unused;
};
EXPORT int tangram_decode(const void* step_bytes, const void* rest_bytes, int index, void* stream) {
  const Step step = *static_cast<const Step*>(step_bytes);
  const AppendAttend rest = *static_cast<const AppendAttend*>(rest_bytes);
  if (step.requests == 0 || step.tokens == 0) return cudaSuccess;
  if (rest.attend.group(step) > kDecodeGroup) return cudaErrorInvalidValue;
  std::lock_guard<std::mutex> guard(mutex);
  Device* device;
  const cudaError_t error = select(index, &device);
  if (error != cudaSuccess) return error;
  return decode(step, rest.attend, rest.fresh, rest.dependent != 0, *device, static_cast<cudaStream_t>(stream));
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
  if (error == cudaSuccess && bytes > device->seal_bytes) error = allow(kernel, bytes);
  if (error != cudaSuccess) return error;
  if (bytes > device->seal_bytes) device->seal_bytes = bytes;
  const dim3 grid(seal.count, step.kv_heads > 0 ? step.kv_heads : step.tiers * step.members);
  kernel<<<grid, kSealThreads, bytes, static_cast<cudaStream_t>(stream)>>>(step, seal);
  return cudaGetLastError();
}

// Stage a wide step's raw tokens, write its sequences' tables and pack their queries.
EXPORT int tangram_stage(const void* step_bytes, const void* wide_bytes, int index, void* stream) {
  const Step step = *static_cast<const Step*>(step_bytes);
  const Wide wide = *static_cast<const Wide*>(wide_bytes);
  if (wide.count == 0 || step.kv_heads == 0) return cudaSuccess;
  std::lock_guard<std::mutex> guard(mutex);
  Device* device;
  const cudaError_t error = select(index, &device);
  if (error != cudaSuccess) return error;
  const auto custream = static_cast<cudaStream_t>(stream);
  // A ring is read before the step's own tokens overwrite it.
  if (wide.most_tail > 0)
    stage_kernel<Element, kSize, true><<<dim3(wide.most_tail, wide.count), kWideThreads, 0, custream>>>(step, wide);
  stage_kernel<Element, kSize, false><<<dim3(wide.most_new, wide.count), kWideThreads, 0, custream>>>(step, wide);
  table_kernel<Element, kSize><<<dim3(wide.segment_count, step.kv_heads), kWideThreads, 0, custream>>>(step, wide);
  const dim3 packs(ceil_div(wide.most_tokens, kPackedTokens), wide.segment_count);
  pack_kernel<Element, kSize, false><<<packs, kWideThreads, 0, custream>>>(step, wide, const_cast<char*>(wide.query));
  return cudaGetLastError();
}

// Put the outputs of a wide step's sequences, `packed`, where the step's tokens have theirs: `query`, and its strides.
EXPORT int tangram_unpack(const void* step_bytes, const void* wide_bytes, int index, void* stream) {
  const Step step = *static_cast<const Step*>(step_bytes);
  const Wide wide = *static_cast<const Wide*>(wide_bytes);
  if (wide.count == 0 || step.kv_heads == 0) return cudaSuccess;
  std::lock_guard<std::mutex> guard(mutex);
  Device* device;
  const cudaError_t error = select(index, &device);
  if (error != cudaSuccess) return error;
  const dim3 packs(ceil_div(wide.most_tokens, kPackedTokens), wide.segment_count);
  pack_kernel<Element, kSize, true>
      <<<packs, kWideThreads, 0, static_cast<cudaStream_t>(stream)>>>(step, wide, const_cast<char*>(wide.query));
  return cudaGetLastError();
}

// How much workspace attention needs on a device: bytes of partial sums, number of counters, numbers of a plan, and
// bytes for its pieces.
EXPORT int tangram_workspace(int index, int64_t* sizes) {
  std::lock_guard<std::mutex> guard(mutex);
  Device* device;
  cudaError_t error = select(index, &device);
  if (error == cudaSuccess)
    error = fit(prefill_kernel<Element, kSize>, Prefill<Element, kSize>::kThreads,
                Prefill<Element, kSize>::kSharedBytes, &device->prefill);
  if (error != cudaSuccess) return error;
  const int64_t decoding = static_cast<int64_t>(kMostBlocks) * Decode<Element, kSize>::kSlotFloats;
  const int64_t prefilling = static_cast<int64_t>(device->prefill.blocks) * Prefill<Element, kSize>::kSlotFloats;
  sizes[0] = device->processors * 2 * sizeof(float) * (decoding > prefilling ? decoding : prefilling);
  sizes[1] = static_cast<int64_t>(device->processors) * kMostBlocks;
  sizes[2] = kMostPieces;
  sizes[3] = kMostPieces * sizeof(Piece);
  return cudaSuccess;
}

EXPORT const char* tangram_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
