// The kernels of dampen.native: random masks, inverted dropout, and attention that hides keys on the way.
//
// Plain C functions on raw pointers, called through ctypes: no header of torch, so it compiles in seconds and needs no
// particular version. The products of large matrices are done by the sgemm that libtorch brings, given at start.
//
// Letters: B batch, H heads, G key heads, N queries, M keys, D channels of a query, E channels of a value.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr int FEW = 8;           // largest scores that are found by insertion
using i64 = std::int64_t;
using u64 = std::uint64_t;
using u32 = std::uint32_t;
using u16 = std::uint16_t;
using u8 = std::uint8_t;

using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                      const int*, const float*, const int*, const float*, float*, const int*);
Gemm sgemm = nullptr;

// C (m x n) = alpha op(A) op(B) + beta C, column-major as in BLAS
void multiply(char ta, char tb, int m, int n, int k, float alpha, const float* a, i64 lda, const float* b, i64 ldb,
              float beta, float* c, i64 ldc) {
  const int la = (int)lda, lb = (int)ldb, lc = (int)ldc;
  sgemm(&ta, &tb, &m, &n, &k, &alpha, a, &la, b, &lb, &beta, c, &lc);
}

// --- a few numbers at a time ------------------------------------------------------------------------------------------

// Vectors by name, because not every compiler makes them of a loop over eight numbers
typedef float Four __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32)));
typedef float Sixteen __attribute__((vector_size(64)));
typedef std::int32_t EightInts __attribute__((vector_size(32)));
typedef u16 EightDraws __attribute__((vector_size(16)));

template <class V>
V load(const void* p) {
  V x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
template <class V>
void store(void* p, V x) {
  std::memcpy(p, &x, sizeof x);
}

float dot(const float* x, const float* y, int size) {
  Four sum = {};
  int j = 0;
  for (; j + 4 <= size; j += 4) sum += load<Four>(x + j) * load<Four>(y + j);
  float total = sum[0] + sum[1] + sum[2] + sum[3];
  for (; j < size; j++) total += x[j] * y[j];
  return total;
}

// --- products of small matrices, for which the call of a library takes longer than the product ------------------------

// C (R x T vectors) = alpha A (R x k) B (k x T vectors), or that added to C; row-major, A with any strides
template <class V, int T, int R>
void tile(int k, float alpha, const float* a, i64 row, i64 column, const float* b, i64 ldb, bool add, float* c, i64 ldc) {
  constexpr int W = sizeof(V) / sizeof(float);
  V sum[R][T] = {};
  for (int p = 0; p < k; p++)
    for (int t = 0; t < T; t++) {
      const V y = load<V>(b + p * ldb + t * W);
      for (int r = 0; r < R; r++) sum[r][t] += a[r * row + p * column] * y;
    }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) {
      float* out = c + r * ldc + t * W;
      store<V>(out, add ? load<V>(out) + alpha * sum[r][t] : alpha * sum[r][t]);
    }
}

template <class V, int T>
void panel(int n, int k, float alpha, const float* a, i64 row, i64 column, const float* b, i64 ldb, bool add, float* c,
           i64 ldc) {
  int i = 0;
  for (; i + 4 <= n; i += 4) tile<V, T, 4>(k, alpha, a + i * row, row, column, b, ldb, add, c + i * ldc, ldc);
  for (; i < n; i++) tile<V, T, 1>(k, alpha, a + i * row, row, column, b, ldb, add, c + i * ldc, ldc);
}

void small(int n, int m, int k, float alpha, const float* a, i64 row, i64 column, const float* b, i64 ldb, bool add,
           float* c, i64 ldc) {
  int j = 0;
  for (; j + 24 <= m; j += 24) panel<Eight, 3>(n, k, alpha, a, row, column, b + j, ldb, add, c + j, ldc);
  if (j + 16 <= m) panel<Eight, 2>(n, k, alpha, a, row, column, b + j, ldb, add, c + j, ldc), j += 16;
  if (j + 8 <= m) panel<Eight, 1>(n, k, alpha, a, row, column, b + j, ldb, add, c + j, ldc), j += 8;
  if (j + 4 <= m) panel<Four, 1>(n, k, alpha, a, row, column, b + j, ldb, add, c + j, ldc), j += 4;
  for (; j < m; j++) panel<float, 1>(n, k, alpha, a, row, column, b + j, ldb, add, c + j, ldc);
}

