// The penalty of linear maps: sums of squares of their outputs, and the gradients that these send back.
#pragma once
#include "checks.h"

extern "C" {

// A tensor (slabs, groups, rows, size) with a bias (groups, size) in it, or none; numbers of a row side by side
struct Tapped {
  i64 slabs, groups, rows, size;
  const float *y, *bias, *through;  // through: null where nothing passes
  float *out, *total, *sums, *to_bias;
  i64 sy[3], st[3], so[3];
  // how many numbers lie between a pointer and the end of its memory, in the order of the pointers
  i64 room_y, room_bias, room_through, room_out, room_total, room_sums, room_to_bias;
  double scale;
  const float* weights;  // of the vectors, by slab and row; null where all are 1
  i64 sw[2], room_weights;
};
}

namespace {

const char* bad_tapped(const Tapped& t, bool back) {
  for (i64 size : {t.slabs, t.groups, t.rows, t.size})
    if (size < 1) return "a size below 1";
  auto bad = [&](const float* p, const i64* s, i64 room) {
    return bad_strided(p, {t.slabs, t.groups, t.rows, t.size}, {s[0], s[1], s[2], 1}, room);
  };
  auto bad_row = [&](const float* p, i64 room) { return bad_strided(p, {t.groups, t.size}, {t.size, 1}, room); };
  if (auto wrong = bad(t.y, t.sy, t.room_y)) return wrong;
  if (t.weights)
    if (auto wrong = bad_strided(t.weights, {t.slabs, t.rows}, {t.sw[0], t.sw[1]}, t.room_weights)) return wrong;
  if (t.bias)
    if (auto wrong = bad_row(t.bias, t.room_bias)) return wrong;
  if (!back) {
    if (t.bias)
      if (auto wrong = bad_row(t.sums, t.room_sums)) return wrong;
    return bad_strided(t.total, {1}, {1}, t.room_total);
  }
  if (t.through)
    if (auto wrong = bad(t.through, t.st, t.room_through)) return wrong;
  if (auto wrong = bad(t.out, t.so, t.room_out)) return wrong;
  if (!t.to_bias) return nullptr;
  if (auto wrong = bad_row(t.sums, t.room_sums)) return wrong;
  return bad_row(t.to_bias, t.room_to_bias);
}

float weight_of(const Tapped& t, i64 slab, i64 row) {
  return t.weights ? t.weights[slab * t.sw[0] + row * t.sw[1]] : 1.f;
}

// sum w ||y - bias||^2; sums (groups, size) = sum w (y - bias) where there is a bias
double tap_one(const Tapped& t) {
  double sum = 0;
  if (t.bias) std::memset(t.sums, 0, sizeof(float) * t.groups * t.size);
  for (i64 s = 0; s < t.slabs; s++)
    for (i64 g = 0; g < t.groups; g++) {
      float* __restrict to = t.bias ? t.sums + g * t.size : nullptr;
      const float* __restrict bias = t.bias ? t.bias + g * t.size : nullptr;
      for (i64 i = 0; i < t.rows; i++) {
        const float* __restrict y = t.y + s * t.sy[0] + g * t.sy[1] + i * t.sy[2];
        const float w = weight_of(t, s, i);
        if (w == 0.f) continue;  // padding
        float part = 0;
        if (bias) {
#pragma omp simd reduction(+ : part)
          for (i64 j = 0; j < t.size; j++) {
            const float d = y[j] - bias[j];
            part += d * d;
            to[j] += w * d;
          }
        } else {
#pragma omp simd reduction(+ : part)
          for (i64 j = 0; j < t.size; j++) part += y[j] * y[j];
        }
        sum += (double)w * part;
      }
    }
  return sum;
}

// out = through + scale w (y - bias), to_bias = -scale sums
void tap_one_backward(const Tapped& t) {
  for (i64 s = 0; s < t.slabs; s++)
    for (i64 g = 0; g < t.groups; g++)
      for (i64 i = 0; i < t.rows; i++) {
        const float scale = (float)t.scale * weight_of(t, s, i);
        const float* __restrict y = t.y + s * t.sy[0] + g * t.sy[1] + i * t.sy[2];
        const float* __restrict through = t.through ? t.through + s * t.st[0] + g * t.st[1] + i * t.st[2] : nullptr;
        const float* __restrict bias = t.bias ? t.bias + g * t.size : nullptr;
        float* __restrict out = t.out + s * t.so[0] + g * t.so[1] + i * t.so[2];
        if (bias && through) {
#pragma omp simd
          for (i64 j = 0; j < t.size; j++) out[j] = through[j] + scale * (y[j] - bias[j]);
        } else if (bias) {
#pragma omp simd
          for (i64 j = 0; j < t.size; j++) out[j] = scale * (y[j] - bias[j]);
        } else if (through) {
#pragma omp simd
          for (i64 j = 0; j < t.size; j++) out[j] = through[j] + scale * y[j];
        } else {
#pragma omp simd
          for (i64 j = 0; j < t.size; j++) out[j] = scale * y[j];
        }
      }
  for (i64 j = 0; t.to_bias && j < t.groups * t.size; j++) t.to_bias[j] = -(float)t.scale * t.sums[j];
}

}  // namespace

extern "C" {

// Of each of `count` tensors: total[0] += scale sum ||y - bias||^2, and its sums
const char* dampen_taps(const Tapped* tapped, i64 count) {
  for (i64 n = 0; n < count; n++)
    if (auto bad = bad_tapped(tapped[n], false)) return bad;
  for (i64 n = 0; n < count; n++) tapped[n].total[0] += (float)(tapped[n].scale * tap_one(tapped[n]));
  return nullptr;
}

const char* dampen_taps_backward(const Tapped* tapped, i64 count) {
  for (i64 n = 0; n < count; n++)
    if (auto bad = bad_tapped(tapped[n], true)) return bad;
  for (i64 n = 0; n < count; n++) tap_one_backward(tapped[n]);
  return nullptr;
}
}
