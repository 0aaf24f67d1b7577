// Tokens in shared memory: keys and values side by side as in the pool, in an order free of bank conflicts.
#pragma once

#include "mma.cuh"
#include "step.cuh"

namespace tangram {

template <typename T, int D>
struct Tile {
  static constexpr int kTokenBytes = 2 * D * sizeof(T);
  static constexpr int kPieces = kTokenBytes / 16;  // of 16 bytes, of one token
  static constexpr int kUnitBytes = kUnit * kTokenBytes;
  static_assert(kPieces % 8 == 0, "a token's pieces are swizzled in groups of eight");

  // Where piece `piece` of a token lies. Eight tokens' equal pieces fall into different banks.
  static __device__ uint32_t at(int token, int piece) { return token * kTokenBytes + ((piece ^ (token & 7)) << 4); }

  // Start copying a unit into `target`, by one warp.
  static __device__ void copy_unit(uint32_t target, Span span) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kUnit * kPieces / kWarp; ++i) {
      const int index = i * kWarp + lane, token = index / kPieces;
      copy_async(target + at(token, index % kPieces), span.source + index * 16, token < span.valid);
    }
  }

  // The same, but the last token that exists is taken from elsewhere, and not read where it has its place.
  static __device__ void copy_unit(uint32_t target, Span span, const char* key, const char* value) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kUnit * kPieces / kWarp; ++i) {
      const int index = i * kWarp + lane, token = index / kPieces, piece = index % kPieces;
      const char* own = piece < kPieces / 2 ? key + piece * 16 : value + (piece - kPieces / 2) * 16;
      const char* source = token == span.valid - 1 ? own : span.source + index * 16;
      copy_async(target + at(token, piece), source, token < span.valid);
    }
  }

  // Write one token of a tile to memory, by one warp; to null: nothing.
  static __device__ void store_token(char* to, const char* tile, int token) {
    if (to == nullptr) return;
    for (int piece = threadIdx.x % kWarp; piece < kPieces; piece += kWarp)
      reinterpret_cast<uint4*>(to)[piece] = *reinterpret_cast<const uint4*>(tile + at(token, piece));
  }

  // The keys of 16 tokens, elements 16 k .. 16 k + 15, as two right operands: to[0..1] for the first 8 tokens.
  static __device__ void keys(uint32_t (&to)[4], uint32_t tile, int token, int k) {
    const int lane = threadIdx.x % kWarp;
    load_matrices(to, tile + at(token + (lane & 7) + (lane >> 4) * 8, 2 * k + (lane >> 3 & 1)));
  }
  // The values of 16 tokens, elements 16 n .. 16 n + 15: to[0..1] for the first 8 elements.
  static __device__ void values(uint32_t (&to)[4], uint32_t tile, int token, int n) {
    const int lane = threadIdx.x % kWarp;
    load_matrices_transposed(to, tile + at(token + (lane & 15), kPieces / 2 + 2 * n + (lane >> 4)));
  }
};

}  // namespace tangram
