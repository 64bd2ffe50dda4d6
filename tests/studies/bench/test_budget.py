"""The time of a bench: which rows are built in which time, on a clock that the work itself moves. No
test asserts a time that passed."""

import pytest
from typer.testing import CliRunner

from dampen.cli import build
from dampen.studies.bench import Options, bench, find_variants, run
from dampen.studies.bench.budget import LEAST, SHORT, Budget, short_rows
from dampen.studies.bench.run import NO_TIME, remarks

TINY = "vit(image_size=8, patch_size=2, width=16, depth=2, heads=2, mlp=16)"


class Clock:
    """Stands still, but for what is added to it."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def work(self, seconds):
        self.now += seconds


def rows_built(seconds, set_up=0.0, build_time=0.5, step=1.0, shared=3, extra=0):
    """How many rows are built in a time, and what the whole bench then takes, played to its end."""
    clock = Clock()
    budget = Budget(seconds, shared, extra, clock=clock)
    clock.work(set_up)
    for _ in range(2):
        budget.reference(lambda: clock.work(step))
    built = 0
    while budget.has_room() and built < 1000:
        budget.row(lambda: clock.work(build_time) or (lambda: clock.work(step)))
        built += 1
    groups = -(-built // shared)
    clock.work(LEAST * (2 * groups + built) * step + extra * (2 + built) * step)
    return built, clock.now - 100.0


@pytest.mark.parametrize("seconds", [30.0, 60.0, 100.0, 237.0, 1000.0])
@pytest.mark.parametrize("set_up", [0.0, 12.0])
@pytest.mark.parametrize(("shared", "extra"), [(3, 0), (5, 3), (8, 0)])
def test_the_rows_that_are_built_leave_time_for_five_rounds_and_one_row_more_would_not(
    seconds, set_up, shared, extra
):
    built, whole = rows_built(seconds, set_up, shared=shared, extra=extra)
    assert built == 1 or whole <= seconds
    row = 0.5 + 1.0 + LEAST * 1.0 + extra * 1.0
    another_group = 2 * LEAST if built % shared == 0 else 0
    assert whole + row + another_group > seconds


def test_set_up_counts():
    without, with_it = rows_built(200.0), rows_built(200.0, set_up=100.0)
    assert with_it[0] == rows_built(100.0)[0] < without[0]
    assert with_it[1] <= 200.0


def test_the_first_row_is_built_whatever_the_time():
    assert rows_built(0.0)[0] == rows_built(5.0, set_up=60.0)[0] == 1


def test_a_short_time_has_one_row_for_each_method_the_usual_ones_first():
    rows = [v.name for v in short_rows(find_variants())]
    assert len(rows) == len({v.method for v in find_variants()})
    assert rows[:3] == ["drop_key", "hard_masking", "explicit_dropout"]
    assert rows[8:] == sorted(rows[8:])


@pytest.fixture
def clock(monkeypatch):
    """The bench's clock: making the model takes 3 seconds, a row 1, and its rounds nothing."""
    clock = Clock()

    def slowly(function, seconds):
        def run(*args, **kwargs):
            clock.work(seconds)
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(run, "make_subject", slowly(run.make_subject, 3.0))
    monkeypatch.setattr(run, "regularized_step", slowly(run.regularized_step, 1.0))
    monkeypatch.setattr(
        run, "Budget", lambda *args, started, **rest: Budget(*args, clock=clock, started=started)
    )
    return clock


def short_bench(clock, seconds, imports=0.0):
    methods = "drop_key, drop_path, drop_head, layer_drop"
    started = clock.now
    clock.work(imports)
    options = Options(model=TINY, batch=2, methods=methods, rounds=1, seconds=seconds)
    return bench(options, started=started)


def test_rows_that_do_not_fit_are_named(clock):
    record = short_bench(clock, 5.5)
    assert list(record["ratios"]) == ["drop_key", "drop_path"]  # 3 + 1 + 1, and half a second
    assert record["skipped"] == {"drop_head": NO_TIME, "layer_drop": NO_TIME}
    assert record["papers"] == record["alternatives"] == record["memory"] == {}
    said = " ".join(remarks(record))
    assert "one row per method, without the papers' formulations" in said
    assert "No time was left for drop_head, layer_drop." in said
    assert "Memory:" not in said
    assert "Not benched" not in said


def test_the_time_begins_before_the_imports(clock):
    assert list(short_bench(clock, 6.5)["ratios"]) == ["drop_key", "drop_path", "drop_head"]
    assert list(short_bench(clock, 6.5, imports=1.0)["ratios"]) == ["drop_key", "drop_path"]


def test_enough_time_builds_every_form(clock):
    record = short_bench(clock, SHORT)
    assert {"drop_key", "drop_key column", "layer_drop"} <= set(record["ratios"])
    assert set(record["memory"]) >= set(record["ratios"])
    assert "one row per method" not in " ".join(remarks(record))


def test_the_command_takes_a_small_batch_in_a_short_time_and_passes_its_start(monkeypatch):
    asked = []

    def stop(options, progress, started):
        asked.append((options.batch, options.seconds, started))
        raise KeyboardInterrupt

    monkeypatch.setattr("dampen.studies.bench.bench", stop)
    for arguments in (
        ["--seconds", "10"],
        ["--seconds", "10", "--batch", "64"],
        ["--seconds", "10", "--size", "tiny"],
        [],
    ):
        CliRunner().invoke(build("bench"), ["bench", *arguments])
    assert [(batch, seconds) for batch, seconds, _ in asked] == [
        (8, 10.0),
        (64, 10.0),
        (32, 10.0),
        (64, 600.0),
    ]
    assert all(isinstance(started, float) for *_, started in asked)
