// A few numbers at a time, and the products of matrices: small ones written out here, large ones by the sgemm that libtorch
// brings, given at start.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
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

}  // namespace
