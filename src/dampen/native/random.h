// Random numbers: Philox4x32-10 (Salmon et al., SC 2011), a function of (seed, stream, slab, index) alone.
#pragma once
#include "vectors.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16, CHUNK = 8 * LANES;  // a chunk is 128 draws of 16 bits

// the draws of one chunk: draw[128] for counters (chunk * 16 + lane, slab, stream)
#if defined(__AVX512F__) && defined(__AVX512BW__)
// Eight lanes in the low halves of 64-bit words: a product reads those alone, so what stands above is never cleared
struct State {
  __m512i a, b, c, d;
};
inline void round_of(State& x, __m512i k0, __m512i k1) {
  const __m512i p = _mm512_mul_epu32(x.a, _mm512_set1_epi64(0xD2511F53u));
  const __m512i q = _mm512_mul_epu32(x.c, _mm512_set1_epi64(0xCD9E8D57u));
  x.a = _mm512_ternarylogic_epi64(_mm512_srli_epi64(q, 32), x.b, k0, 0x96);  // exclusive or of three
  x.c = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p, 32), x.d, k1, 0x96);
  x.b = q, x.d = p;
}
inline void put(u16* draw, __m512i x, __m512i y) {  // 16 words: their low halves, then their high ones
  _mm_storeu_si128((__m128i*)draw, _mm512_cvtepi64_epi16(x));
  _mm_storeu_si128((__m128i*)(draw + 8), _mm512_cvtepi64_epi16(y));
  _mm_storeu_si128((__m128i*)(draw + LANES), _mm512_cvtepi64_epi16(_mm512_srli_epi64(x, 16)));
  _mm_storeu_si128((__m128i*)(draw + LANES + 8), _mm512_cvtepi64_epi16(_mm512_srli_epi64(y, 16)));
}
void philox_chunk(u64 seed, u32 stream, u64 slab, u64 chunk, u16* draw) {
  const __m512i first = _mm512_add_epi64(_mm512_set1_epi64(chunk * LANES), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
  const __m512i second = _mm512_add_epi64(first, _mm512_set1_epi64(8)), in = _mm512_set1_epi64((u64)(stream << 24));
  const __m512i c = _mm512_set1_epi64(slab), d = _mm512_set1_epi64(slab >> 32);
  State x = {first, _mm512_xor_si512(_mm512_srli_epi64(first, 32), in), c, d};
  State y = {second, _mm512_xor_si512(_mm512_srli_epi64(second, 32), in), c, d};
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const __m512i key0 = _mm512_set1_epi64(k0), key1 = _mm512_set1_epi64(k1);
    round_of(x, key0, key1);
    round_of(y, key0, key1);
  }
  put(draw, x.a, y.a), put(draw + 2 * LANES, x.b, y.b);
  put(draw + 4 * LANES, x.c, y.c), put(draw + 6 * LANES, x.d, y.d);
}
#else
void philox_chunk(u64 seed, u32 stream, u64 slab, u64 chunk, u16* draw) {
  u32 a[LANES], b[LANES], c[LANES], d[LANES];
  for (int l = 0; l < LANES; l++) {
    const u64 counter = chunk * LANES + l;
    a[l] = (u32)counter;
    b[l] = (u32)(counter >> 32) ^ (stream << 24);
    c[l] = (u32)slab;
    d[l] = (u32)(slab >> 32);
  }
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
  for (int round = 0; round < 10; round++) {
#pragma omp simd
    for (int l = 0; l < LANES; l++) {
      const u64 p = (u64)0xD2511F53u * a[l], q = (u64)0xCD9E8D57u * c[l];
      const u32 na = (u32)(q >> 32) ^ b[l] ^ k0, nc = (u32)(p >> 32) ^ d[l] ^ k1;
      b[l] = (u32)q;
      d[l] = (u32)p;
      a[l] = na;
      c[l] = nc;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
#pragma omp simd
  for (int l = 0; l < LANES; l++) {
    draw[l] = (u16)a[l], draw[LANES + l] = (u16)(a[l] >> 16);
    draw[2 * LANES + l] = (u16)b[l], draw[3 * LANES + l] = (u16)(b[l] >> 16);
    draw[4 * LANES + l] = (u16)c[l], draw[5 * LANES + l] = (u16)(c[l] >> 16);
    draw[6 * LANES + l] = (u16)d[l], draw[7 * LANES + l] = (u16)(d[l] >> 16);
  }
}
#endif

enum Stream : u32 { KEYS = 0, GUARD = 1, DITHER = 2, FEATURES = 3 };

// 16-bit draws with the numbers start .. start + count of a slab; `room` grows as needed
const u16* draws(u64 seed, u32 stream, u64 slab, u64 start, u64 count, std::vector<u16>& room) {
  const u64 first = start / CHUNK, last = count ? (start + count - 1) / CHUNK : first;
  const u64 size = (last - first + 1) * CHUNK;
  if (room.size() < size + 8) room.resize(size + 8);  // a row's last eight may be read past its end
  for (u64 c = first; c <= last; c++) philox_chunk(seed, stream, slab, c, room.data() + (c - first) * CHUNK);
  return room.data() + (start - first * CHUNK);
}

// 32 bits with the number `index` of a slab
u32 word(u64 seed, u32 stream, u64 slab, u64 index) {
  u16 d[CHUNK];
  philox_chunk(seed, stream, slab, index / LANES, d);
  return (u32)d[index % LANES] << 16 | d[LANES + index % LANES];
}

// draws below this are dropped; one uniform number per call dithers it, so that the rate is exact in the mean
u32 threshold(double rate, u64 seed) {
  return (u32)std::floor(rate * 65536 + word(seed, DITHER, 0, 0) / 4294967296.0);
}

}  // namespace