// the transpose of (rows x columns), its rows `width` apart with zeros at their ends
void turn(int rows, int columns, const float* in, i64 ld, float* out, int width) {
  for (int j = 0; j < columns; j++) {
    for (int i = 0; i < rows; i++) out[(i64)j * width + i] = in[i * ld + j];
    for (int i = rows; i < width; i++) out[(i64)j * width + i] = 0;
  }
}

constexpr i64 SMALL = 64;  // keys and channels up to which the products are those above
constexpr i64 FORWARD = 1 << 17;  // scores of a block of queries in the forward, which holds whole rows
constexpr i64 ROWS = 256, KEYS_WHOLE = 512, KEYS_PART = 256;  // of a block in the backward

// --- random numbers: Philox4x32-10 (Salmon et al., SC 2011), a function of (seed, stream, slab, index) alone ----------

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

// --- one row of scores ------------------------------------------------------------------------------------------------

// exp(x) for x <= 0 to 2 ulp (Cephes); 0 below -87, so also at -inf
inline float exponential(float x) {
  const float z = x < -87.0f ? -87.0f : x;
  const float n = std::floor(z * 1.44269504088896341f + 0.5f);
  float r = z - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const std::int32_t bits = ((std::int32_t)n + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return x < -87.0f ? 0.0f : p * power;
}

inline Eight exponential(Eight x) {
  const Eight z = x < -87.0f ? Eight{} - 87.0f : x;
  const EightInts whole = __builtin_convertvector(z * 1.44269504088896341f - 0.5f, EightInts);  // z <= 0: to the nearest
  const Eight n = __builtin_convertvector(whole, Eight);
  Eight r = z - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Eight p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const EightInts power = (whole + 127) << 23;
  return x < -87.0f ? Eight{} : p * (Eight)power;
}

// -inf from place m to the end of a row, in one piece: single numbers would not be at hand when the row is read again
void close_row(float* s, int m, int end) {
  if (m == end) return;
  const EightInts place = {0, 1, 2, 3, 4, 5, 6, 7};
  store(s + end - 8, place >= m - (end - 8) ? Eight{} - INF : load<Eight>(s + end - 8));
}

float largest_of(const float* s, int m) {
  float largest = -INF;
  int j = 0;
  if (m >= 8) {
    Eight most = load<Eight>(s);
    for (j = 8; j + 8 <= m; j += 8) {
      const Eight x = load<Eight>(s + j);
      most = most > x ? most : x;
    }
    for (int l = 0; l < 8; l++) largest = std::max(largest, most[l]);
  }
  for (; j < m; j++) largest = std::max(largest, s[j]);
  return largest;
}

// s <- exp(s - largest). Their sum.
float weigh(float* s, int m, float largest) {
  Eight sums = {};
  float total = 0;
  int j = 0;
  for (; j + 8 <= m; j += 8) {
    const Eight e = exponential(load<Eight>(s + j) - largest);
    store(s + j, e);
    sums += e;
  }
  for (int l = 0; l < 8; l++) total += sums[l];
  for (; j < m; j++) total += s[j] = exponential(s[j] - largest);
  return total;
}

// s <- exp(s - lse), the weights; d <- their scores' gradient, from that of the weights and `own`, its mean
void differentiate(float* s, float* d, int m, float lse, float own, float scale) {
  int j = 0;
  for (; j + 8 <= m; j += 8) {
    const Eight e = exponential(load<Eight>(s + j) - lse);
    store(s + j, e);
    store(d + j, e * (load<Eight>(d + j) - own) * scale);
  }
  for (; j < m; j++) {
    s[j] = exponential(s[j] - lse);
    d[j] = s[j] * (d[j] - own) * scale;
  }
}

int count_from(const float* s, int M, float t) {
  int c = 0;
#pragma omp simd reduction(+ : c)
  for (int j = 0; j < M; j++) c += s[j] >= t;
  return c;
}

// A threshold that the k largest of s reach, and with them whatever ties with the k-th. It lies between the k-th and the
// next, so the rounding of scores that are computed again in the backward does not move a key across it.
float top_threshold(const float* s, int M, int k) {
  if (k > 0 && k <= FEW && M <= 256) {  // the k + 1 largest, falling, by insertion
    float best[FEW + 1];
    std::fill(best, best + k + 1, -INF);
    for (int j = 0; j < M; j++) {
      const float x = s[j];
      if (!(x > best[k])) continue;
      int i = k;
      for (; i > 0 && best[i - 1] < x; i--) best[i] = best[i - 1];
      best[i] = x;
    }
    if (best[0] == -INF) return INF;
    if (best[k] == -INF) return best[k - 1] > -INF ? best[k - 1] : *std::min_element(best, best + k, [](float a, float b) {
      return (a > -INF ? a : INF) < (b > -INF ? b : INF);
    });
    const float middle = 0.5f * best[k - 1] + 0.5f * best[k];
    return middle > best[k] ? middle : best[k - 1];  // neighbors, or a tie
  }
  float low = INF, high = -INF;
#pragma omp simd reduction(min : low) reduction(max : high)
  for (int j = 0; j < M; j++) {
    low = s[j] > -INF && s[j] < low ? s[j] : low;
    high = s[j] > high ? s[j] : high;
  }
  if (k <= 0 || high == -INF) return INF;
  int at_low = count_from(s, M, low), at_high = 0;
  high = std::nextafter(high, INF);
  if (at_low <= k) return low;
  for (int step = 0; step < 64; step++) {  // at_low > k > at_high always holds
    const float share = (at_low - k + 0.5f) / (float)(at_low - at_high);
    float t = step % 3 == 2 ? 0.5f * low + 0.5f * high : low + (high - low) * share;
    if (!(t > low && t < high)) t = 0.5f * low + 0.5f * high;
    if (!(t > low && t < high)) return low;  // neighbors: the k-th ties with others
    const int c = count_from(s, M, t);
    if (c == k) return t;
    if (c > k) low = t, at_low = c;
    else high = t, at_high = c;
  }
  return low;
}

// For each of up to 16 rows of M numbers, `ld` apart, a threshold as `top_threshold` gives it for the K largest; `turned`
// has room for the rows by columns
template <int K>
void thresholds(const float* s, i64 ld, int M, int rows, float* turned, float* limit) {
  for (int l = 0; l < rows; l++)
    for (int j = 0; j < M; j++) turned[j * 16 + l] = s[l * ld + j];
  Sixteen best[K + 1];
  for (int i = 0; i <= K; i++) best[i] = Sixteen{} - INF;
  for (int j = 0; j < M; j++) {
    Sixteen x = load<Sixteen>(turned + j * 16);
    for (int i = 0; i <= K; i++) {
      const Sixteen high = best[i] > x ? best[i] : x;
      x = best[i] > x ? x : best[i];
      best[i] = high;
    }
  }
  for (int l = 0; l < rows; l++) {
    const float kth = best[K - 1][l], next = best[K][l], middle = 0.5f * kth + 0.5f * next;
    limit[l] = next == -INF ? -std::numeric_limits<float>::max() : middle > next ? middle : kth;
  }
}
using Thresholds = void (*)(const float*, i64, int, int, float*, float*);
constexpr Thresholds THRESHOLDS[FEW] = {thresholds<1>, thresholds<2>, thresholds<3>, thresholds<4>,
                                        thresholds<5>, thresholds<6>, thresholds<7>, thresholds<8>};

}  // namespace

