// The kernels of dampen.native: random masks, inverted dropout, attention that hides keys on the way, and penalties.
//
// Plain C functions on raw pointers, called through ctypes: no header of torch, so it compiles in seconds and needs no
// particular version. `library.py` hashes this file and every header beside it.
#include "attention.h"
#include "penalty.h"
#include "random.h"

extern "C" {

void dampen_start(void* gemm) { sgemm = (Gemm)gemm; }

// y = x * keep / (1 - rate); the backward is the same call on the gradient
void dampen_dropout(const float* x, float* y, i64 size, double rate, u64 seed, i64 threads) {
  const u32 thr = threshold(rate, seed);
  const float scale = (float)(1 / (1 - rate));
  const i64 block = 4096, blocks = (size + block - 1) / block;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
  {
    std::vector<u16> room;
#pragma omp for schedule(static)
    for (i64 t = 0; t < blocks; t++) {
      const i64 start = t * block, n = std::min(block, size - start);
      const u16* draw = draws(seed, FEATURES, 0, (u64)start, (u64)n, room);
      const float* in = x + start;
      float* out = y + start;
#pragma omp simd
      for (i64 j = 0; j < n; j++) out[j] = draw[j] < thr ? 0.f : in[j] * scale;
    }
  }
}

// The factors of inverted dropout, 0 or 1 / (1 - rate): what `dampen_dropout` multiplies by under the same seed
void dampen_factors(float* out, i64 size, double rate, u64 seed) {
  const u32 thr = threshold(rate, seed);
  const float scale = (float)(1 / (1 - rate));
  constexpr i64 block = 1024;
  std::vector<u16> room;
  for (i64 start = 0; start < size; start += block) {
    const i64 n = std::min(block, size - start);
    const u16* draw = draws(seed, FEATURES, 0, (u64)start, (u64)n, room);
#pragma omp simd
    for (i64 j = 0; j < n; j++) out[start + j] = draw[j] < thr ? 0.f : scale;
  }
}

// Which keys of a (slabs, N, M) matrix attention hides under the same seed: for tests and for the battery
void dampen_mask(u8* hidden, i64 slabs, i64 N, i64 M, double rate, u64 seed) {
  const u32 thr = threshold(rate, seed);
  std::vector<u16> room;
  for (i64 slab = 0; slab < slabs; slab++)
    for (i64 i = 0; i < N; i++) {
      const u16* draw = draws(seed, KEYS, slab, (u64)i * M, (u64)M, room);
      u8* row = hidden + (slab * N + i) * M;
      i64 kept = 0;
      for (i64 j = 0; j < M; j++) row[j] = draw[j] < thr, kept += !row[j];
      if (!kept && M) row[((u64)word(seed, GUARD, 0, slab * N + i) * (u64)M) >> 32] = 0;
    }
}

void dampen_draws(u16* out, i64 count, u64 seed, i64 stream, u64 slab) {
  std::vector<u16> room;
  const u16* d = draws(seed, (u32)stream, slab, 0, (u64)count, room);
  std::memcpy(out, d, sizeof(u16) * count);
}
}
