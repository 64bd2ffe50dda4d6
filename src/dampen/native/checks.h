// What an entry asks of its arguments before it reads or writes: each check gives null, or what is wrong in words.
#pragma once
#include <initializer_list>

#include "vectors.h"

namespace {

constexpr i64 LARGEST = (1LL << 31) - 64;  // sizes and row strides are ints where sgemm gets them

// Whether memory at t, with `room` numbers up to its end, holds a tensor of these sizes and strides
template <class T>
const char* bad_strided(const T* t, std::initializer_list<i64> sizes, std::initializer_list<i64> strides, i64 room) {
  for (i64 size : sizes)
    if (!size) return nullptr;  // nothing is there
  if (!t) return "a null pointer";
  if ((std::uintptr_t)t % alignof(T)) return "memory that is not aligned to its numbers";
  i64 last = 0;
  auto stride = strides.begin();
  for (i64 size : sizes) {
    i64 step = 0;
    if (size < 0 || *stride < 0) return "a negative size or stride";
    if (__builtin_mul_overflow(size - 1, *stride, &step) || __builtin_add_overflow(last, step, &last))
      return "sizes and strides beyond 64 bits";
    stride++;
  }
  return last < room ? nullptr : "memory that ends before the tensor does";
}

const char* bad_rate(double rate) { return rate >= 0 && rate <= 1 ? nullptr : "a rate outside 0 to 1"; }

}  // namespace