extern "C" {

struct Problem {
  i64 B, H, G, N, M, D, E, threads, mode, causal, share_num, share_den;  // mode: 0 plain, 1 DropKey, 2 hard masking
  double scale, rate;
  u64 seed;
  const float *q, *k, *v, *go;
  const u8* mask;  // True may be seen; null: all
  float *o, *lse, *top, *dq, *dk, *dv;
  i64 sq[3], sk[3], sv[3], so[3], sgo[3], sdq[3], sdk[3], sdv[3], smask[4];
};

void dampen_start(void* gemm) { sgemm = (Gemm)gemm; }
}

namespace {

const float* at(const float* p, const i64* s, i64 b, i64 h, i64 n) { return p + b * s[0] + h * s[1] + n * s[2]; }
float* at(float* p, const i64* s, i64 b, i64 h, i64 n) { return p + b * s[0] + h * s[1] + n * s[2]; }

// What the model shows of the keys j0 .. j0 + m to the query i: the others become -inf. How many are seen.
int show(const Problem& p, i64 b, i64 h, i64 i, i64 j0, int m, float* s) {
  if (!p.mask && !p.causal) return m;
  const u8* mask = p.mask ? p.mask + b * p.smask[0] + h * p.smask[1] + i * p.smask[2] + j0 * p.smask[3] : nullptr;
  const i64 last = p.causal ? i - j0 : m;  // keys up to this one are in the past
  int seen = 0;
  for (int j = 0; j < m; j++) {
    const bool sees = (!mask || mask[j * p.smask[3]]) && j <= last;
    s[j] = sees ? s[j] : -INF;
    seen += sees;
  }
  return seen;
}

// Drop the keys that are drawn and whose scores reach `limit`. The largest score that is left.
float drop(const u16* draw, u32 thr, float limit, int m, float* s) {
  Eight most = Eight{} - INF;
  float largest = -INF;
  int j = 0;
  for (; j + 8 <= m; j += 8) {
    const EightInts number = __builtin_convertvector(load<EightDraws>(draw + j), EightInts);
    const Eight x = load<Eight>(s + j), y = (number < (int)thr) & (x >= limit) ? Eight{} - INF : x;
    store(s + j, y);
    most = most > y ? most : y;
  }
  for (int l = 0; l < 8; l++) largest = std::max(largest, most[l]);
  for (; j < m; j++) {
    s[j] = (u32)draw[j] < thr && s[j] >= limit ? -INF : s[j];
    largest = std::max(largest, s[j]);
  }
  return largest;
}

// The key that a row keeps which would have lost all the keys that it sees: one of them, at random.
i64 rescued(const Problem& p, i64 b, i64 h, i64 i) {
  const u8* mask = p.mask ? p.mask + b * p.smask[0] + h * p.smask[1] + i * p.smask[2] : nullptr;
  auto sees = [&](i64 j) { return (!mask || mask[j * p.smask[3]]) && (!p.causal || j <= i); };
  i64 seen = 0;
  for (i64 j = 0; j < p.M; j++) seen += sees(j);
  i64 rank = (i64)(((u64)word(p.seed, GUARD, 0, (b * p.H + h) * p.N + i) * (u64)seen) >> 32);
  for (i64 j = 0; j < p.M; j++)
    if (sees(j) && rank-- == 0) return j;
  return 0;
}

// How many of the largest scores hard masking means where all keys are seen; 0: rows differ, or they are too many for
// `THRESHOLDS`
int few_largest(const Problem& p) {
  if (p.mode != 2 || p.mask || p.causal) return 0;
  const i64 k = p.share_den ? (p.M * p.share_num + p.share_den - 1) / p.share_den : std::min(p.share_num, p.M);
  return k <= FEW && p.M <= 256 ? (int)k : 0;
}

// Hide keys of a whole row: what the model hides, then what is drawn. False where the row was rescued: then one key is
// left, with a finite score. `top`: where hard masking keeps its threshold, which may be `known` already. `largest`: of
// the scores that are left.
bool hide(const Problem& p, u32 thr, i64 b, i64 h, i64 i, float* s, int width, const u16* draw, float* top, bool known,
          float& largest) {
  const int M = (int)p.M, seen = show(p, b, h, i, 0, M, s);
  if (!p.mode || !seen) {
    largest = seen ? largest_of(s, width) : -INF;
    return true;
  }
  if (p.mode == 2 && !known) {
    const i64 k = p.share_den ? (seen * p.share_num + p.share_den - 1) / p.share_den : std::min<i64>(p.share_num, seen);
    *top = top_threshold(s, M, (int)k);
  }
  largest = drop(draw, thr, p.mode == 2 ? *top : -INF, width, s);
  if (largest > -INF) return true;
  s[rescued(p, b, h, i)] = largest = 0;
  return false;
}

// Queries and keys at a time. A block of scores stays in the cache next to the processor: the forward holds whole rows,
// because a threshold and a guard need them; the backward knows both from the forward, and takes the keys in parts.
int even(i64 whole, i64 most) {  // parts of nearly equal size
  const i64 parts = (whole + most - 1) / most;
  return parts ? (int)((whole + parts - 1) / parts) : 0;
}
int forward_rows(const Problem& p) { return even(p.N, std::clamp<i64>(FORWARD / std::max<i64>(1, p.M), 16, 128)); }
int backward_rows(const Problem& p) { return even(p.N, p.M <= SMALL ? 128 : ROWS); }
int backward_keys(const Problem& p) { return p.M <= KEYS_WHOLE ? (int)p.M : KEYS_PART; }

}  // namespace

