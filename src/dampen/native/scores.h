// One row of attention scores: its largest, its softmax and the gradient of that, and the thresholds of hard masking.
#pragma once
#include "vectors.h"

namespace {

constexpr int FEW = 8;  // largest scores that are found by insertion

// exp(x) for x <= 0 to 2 ulp (Cephes); 0 below -87, so also at -inf, and NaN for NaN. What becomes an integer lies between
// -87 and 88 whatever x is.
inline float exponential(float x) {
  const float above = x > -87.0f ? x : -87.0f, z = above < 88.0f ? above : 88.0f;
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
  return x < -87.0f ? 0.0f : x != x ? x : p * power;
}

inline Eight exponential(Eight x) {
  const Eight above = x > -87.0f ? x : Eight{} - 87.0f, z = above < 88.0f ? above : Eight{} + 88.0f;
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
  return x < -87.0f ? Eight{} : x != x ? x : p * (Eight)power;
}

// Of a row in which no score was found above -inf: whether one of them is NaN, which is then the row's largest
bool any_nan(const float* s, int m, float& largest) {
  for (int j = 0; j < m; j++)
    if (s[j] != s[j]) {
      largest = s[j];
      return true;
    }
  return false;
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

constexpr float ALL = -std::numeric_limits<float>::max();  // a threshold that every score reaches which is seen

// A threshold that the k largest of s reach, and with them whatever ties with the k-th.
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
    if (best[k] == -INF) return ALL;
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
  if (at_low <= k) return ALL;
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

// How far apart two scores of D channels have to be, in lengths of the query and of the longest key, for a threshold
// between them to stay there: each may move by (D + 1) 2^-24 of these when it is summed in single precision, in any order,
// and as much when it is summed again.
float rounding(int D) { return 4 * ((float)D + 1) * 0x1p-24f; }

float length(const float* x, int size) {  // in double precision, where no square overflows
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int j = 0; j < size; j++) sum += (double)x[j] * x[j];
  return (float)std::sqrt(sum);
}

// A threshold in the middle of a gap that rounding does not cross. The sgemm of a library rounds otherwise when the scores
// are computed again, in the backward: a score at the threshold, or next to it, could be on its other side there. Scores
// closer to each other than rounding can be tie. That depends on the lengths of query and keys, not on the scores: a sum
// near 0 is rounded as its terms are. `lengths`: of the keys, of which only those count that the row sees.
float in_a_gap(const float* s, const float* lengths, int M, float limit, float apart) {
  if (limit == INF || limit == ALL) return limit;
  float longest = 0;
#pragma omp simd reduction(max : longest)
  for (int j = 0; j < M; j++) longest = std::max(longest, s[j] > -INF ? lengths[j] : 0.f);
  const float near = apart * longest + std::numeric_limits<float>::min();
  while (true) {  // a step lowers the limit by more than `near`
    float above = INF, below = -INF;
#pragma omp simd reduction(min : above) reduction(max : below)
    for (int j = 0; j < M; j++) {
      above = s[j] >= limit && s[j] < above ? s[j] : above;
      below = s[j] < limit && s[j] > below ? s[j] : below;
    }
    if (below == -INF) return ALL;
    if (above - below > near) return 0.5f * above + 0.5f * below;
    limit = std::max(below - near, ALL);  // what is so close to `below` ties with it
  }
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
    limit[l] = next == -INF ? ALL : middle > next ? middle : kth;
  }
}
using Thresholds = void (*)(const float*, i64, int, int, float*, float*);
constexpr Thresholds THRESHOLDS[FEW] = {thresholds<1>, thresholds<2>, thresholds<3>, thresholds<4>,
                                        thresholds<5>, thresholds<6>, thresholds<7>, thresholds<8>};

}  // namespace
