// The kernels of dampen.native: random masks, inverted dropout, attention that hides keys on the way, and penalties.
//
// Plain C functions on raw pointers, called through ctypes: no header of torch, so it compiles in seconds and needs no
// particular version. `library.py` hashes this file and every header beside it.
#include "attention.h"
#include "penalty.h"
#include "random.h"

extern "C" {

// Takes the single-precision product of matrices. Null, or what this processor lacks of what the compiler has used.
const char* dampen_start(void* gemm) {
  sgemm = (Gemm)gemm;
#if defined(__x86_64__)
  __builtin_cpu_init();
#define NEEDS(name) \
  if (!__builtin_cpu_supports(name)) return "the processor has no " name
#ifdef __AVX__
  NEEDS("avx");
#endif
#ifdef __AVX2__
  NEEDS("avx2");
#endif
#ifdef __FMA__
  NEEDS("fma");
#endif
#ifdef __BMI2__
  NEEDS("bmi2");
#endif
#ifdef __AVX512F__
  NEEDS("avx512f");
#endif
#ifdef __AVX512BW__
  NEEDS("avx512bw");
#endif
#ifdef __AVX512DQ__
  NEEDS("avx512dq");
#endif
#ifdef __AVX512VL__
  NEEDS("avx512vl");
#endif
#endif
  return nullptr;
}

// y = x * keep / (1 - rate); the backward is the same call on the gradient
const char* dampen_dropout(const float* x, i64 room_x, float* y, i64 room_y, i64 size, double rate, u64 seed, i64 threads) {
  if (auto bad = bad_rate(rate)) return bad;
  if (auto bad = bad_strided(x, {size}, {1}, room_x)) return bad;
  if (auto bad = bad_strided(y, {size}, {1}, room_y)) return bad;
  if (threads < 1 || threads > 4096) return "a number of threads outside 1 to 4096";
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
  return nullptr;
}

// The factors of inverted dropout, 0 or 1 / (1 - rate): what `dampen_dropout` multiplies by under the same seed
const char* dampen_factors(float* out, i64 room_out, i64 size, double rate, u64 seed) {
  if (auto bad = bad_rate(rate)) return bad;
  if (auto bad = bad_strided(out, {size}, {1}, room_out)) return bad;
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
  return nullptr;
}

// Which keys of a (slabs, N, M) matrix attention hides under the same seed: for tests and for the battery
const char* dampen_mask(u8* hidden, i64 room_hidden, i64 slabs, i64 N, i64 M, double rate, u64 seed) {
  if (auto bad = bad_rate(rate)) return bad;
  if (slabs < 0 || N < 0 || M < 0 || std::max({slabs, N, M}) > LARGEST) return "a size below 0 or above 2^31";
  if (slabs && N && M)
    if (auto bad = bad_strided(hidden, {slabs, N * M}, {N * M, 1}, room_hidden)) return bad;
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
  return nullptr;
}

const char* dampen_draws(u16* out, i64 room_out, i64 count, u64 seed, i64 stream, u64 slab) {
  if (stream < KEYS || stream > FEATURES) return "an unknown stream of draws";
  if (auto bad = bad_strided(out, {count}, {1}, room_out)) return bad;
  std::vector<u16> room;
  const u16* d = draws(seed, (u32)stream, slab, 0, (u64)count, room);
  std::memcpy(out, d, sizeof(u16) * count);
  return nullptr;
}
}