extern "C" {

void dampen_attention(const Problem* problem) {
  const Problem& p = *problem;
  const int bq = forward_rows(p), M = (int)p.M, D = (int)p.D, E = (int)p.E;
  const i64 blocks = bq ? (p.N + bq - 1) / bq : 0, tasks = p.B * p.H * blocks;
  const u32 thr = threshold(p.rate, p.seed);
  const bool is_small = std::max({p.M, p.D, p.E}) <= SMALL;
  const int few = few_largest(p);
  const int ld = is_small ? (M + 7) / 8 * 8 : M;  // rows with room at their ends: no loop has a remainder
#pragma omp parallel num_threads((int)p.threads) if (p.threads > 1)
  {
    std::vector<float> scores((size_t)bq * ld), turned(is_small ? (size_t)ld * D : 0), columns((size_t)(few ? 16 * M : 0));
    std::vector<float> inverse((size_t)bq);
    std::vector<u16> room;
#pragma omp for schedule(static)
    for (i64 task = 0; task < tasks; task++) {
      const i64 bh = task / blocks, b = bh / p.H, h = bh % p.H, g = h * p.G / p.H, i0 = (task % blocks) * bq;
      const int n = (int)std::min<i64>(bq, p.N - i0);
      float* out = at(p.o, p.so, b, h, i0);
      const float *q = at(p.q, p.sq, b, h, i0), *k = at(p.k, p.sk, b, g, 0), *v = at(p.v, p.sv, b, g, 0);
      if (is_small) {
        turn(M, D, k, p.sk[2], turned.data(), ld);
        small(n, ld, D, (float)p.scale, q, p.sq[2], 1, turned.data(), ld, false, scores.data(), ld);
      } else {
        multiply('T', 'N', M, n, D, (float)p.scale, k, p.sk[2], q, p.sq[2], 0.f, scores.data(), M);
      }
      // short rows share one call; the draws of a long one are made when its scores are at hand
      const u16* drawn = p.mode && is_small ? draws(p.seed, KEYS, bh, (u64)i0 * M, (u64)n * M, room) : nullptr;
      float* top = p.top ? p.top + bh * p.N + i0 : nullptr;
      for (int i = 0; few && i < n; i += 16)
        THRESHOLDS[few - 1](scores.data() + (size_t)i * ld, ld, M, std::min(16, n - i), columns.data(), top + i);
      for (int i = 0; i < n; i++) {
        float* s = scores.data() + (size_t)i * ld;
        const i64 row = bh * p.N + i0 + i;
        close_row(s, M, ld);
        const u16* draw = drawn ? drawn + (size_t)i * M : p.mode ? draws(p.seed, KEYS, bh, (u64)(i0 + i) * M, M, room) : nullptr;
        float largest;
        const bool usual = hide(p, thr, b, h, i0 + i, s, ld, draw, top ? top + i : nullptr, few > 0, largest);
        if (largest == -INF) {  // the model shows this query nothing: zeros, as SDPA gives
          std::memset(s, 0, sizeof(float) * ld);
          p.lse[row] = INF;
          inverse[i] = 0;
          continue;
        }
        const float total = weigh(s, ld, largest);
        inverse[i] = 1 / total;
        p.lse[row] = usual ? largest + std::log(total) : -INF;  // -inf: see `rescued`
      }
      if (is_small) small(n, E, M, 1.f, scores.data(), ld, 1, v, p.sv[2], false, out, p.so[2]);
      else multiply('N', 'N', E, n, M, 1.f, v, p.sv[2], scores.data(), M, 0.f, out, p.so[2]);
      for (int i = 0; i < n; i++)  // the sums divide the output, which has fewer numbers than the weights
        for (int e = 0; e < E; e++) out[i * p.so[2] + e] *= inverse[i];
    }
  }
}

void dampen_attention_backward(const Problem* problem) {
  const Problem& p = *problem;
  const int bq = backward_rows(p), bk = backward_keys(p), D = (int)p.D, E = (int)p.E, shared = (int)(p.H / p.G);
  const u32 thr = threshold(p.rate, p.seed);
  const i64 tasks = p.B * p.G;  // heads that share a key add to its gradient one after the other
  const float scale = (float)p.scale;
  const bool is_small = std::max({p.M, p.D, p.E}) <= SMALL;
  const int ld = is_small ? (bk + 7) / 8 * 8 : bk;
#pragma omp parallel num_threads((int)p.threads) if (p.threads > 1)
  {
    std::vector<float> weights((size_t)bq * ld), back((size_t)bq * ld), own((size_t)bq);
    std::vector<float> turned_k(is_small ? (size_t)ld * D : 0), turned_v(is_small ? (size_t)ld * E : 0);
    std::vector<u16> room;
#pragma omp for schedule(static)
    for (i64 task = 0; task < tasks; task++) {
      const i64 b = task / p.G, g = task % p.G;
      if (is_small) {
        turn((int)p.M, D, at(p.k, p.sk, b, g, 0), p.sk[2], turned_k.data(), ld);
        turn((int)p.M, E, at(p.v, p.sv, b, g, 0), p.sv[2], turned_v.data(), ld);
      }
      bool more = false;  // whether dk and dv hold something to add to
      for (i64 h = g * shared; h < (g + 1) * shared; h++)
        for (i64 i0 = 0; i0 < p.N; i0 += bq, more = true) {
          const int n = (int)std::min<i64>(bq, p.N - i0);
          const i64 bh = b * p.H + h;
          const float *q = at(p.q, p.sq, b, h, i0), *go = at(p.go, p.sgo, b, h, i0), *o = at(p.o, p.so, b, h, i0);
          float* dq = at(p.dq, p.sdq, b, h, i0);
          for (int i = 0; i < n; i++) own[i] = dot(go + i * p.sgo[2], o + i * p.so[2], E);
          const u16* drawn = p.mode && bk == p.M ? draws(p.seed, KEYS, bh, (u64)i0 * bk, (u64)n * bk, room) : nullptr;
          for (i64 j0 = 0; j0 < p.M; j0 += bk) {
            const int m = (int)std::min<i64>(bk, p.M - j0);
            if (p.causal && more && j0 > i0 + n - 1) break;  // all of it in the future, and dk and dv hold something
            const float *k = at(p.k, p.sk, b, g, j0), *v = at(p.v, p.sv, b, g, j0);
            float *dk = at(p.dk, p.sdk, b, g, j0), *dv = at(p.dv, p.sdv, b, g, j0);
            if (is_small) {
              small(n, ld, D, scale, q, p.sq[2], 1, turned_k.data(), ld, false, weights.data(), ld);
              small(n, ld, E, 1.f, go, p.sgo[2], 1, turned_v.data(), ld, false, back.data(), ld);
            } else {
              multiply('T', 'N', m, n, D, scale, k, p.sk[2], q, p.sq[2], 0.f, weights.data(), ld);
              multiply('T', 'N', m, n, E, 1.f, v, p.sv[2], go, p.sgo[2], 0.f, back.data(), ld);
            }
            const int width = is_small ? ld : m;
            for (int i = 0; i < n; i++) {
              float *s = weights.data() + (size_t)i * ld, *d = back.data() + (size_t)i * ld;
              const i64 row = bh * p.N + i0 + i;
              const float lse = p.lse[row], mine = own[i];
              if (lse == -INF) {  // a single key of weight 1, whose score has no gradient
                const i64 j = rescued(p, b, h, i0 + i) - j0;
                std::memset(s, 0, sizeof(float) * width);
                std::memset(d, 0, sizeof(float) * width);
                if (j >= 0 && j < m) s[j] = 1;
                continue;
              }
              show(p, b, h, i0 + i, j0, m, s);
              close_row(s, m, width);
              if (p.mode) {
                const u16* draw =
                    drawn ? drawn + (size_t)i * bk : draws(p.seed, KEYS, bh, (u64)(i0 + i) * p.M + j0, (u64)m, room);
                drop(draw, thr, p.mode == 2 ? p.top[row] : -INF, width, s);
              }
              differentiate(s, d, width, lse, mine, scale);
            }
            if (is_small) {
              small(m, E, n, 1.f, weights.data(), 1, ld, go, p.sgo[2], more, dv, p.sdv[2]);
              small(m, D, n, 1.f, back.data(), 1, ld, q, p.sq[2], more, dk, p.sdk[2]);
              small(n, D, m, 1.f, back.data(), ld, 1, k, p.sk[2], j0 > 0, dq, p.sdq[2]);
            } else {
              multiply('N', 'T', E, m, n, 1.f, go, p.sgo[2], weights.data(), ld, more, dv, p.sdv[2]);
              multiply('N', 'T', D, m, n, 1.f, q, p.sq[2], back.data(), ld, more, dk, p.sdk[2]);
              multiply('N', 'N', D, n, m, 1.f, k, p.sk[2], back.data(), ld, j0 > 0, dq, p.sdq[2]);
            }
          }
        }
    }
  }
}

// --- the penalty of a linear map --------------------------------------------------------------------------------------

// A tensor (slabs, groups, rows, size) with a bias (groups, size) in it, or none; numbers of a row side by side
struct Tapped {
  i64 slabs, groups, rows, size;
  const float *y, *bias, *through;
  float* out;
  i64 sy[3], st[3], so[3];
  double scale;
};

// total[0] = sum ||y - bias||^2, r (groups, size) = sum (y - bias)
void dampen_tap(const Tapped* tapped, float* total, float* r) {
  const Tapped& t = *tapped;
  double sum = 0;
  std::memset(r, 0, sizeof(float) * t.groups * t.size);
  for (i64 s = 0; s < t.slabs; s++)
    for (i64 g = 0; g < t.groups; g++) {
      float* to = r + g * t.size;
      const float* bias = t.bias ? t.bias + g * t.size : nullptr;
      for (i64 i = 0; i < t.rows; i++) {
        const float* y = t.y + s * t.sy[0] + g * t.sy[1] + i * t.sy[2];
        float part = 0;
        if (bias) {
#pragma omp simd reduction(+ : part)
          for (i64 j = 0; j < t.size; j++) {
            const float d = y[j] - bias[j];
            part += d * d;
            to[j] += d;
          }
        } else {
#pragma omp simd reduction(+ : part)
          for (i64 j = 0; j < t.size; j++) part += y[j] * y[j];
        }
        sum += part;
      }
    }
  total[0] = (float)sum;
}

// out = through + scale (y - bias)
void dampen_tap_backward(const Tapped* tapped) {
  const Tapped& t = *tapped;
  const float scale = (float)t.scale;
  for (i64 s = 0; s < t.slabs; s++)
    for (i64 g = 0; g < t.groups; g++)
      for (i64 i = 0; i < t.rows; i++) {
        const float* y = t.y + s * t.sy[0] + g * t.sy[1] + i * t.sy[2];
        const float* through = t.through + s * t.st[0] + g * t.st[1] + i * t.st[2];
        const float* bias = t.bias ? t.bias + g * t.size : nullptr;
        float* out = t.out + s * t.so[0] + g * t.so[1] + i * t.so[2];
        if (bias) {
#pragma omp simd
          for (i64 j = 0; j < t.size; j++) out[j] = through[j] + scale * (y[j] - bias[j]);
        } else {
#pragma omp simd
          for (i64 j = 0; j < t.size; j++) out[j] = through[j] + scale * y[j];
        }
      }
}

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
