"""Flash attention with random keys hidden inside it: what runs on the GPU.

Tiles of BM queries and BN keys, as in FlashAttention-2 (arXiv 2307.08691): the forward keeps a
running maximum and sum per query, the backward computes the weights again from the logarithm of
the sums. Nothing of N x M is stored. Scores are held in units of log 2, because a GPU has exp2.

What is random is a function of a seed and of a place (sample, head, query, key), so forward and
backward agree and the size of the tiles does not matter. `DRAWS` says what is drawn:
0 nothing, 1 keys hidden before the softmax (DropKey, normalized attention dropout), 2 weights
dropped after it, 3 keys hidden whose score reaches a threshold of their query (hard masking).
`MASKED` says how keys are hidden from outside: 0 not at all, 1 the same keys from every query, 2 by
query, 3 by query with 32 keys in a word.

The arrays LSE, BACK, TOP and DELTA are (B, H, N); O and all gradients are laid out (B, N, H, D).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # below every score, and finite
GUARD_STREAM = tl.constexpr(-2147483648)  # beside a sample's number: draws for the guard alone


@triton.jit
def limit_of(seed, rate):
    """How many of 256 draws hide a key: the rate rounded up or down at random, right on average."""
    last = tl.full((), -1, tl.int32)  # a place that no key has
    bits, _, _, _ = tl.philox(seed, last, last, last, last, n_rounds=7)
    dither = (bits >> 8).to(tl.float32) * (1.0 / 16777216.0)
    return tl.floor(rate * 256.0 + dither).to(tl.uint32)


@triton.jit
def drawn(seed, limit, sample, head, rows, first_key, BM: tl.constexpr, BN: tl.constexpr):
    """(BM, BN): True with probability limit / 256.

    One Philox4x32-7 of (key // 16, query, head, sample) gives sixteen draws of 8 bits. The first
    two of its rounds run on vectors, because no word depends on both query and key yet.
    """
    groups = first_key // 16 + tl.arange(0, BN // 16)
    a, b, c, d = tl.philox(seed, groups[None, :], rows[:, None], head, sample, n_rounds=7)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BM, BN // 4))
    shifts = (tl.arange(0, 4) * 8).to(tl.uint32)
    draws = (words[:, :, None] >> shifts[None, None, :]) & 255
    return tl.reshape(draws, (BM, BN)) < limit


@triton.jit
def visible(
    mask, m_n, m_m, rows, first_key, N, M, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """(BM, BN): the keys that the mask shows each query."""
    cols = first_key + tl.arange(0, BN)
    seen = (rows[:, None] < N) & (cols[None, :] < M)
    if CAUSAL:
        seen = seen & (cols[None, :] <= rows[:, None])
    if MASKED == 1:
        seen = seen & (tl.load(mask + cols * m_m, mask=cols < M, other=0) != 0)[None, :]
    line = rows[:, None] * tl.cast(m_n, tl.int64)  # a mask may have more than 2^31 places
    if MASKED == 2:
        at = mask + line + cols[None, :] * tl.cast(m_m, tl.int64)
        seen = seen & (tl.load(at, mask=seen, other=0) != 0)
    if MASKED == 3:
        words = first_key // 32 + tl.arange(0, BN // 32)
        inside = (rows[:, None] < N) & (words[None, :] * 32 < M)
        found = tl.load(mask + line + words[None, :], mask=inside, other=0)
        bits = (found[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        seen = seen & (tl.reshape(bits, (BM, BN)) != 0)
    return seen


@triton.jit
def scores(
    q, k, bias, b_n, b_m, rows, cols, N, M, scale, BIASED: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """(BM, BN): (q k^T scale + bias) log2(e)."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
    if BIASED:
        inside = (rows[:, None] < N) & (cols[None, :] < M)
        line = rows[:, None] * tl.cast(b_n, tl.int64)
        at = bias + line + cols[None, :] * tl.cast(b_m, tl.int64)
        s += tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2E
    return s


@triton.jit
def kept(
    s, seen, top, seed, limit, sample, head, rows, first_key,
    DRAWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """(BM, BN): the keys that remain to the softmax."""
    if DRAWS == 1:
        seen = seen & ~drawn(seed, limit, sample, head, rows, first_key, BM, BN)
    if DRAWS == 3:
        hit = drawn(seed, limit, sample, head, rows, first_key, BM, BN)
        seen = seen & ~(hit & (s >= top[:, None] * LOG2E))
    return seen


@triton.jit
def load_rows(at, rows, stride, N, D: tl.constexpr, BD: tl.constexpr):
    """(rows, BD): rows of a matrix (N, D), zeros beyond its end."""
    d = tl.arange(0, BD)
    inside = (rows[:, None] < N) & (d[None, :] < D)
    return tl.load(at + rows[:, None] * stride + d[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(at, x, rows, stride, N, D: tl.constexpr, BD: tl.constexpr):
    d = tl.arange(0, BD)
    inside = (rows[:, None] < N) & (d[None, :] < D)
    tl.store(at + rows[:, None] * stride + d[None, :], x.to(at.dtype.element_ty), mask=inside)


@triton.jit
def attend(
    Q, K, V, MASK, BIAS, TOP, SEED, RATE, OUT, LSE, BACK,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, m_b, m_h, m_n, m_m, b_b, b_h, b_n, b_m,
    H, G, N, M, scale,
    DRAWS: tl.constexpr, GUARD: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """O = softmax(Q K^T scale + bias) V for BM queries of one head."""
    block, slab = tl.program_id(0) % tl.cdiv(N, BM), tl.program_id(0) // tl.cdiv(N, BM)
    sample, head = slab // H, slab % H
    rows = block * BM + tl.arange(0, BM)
    b, h, g = sample.to(tl.int64), head.to(tl.int64), (head // (H // G)).to(tl.int64)
    line = (b * H + h) * N
    k_n, v_n = tl.cast(k_n, tl.int64), tl.cast(v_n, tl.int64)
    q = load_rows(Q + b * q_b + h * q_h, rows, tl.cast(q_n, tl.int64), N, D, BD)
    keys, values = K + b * k_b + g * k_h, V + b * v_b + g * v_h
    mask, bias = MASK + b * m_b + h * m_h, BIAS + b * b_b + h * b_h
    seed, limit, top = tl.cast(0, tl.int64), tl.cast(0, tl.uint32), tl.zeros((BM,), tl.float32)
    if DRAWS > 0:
        seed = tl.load(SEED)
        limit = limit_of(seed, tl.load(RATE))
    if DRAWS == 3:
        top = tl.load(TOP + line + rows, mask=rows < N, other=0.0)
    stop = M
    if CAUSAL:
        stop = tl.minimum(M, (block + 1) * BM)
    largest, total = tl.full((BM,), LOWEST, tl.float32), tl.zeros((BM,), tl.float32)
    o = tl.zeros((BM, BD), tl.float32)
    for start in range(0, stop, BN):
        cols = start + tl.arange(0, BN)
        k = load_rows(keys, cols, k_n, M, D, BD)
        s = scores(q, k, bias, b_n, b_m, rows, cols, N, M, scale, BIASED, PRECISION)
        seen = visible(mask, m_n, m_m, rows, start, N, M, CAUSAL, MASKED, BM, BN)
        keep = kept(s, seen, top, seed, limit, sample, head, rows, start, DRAWS, BM, BN)
        s = tl.where(keep, s, -float("inf"))
        new = tl.maximum(largest, tl.max(s, 1))
        p, fade = tl.exp2(s - new[:, None]), tl.exp2(largest - new)
        total, largest = total * fade + tl.sum(p, 1), new
        if DRAWS == 2:
            p = tl.where(drawn(seed, limit, sample, head, rows, start, BM, BN), 0.0, p)
        v = load_rows(values, cols, v_n, M, D, BD)
        o = tl.dot(p.to(v.dtype), v, o * fade[:, None], input_precision=PRECISION)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    o /= total[:, None]
    if DRAWS == 2:
        o /= 1.0 - tl.load(RATE)
    if GUARD:  # a query that lost every key gets the one with the largest draw
        back = tl.full((BM,), -1, tl.int32)
        if tl.max(empty.to(tl.int32), 0) > 0:
            best = tl.full((BM,), -1, tl.int32)
            for start in range(0, stop, BN):
                cols = start + tl.arange(0, BN)
                bits, _, _, _ = tl.philox(
                    seed, cols[None, :], rows[:, None], head, sample | GUARD_STREAM, n_rounds=7
                )
                seen = visible(mask, m_n, m_m, rows, start, N, M, CAUSAL, MASKED, BM, BN)
                draw = tl.where(seen, (bits >> 1).to(tl.int32), -1)
                here = tl.max(draw, 1)
                place = start + tl.argmax(draw, 1).to(tl.int32)
                back = tl.where(here > best, place, back)
                best = tl.maximum(here, best)
            back = tl.where(empty, back, -1)
            d = tl.arange(0, BD)
            inside = (back[:, None] >= 0) & (d[None, :] < D)
            given = tl.load(values + back[:, None] * v_n + d[None, :], mask=inside, other=0.0)
            o = tl.where(back[:, None] >= 0, given.to(tl.float32), o)
        tl.store(BACK + line + rows, back, mask=rows < N)
    # infinite where no key remained: the backward then finds weights of 0
    lse = tl.where(empty, float("inf"), largest + tl.log2(total))
    tl.store(LSE + line + rows, lse, mask=rows < N)
    store_rows(OUT + (b * N * H + h) * D, o, rows, tl.cast(H * D, tl.int64), N, D, BD)


@triton.jit
def weights(
    s, seen, lse, back, top, seed, limit, sample, head, rows, first_key,
    DRAWS: tl.constexpr, GUARD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """(BM, BN): softmax of a tile again, from the logarithms of the sums."""
    keep = kept(s, seen, top, seed, limit, sample, head, rows, first_key, DRAWS, BM, BN)
    p = tl.where(keep, tl.exp2(s - lse[:, None]), 0.0)
    if GUARD:
        p = tl.where((first_key + tl.arange(0, BN))[None, :] == back[:, None], 1.0, p)
    return p


@triton.jit
def to_queries(
    Q, K, V, MASK, BIAS, TOP, SEED, RATE, LSE, BACK, DELTA, DO, DQ,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, m_b, m_h, m_n, m_m, b_b, b_h, b_n, b_m,
    H, G, N, M, scale,
    DRAWS: tl.constexpr, GUARD: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dQ = P * (dO V^T - delta) K scale for BM queries of one head; delta = rowsum(dO * O)."""
    block, slab = tl.program_id(0) % tl.cdiv(N, BM), tl.program_id(0) // tl.cdiv(N, BM)
    sample, head = slab // H, slab % H
    rows = block * BM + tl.arange(0, BM)
    b, h, g = sample.to(tl.int64), head.to(tl.int64), (head // (H // G)).to(tl.int64)
    line, ours = (b * H + h) * N, (b * N * H + h) * D
    k_n, v_n, o_n = tl.cast(k_n, tl.int64), tl.cast(v_n, tl.int64), tl.cast(H * D, tl.int64)
    q = load_rows(Q + b * q_b + h * q_h, rows, tl.cast(q_n, tl.int64), N, D, BD)
    do = load_rows(DO + ours, rows, o_n, N, D, BD)
    keys, values = K + b * k_b + g * k_h, V + b * v_b + g * v_h
    mask, bias = MASK + b * m_b + h * m_h, BIAS + b * b_b + h * b_h
    lse = tl.load(LSE + line + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(DELTA + line + rows, mask=rows < N, other=0.0)
    seed, limit, top = tl.cast(0, tl.int64), tl.cast(0, tl.uint32), tl.zeros((BM,), tl.float32)
    back = tl.full((BM,), -1, tl.int32)
    if DRAWS > 0:
        seed = tl.load(SEED)
        limit = limit_of(seed, tl.load(RATE))
    if DRAWS == 3:
        top = tl.load(TOP + line + rows, mask=rows < N, other=0.0)
    if GUARD:
        back = tl.load(BACK + line + rows, mask=rows < N, other=-1)
    stop = M
    if CAUSAL:
        stop = tl.minimum(M, (block + 1) * BM)
    dq = tl.zeros((BM, BD), tl.float32)
    for start in range(0, stop, BN):
        cols = start + tl.arange(0, BN)
        k = load_rows(keys, cols, k_n, M, D, BD)
        v = load_rows(values, cols, v_n, M, D, BD)
        s = scores(q, k, bias, b_n, b_m, rows, cols, N, M, scale, BIASED, PRECISION)
        seen = visible(mask, m_n, m_m, rows, start, N, M, CAUSAL, MASKED, BM, BN)
        p = weights(
            s, seen, lse, back, top, seed, limit, sample, head, rows, start, DRAWS, GUARD, BM, BN
        )
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if DRAWS == 2:
            gone = drawn(seed, limit, sample, head, rows, start, BM, BN)
            dp = tl.where(gone, 0.0, dp) / (1.0 - tl.load(RATE))
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_rows(DQ + ours, dq * scale, rows, o_n, N, D, BD)


@triton.jit
def to_keys(
    Q, K, V, MASK, BIAS, TOP, SEED, RATE, LSE, BACK, DELTA, DO, DK, DV,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, m_b, m_h, m_n, m_m, b_b, b_h, b_n, b_m,
    H, G, N, M, scale,
    DRAWS: tl.constexpr, GUARD: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dK and dV for BN keys of one head, over all heads of queries that share it."""
    block, slab = tl.program_id(0) % tl.cdiv(M, BN), tl.program_id(0) // tl.cdiv(M, BN)
    sample, group = slab // G, slab % G
    first_key = block * BN
    cols = first_key + tl.arange(0, BN)
    b, g = sample.to(tl.int64), group.to(tl.int64)
    q_n, o_n = tl.cast(q_n, tl.int64), tl.cast(H * D, tl.int64)
    k = load_rows(K + b * k_b + g * k_h, cols, tl.cast(k_n, tl.int64), M, D, BD)
    v = load_rows(V + b * v_b + g * v_h, cols, tl.cast(v_n, tl.int64), M, D, BD)
    seed, limit = tl.cast(0, tl.int64), tl.cast(0, tl.uint32)
    if DRAWS > 0:
        seed = tl.load(SEED)
        limit = limit_of(seed, tl.load(RATE))
    first = 0
    if CAUSAL:  # earlier queries do not see these keys
        first = first_key // BM * BM
    dk, dv = tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BD), tl.float32)
    for head in range(group * (H // G), (group + 1) * (H // G)):
        h = tl.cast(head, tl.int64)
        line, ours = (b * H + h) * N, (b * N * H + h) * D
        mask, bias = MASK + b * m_b + h * m_h, BIAS + b * b_b + h * b_h
        for start in range(first, N, BM):
            rows = start + tl.arange(0, BM)
            q = load_rows(Q + b * q_b + h * q_h, rows, q_n, N, D, BD)
            do = load_rows(DO + ours, rows, o_n, N, D, BD)
            lse = tl.load(LSE + line + rows, mask=rows < N, other=float("inf"))
            delta = tl.load(DELTA + line + rows, mask=rows < N, other=0.0)
            top, back = tl.zeros((BM,), tl.float32), tl.full((BM,), -1, tl.int32)
            if DRAWS == 3:
                top = tl.load(TOP + line + rows, mask=rows < N, other=0.0)
            if GUARD:
                back = tl.load(BACK + line + rows, mask=rows < N, other=-1)
            s = scores(q, k, bias, b_n, b_m, rows, cols, N, M, scale, BIASED, PRECISION)
            seen = visible(mask, m_n, m_m, rows, first_key, N, M, CAUSAL, MASKED, BM, BN)
            p = weights(
                s, seen, lse, back, top, seed, limit, sample, head, rows, first_key,
                DRAWS, GUARD, BM, BN,
            )  # fmt: skip
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            used = p
            if DRAWS == 2:
                gone = drawn(seed, limit, sample, head, rows, first_key, BM, BN)
                used = tl.where(gone, 0.0, p) / (1.0 - tl.load(RATE))
                dp = tl.where(gone, 0.0, dp) / (1.0 - tl.load(RATE))
            ds = p * (dp - delta[:, None])
            dv = tl.dot(tl.trans(used.to(do.dtype)), do, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    ours = (b * M * G + g) * D
    store_rows(DK + ours, dk * scale, cols, tl.cast(G * D, tl.int64), M, D, BD)
    store_rows(DV + ours, dv, cols, tl.cast(G * D, tl.int64), M, D, BD)


@triton.jit
def write_draws(OUT, SEED, RATE, H, N, M, BM: tl.constexpr, BN: tl.constexpr):
    """What `drawn` says of every place, as bytes (B, H, N, M): for tests and the self-check."""
    sample, head = tl.program_id(2) // H, tl.program_id(2) % H
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    seed = tl.load(SEED)
    limit = limit_of(seed, tl.load(RATE))
    hit = drawn(seed, limit, sample, head, rows, tl.program_id(1) * BN, BM, BN)
    at = OUT + tl.program_id(2).to(tl.int64) * N * M + rows[:, None] * M + cols[None, :]
    tl.store(at, hit.to(tl.uint8), mask=(rows[:, None] < N) & (cols[None, :] < M))
