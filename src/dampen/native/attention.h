// Attention that hides keys on the way, forward and backward; nothing of size N x M is kept.
//
// Letters: B batch, H heads, G key heads, N queries, M keys, D channels of a query, E channels of a value.
#pragma once
#include "checks.h"
#include "random.h"
#include "scores.h"

extern "C" {

struct Problem {
  i64 B, H, G, N, M, D, E, threads, mode, causal, share_num, share_den;  // mode: 0 plain, 1 DropKey, 2 hard masking
  double scale, rate;
  u64 seed;
  const float *q, *k, *v, *go;
  const u8* mask;  // True may be seen; null: all
  float *o, *lse, *top, *dq, *dk, *dv;
  i64 sq[3], sk[3], sv[3], so[3], sgo[3], sdq[3], sdk[3], sdv[3], smask[4];
  // how many numbers lie between a pointer and the end of its memory, in the order of the pointers
  i64 room_q, room_k, room_v, room_go, room_mask, room_o, room_lse, room_top, room_dq, room_dk, room_dv;
};
}

namespace {

#ifndef DAMPEN_SMALL
#define DAMPEN_SMALL 32
#endif
constexpr i64 SMALL = DAMPEN_SMALL;  // keys and channels up to which the products are those of vectors.h
constexpr i64 FORWARD = 1 << 17;  // scores of a block of queries in the forward, which holds whole rows
constexpr i64 ROWS = 256, KEYS_WHOLE = 512, KEYS_PART = 256;  // of a block in the backward

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
// left, with a finite score. `top`: where hard masking keeps its threshold, which may be `known` already. `lengths` of the
// keys where the scores came out of sgemm: see `in_a_gap`. `largest`: of the scores that are left.
bool hide(const Problem& p, u32 thr, i64 b, i64 h, i64 i, float* s, int width, const u16* draw, float* top, bool known,
          const float* lengths, float& largest) {
  const int M = (int)p.M, seen = show(p, b, h, i, 0, M, s);
  if (!p.mode || !seen) {
    largest = seen ? largest_of(s, width) : -INF;
    if (seen && largest == -INF) any_nan(s, M, largest);
    return true;
  }
  if (p.mode == 2 && !known) {
    const i64 k = p.share_den ? (seen * p.share_num + p.share_den - 1) / p.share_den : std::min<i64>(p.share_num, seen);
    *top = top_threshold(s, M, (int)k);
  }
  if (p.mode == 2 && lengths) {
    const float apart = rounding((int)p.D) * (float)std::fabs(p.scale) * length(at(p.q, p.sq, b, h, i), (int)p.D);
    *top = in_a_gap(s, lengths, M, *top, apart);
  }
  largest = drop(draw, thr, p.mode == 2 ? *top : -INF, width, s);
  if (largest > -INF || any_nan(s, M, largest)) return true;
  s[rescued(p, b, h, i)] = largest = 0;
  return false;
}

// Whether the products are those of vectors.h. The values have no say: the same scores must come out in `dampen_kept`,
// which is not given any.
bool small_sizes(const Problem& p) { return std::max(p.M, p.D) <= SMALL; }

// The scores of n queries with keys that `turn` has turned. Never inlined, because a compiler may round otherwise where it
// does: forward, backward and `dampen_kept` have to get the same bits.
__attribute__((noinline)) void small_scores(const Problem& p, int n, const float* q, const float* turned, int ld,
                                            float* scores) {
  small(n, ld, (int)p.D, (float)p.scale, q, p.sq[2], 1, turned, ld, false, scores, ld);
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

// --- what every entry asks before it reads anything -----------------------------------------------------------------

// (B, heads, tokens, size) with rows that sgemm can read
const char* bad_heads(const Problem& p, const float* t, const i64* s, i64 heads, i64 tokens, i64 size, i64 room) {
  if (s[2] < size || s[2] > LARGEST) return "rows overlap, or are more than 2^31 numbers apart";
  return bad_strided(t, {p.B, heads, tokens, size}, {s[0], s[1], s[2], 1}, room);
}

const char* bad_mask(const Problem& p) {
  if (!p.mask) return nullptr;
  return bad_strided(p.mask, {p.B, p.H, p.N, p.M}, {p.smask[0], p.smask[1], p.smask[2], p.smask[3]}, p.room_mask);
}

// With strides that fit where an axis has one entry: torch allows any there, and sgemm asks for rows that do not overlap.
Problem fitting(const Problem& given) {
  Problem p = given;
  auto fit = [&](i64* s, i64 heads, i64 tokens, i64 size) {
    if (p.B == 1) s[0] = 0;
    if (heads == 1) s[1] = 0;
    if (tokens == 1) s[2] = size;
  };
  fit(p.sq, p.H, p.N, p.D), fit(p.sdq, p.H, p.N, p.D), fit(p.so, p.H, p.N, p.E), fit(p.sgo, p.H, p.N, p.E);
  fit(p.sk, p.G, p.M, p.D), fit(p.sdk, p.G, p.M, p.D), fit(p.sv, p.G, p.M, p.E), fit(p.sdv, p.G, p.M, p.E);
  return p;
}

// What forward, backward and `dampen_kept` share
const char* bad_problem(const Problem& p) {
  for (i64 size : {p.B, p.H, p.G, p.N, p.M, p.D, p.E})
    if (size < 1 || size > LARGEST) return "a size below 1 or above 2^31";
  if (p.H % p.G) return "heads of queries that are no multiple of those of keys";
  if (p.threads < 1 || p.threads > 4096) return "a number of threads outside 1 to 4096";
  if (p.mode < 0 || p.mode > 2) return "an unknown mode";
  if (p.mode == 2 && (p.share_num < 0 || p.share_num > LARGEST || p.share_den < 0 || p.share_den > LARGEST))
    return "a share of largest scores that is none";
  if (bad_rate(p.rate)) return bad_rate(p.rate);
  if (auto bad = bad_heads(p, p.q, p.sq, p.H, p.N, p.D, p.room_q)) return bad;
  if (auto bad = bad_heads(p, p.k, p.sk, p.G, p.M, p.D, p.room_k)) return bad;
  if (p.mode == 2)
    if (auto bad = bad_strided(p.top, {p.B, p.H, p.N}, {p.H * p.N, p.N, 1}, p.room_top)) return bad;
  return bad_mask(p);
}

const char* bad_output(const Problem& p) {
  if (auto bad = bad_heads(p, p.v, p.sv, p.G, p.M, p.E, p.room_v)) return bad;
  if (auto bad = bad_heads(p, p.o, p.so, p.H, p.N, p.E, p.room_o)) return bad;
  return bad_strided(p.lse, {p.B, p.H, p.N}, {p.H * p.N, p.N, 1}, p.room_lse);
}

const char* bad_gradients(const Problem& p) {
  if (auto bad = bad_heads(p, p.go, p.sgo, p.H, p.N, p.E, p.room_go)) return bad;
  if (auto bad = bad_heads(p, p.dq, p.sdq, p.H, p.N, p.D, p.room_dq)) return bad;
  if (auto bad = bad_heads(p, p.dk, p.sdk, p.G, p.M, p.D, p.room_dk)) return bad;
  return bad_heads(p, p.dv, p.sdv, p.G, p.M, p.E, p.room_dv);
}

}  // namespace

extern "C" {

// Every entry gives null, or says in words which of its arguments it refuses; then nothing was read or written.

const char* dampen_attention(const Problem* problem) {
  const Problem p = fitting(*problem);
  if (auto bad = bad_problem(p)) return bad;
  if (auto bad = bad_output(p)) return bad;
  const int bq = forward_rows(p), M = (int)p.M, D = (int)p.D, E = (int)p.E;
  const i64 blocks = bq ? (p.N + bq - 1) / bq : 0, tasks = p.B * p.H * blocks;
  const u32 thr = threshold(p.rate, p.seed);
  const bool is_small = small_sizes(p);
  const int few = few_largest(p);
  const int ld = is_small ? (M + 7) / 8 * 8 : M;  // rows with room at their ends: no loop has a remainder
  std::vector<float> lengths((size_t)(p.mode == 2 && !is_small ? p.B * p.G * M : 0));
#pragma omp parallel num_threads((int)p.threads) if (p.threads > 1)
  {
    std::vector<float> scores((size_t)bq * ld), turned(is_small ? (size_t)ld * D : 0), columns((size_t)(few ? 16 * M : 0));
    std::vector<float> inverse((size_t)bq);
    std::vector<u16> room;
#pragma omp for schedule(static)
    for (i64 key = 0; key < (i64)lengths.size(); key++)
      lengths[(size_t)key] = length(at(p.k, p.sk, key / M / p.G, key / M % p.G, key % M), D);
#pragma omp for schedule(static)
    for (i64 task = 0; task < tasks; task++) {
      const i64 bh = task / blocks, b = bh / p.H, h = bh % p.H, g = h * p.G / p.H, i0 = (task % blocks) * bq;
      const int n = (int)std::min<i64>(bq, p.N - i0);
      float* out = at(p.o, p.so, b, h, i0);
      const float *q = at(p.q, p.sq, b, h, i0), *k = at(p.k, p.sk, b, g, 0), *v = at(p.v, p.sv, b, g, 0);
      if (is_small) {
        turn(M, D, k, p.sk[2], turned.data(), ld);
        small_scores(p, n, q, turned.data(), ld, scores.data());
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
        const float* keys = lengths.empty() ? nullptr : lengths.data() + (b * p.G + g) * M;
        const bool usual = hide(p, thr, b, h, i0 + i, s, ld, draw, top ? top + i : nullptr, few > 0, keys, largest);
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
  return nullptr;
}

// kept (B, H, N, M) <- 1 where `dampen_attention` lets a query see a key, with the thresholds that it left in `top`
const char* dampen_kept(const Problem* problem, u8* kept, i64 room_kept) {
  const Problem p = fitting(*problem);
  if (auto bad = bad_problem(p)) return bad;
  if (auto bad = bad_strided(kept, {p.B, p.H, p.N, p.M}, {p.H * p.N * p.M, p.N * p.M, p.M, 1}, room_kept)) return bad;
  const int M = (int)p.M, D = (int)p.D;
  const u32 thr = threshold(p.rate, p.seed);
  const bool is_small = small_sizes(p);
  const int ld = is_small ? (M + 7) / 8 * 8 : M;
  const bool again = p.mode == 2 && is_small;
  const i64 bq = forward_rows(p);
  std::vector<float> s((size_t)ld), turned(again ? (size_t)ld * D : 0), block(again ? (size_t)bq * ld : 0);
  std::vector<u16> room;
  for (i64 row = 0; row < p.B * p.H * p.N; row++) {
    const i64 bh = row / p.N, b = bh / p.H, h = bh % p.H, g = h * p.G / p.H, i = row % p.N;
    const float *q = at(p.q, p.sq, b, h, i), *k = at(p.k, p.sk, b, g, 0);
    if (again) {  // the same blocks as in `dampen_attention`: a row alone is rounded otherwise, and ties would not stay ties
      if (!i) turn(M, D, k, p.sk[2], turned.data(), ld);
      if (i % bq == 0)
        small_scores(p, (int)std::min(bq, p.N - i), q, turned.data(), ld, block.data());
      std::copy_n(block.data() + (i % bq) * ld, ld, s.data());
    }
    for (int j = 0; j < M; j++) {
      if (p.mode != 2) s[j] = 0;
      else if (!is_small) s[j] = (float)p.scale * dot(q, k + j * p.sk[2], D);
      s[j] = s[j] > -INF ? s[j] : ALL;  // -inf says hidden
    }
    const u16* draw = p.mode ? draws(p.seed, KEYS, bh, (u64)i * M, M, room) : nullptr;
    float largest;
    hide(p, thr, b, h, i, s.data(), M, draw, p.top ? p.top + row : nullptr, true, nullptr, largest);
    for (int j = 0; j < M; j++) kept[row * M + j] = s[j] != -INF;
  }
  return nullptr;
}

const char* dampen_attention_backward(const Problem* problem) {
  const Problem p = fitting(*problem);
  if (auto bad = bad_problem(p)) return bad;
  if (auto bad = bad_output(p)) return bad;
  if (auto bad = bad_gradients(p)) return bad;
  const int bq = backward_rows(p), bk = backward_keys(p), D = (int)p.D, E = (int)p.E, shared = (int)(p.H / p.G);
  const u32 thr = threshold(p.rate, p.seed);
  const i64 tasks = p.B * p.G;  // heads that share a key add to its gradient one after the other
  const float scale = (float)p.scale;
  const bool is_small = small_sizes(p);
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
              small_scores(p, n, q, turned_k.data(), ld, weights.data());
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
  return nullptr;
}
}
