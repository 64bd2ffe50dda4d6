"""Schedules over depth and progress: end points, shapes, nesting, errors."""

import pytest

from dampen.schedules import (
    constant,
    cosine,
    curriculum,
    early,
    late,
    linear,
    per_layer,
    vshape,
    warmup,
)


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        (constant(0.2), {(0, 0): 0.2, (1, 1): 0.2}),
        (linear(0.3, 0.0), {(0, 0): 0.3, (0.5, 1): 0.15, (1, 0): 0.0}),
        (linear(0.0, 0.4, along="progress"), {(1, 0): 0.0, (0, 0.5): 0.2, (0, 1): 0.4}),
        (cosine(0.4, 0.0), {(0, 0): 0.4, (0, 0.5): 0.2, (0, 1): 0.0}),
        (cosine(0.0, 0.4, along="depth"), {(0, 1): 0.0, (0.5, 0): 0.2, (1, 0): 0.4}),
        (early(0.1, until=0.5), {(0, 0.49): 0.1, (0, 0.5): 0.0, (1, 1): 0.0}),
        (late(0.1, start=0.5), {(0, 0.49): 0.0, (0, 0.5): 0.1, (1, 1): 0.1}),
        (warmup(0.2, until=0.1), {(0, 0): 0.0, (0, 0.05): 0.1, (0, 0.1): 0.2, (0, 1): 0.2}),
        (warmup(0.2, until=0.0), {(0, 0): 0.2}),
        (
            vshape(0.2, 0.4),
            {(0, 0): 0.2, (0, 0.25): 0.1, (0, 0.5): 0.0, (0, 0.75): 0.2, (0, 1): 0.4},
        ),
        (vshape(0.2, 0.4, bottom=1.0), {(0, 0): 0.2, (0, 1): 0.4}),
        (per_layer((0.1, 0.2, 0.3)), {(0, 0): 0.1, (0.5, 0): 0.2, (1, 0): 0.3}),
        (curriculum(0.5, gamma=10), {(0, 0): 0.0, (0, 1): 0.49997730}),
        (early(linear(0.4, 0.2), until=0.9), {(0, 0.5): 0.4, (1, 0.5): 0.2, (0.5, 0.95): 0.0}),
    ],
)
def test_values(schedule, points):
    for (depth, progress), value in points.items():
        assert schedule(depth, progress) == pytest.approx(value, abs=1e-7)


def test_curriculum_rises():
    values = [curriculum(0.5)(0, t / 10) for t in range(11)]
    assert values == sorted(values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linear(0, 1, along="width"), "got along='width'"),
        (lambda: early(0.1, until=1.5), "until is a fraction"),
        (lambda: late(0.1, start=-1), "start is a fraction"),
        (lambda: warmup(0.1, until=2), "until is a fraction"),
        (lambda: vshape(0.1, 0.1, bottom=2), "bottom is a fraction"),
        (lambda: curriculum(0.1, gamma=0), "gamma must be positive"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
