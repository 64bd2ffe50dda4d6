"""The table of costs on real models says what its record says."""

from benchmarks import real_models
from benchmarks.real_subjects import make


def entry(median, **more):
    found = {"median": median, "low": median - 0.01, "high": median + 0.01, "memory": 1.01}
    return {**found, **more}


def record(native, torch, by_hand):
    rows = {"baseline": entry(1.0)}
    for method, hands in real_models.BY_HAND.items():
        rows[f"{method}, native"] = entry(native)
        rows[f"{method}, torch"] = entry(torch, over={"hand": hands[0]})
        rows |= {hand: entry(by_hand) for hand in hands}
    return {"models": {"a model": {"rows": rows}}}


def test_goals_are_counted_and_named():
    met = real_models.verdicts(record(1.02, 1.05, 1.05))
    assert met[0] == "With native kernels 6 of 6 goals are met."
    assert "no method takes more than 0.03" in met[-1]
    missed = real_models.verdicts(record(1.06, 1.20, 1.05))
    assert missed[0] == "With native kernels 2 of 6 goals are met."
    assert "a model: DropPath 1.06" in missed[1]
    assert "a model: Explicit 1.20 against 1.05" in missed[-1]


def test_what_exceeds_its_goal_is_bold():
    lines = real_models.table(record(1.06, 1.07, 1.05))
    native = next(line for line in lines if line.startswith("| a model, native"))
    assert native.count("**1.06**") == 4  # DropKey, DropPath, Explicit, feed-forward dropout
    assert all(line.count("|") == 8 for line in lines)


def test_forms_by_hand_change_what_they_say():
    from benchmarks.by_hand import written_by_hand

    subject = make("nanoGPT, eager")
    steps = written_by_hand(subject)
    wanted = {hand for hands in real_models.BY_HAND.values() for hand in hands}
    assert set(steps) == wanted
    steps["DropKey + Explicit + DropPath by hand"]()
    assert all(p.grad is None for p in subject.model.parameters())
