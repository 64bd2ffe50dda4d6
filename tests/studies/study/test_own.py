"""A user's own training as a trial: seeds pair, code is part of the identity, errors stay where they happened."""

import inspect
import json
from dataclasses import replace

import pytest
import torch

from dampen import DropKey, Handle, RDrop, linear
from dampen.studies.configs import plain_form, read_rows
from dampen.studies.errors import ConfigError, Diverged, LabError, Stopped
from dampen.studies.report import make_report
from dampen.studies.request import request_own
from dampen.studies.result import parse_event
from dampen.studies.run import Run
from dampen.studies.store import RunStore
from dampen.studies.trainer.instrumented import BaselineHandle, Clock, Observer, RandomStream
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.train import run_trial
from dampen.studies.trainer.user_function import as_function
from dampen.studies.user_code import digest_of_file


def as_if_new(script):
    """Import the script once more."""
    from dampen.studies.trainer import user_function

    user_function._import.cache_clear()
    return user_function.function_in_file(f"{script}:train")


def written(asked, row, seed=0):
    """What the script saved in a trial's folder."""
    (planned,) = (r for r in asked.plan.configs if r.name == row)
    return torch.load(
        asked.folder / planned.settings[0].ids[str(seed)] / "seen.pt", weights_only=True
    )


def test_the_same_seed_gives_every_row_the_same_start_and_the_same_order_of_batches(ask, run):
    asked = ask("drop_key(rate=0.3), r_drop + drop_head, params(lr=0.01)", seeds=2)
    results = run(asked)
    assert len(results) == 8
    plain = written(asked, "plain")
    for row in ("drop_key(rate=0.3)", "r_drop + drop_head", "params(lr=0.01)"):
        ours = written(asked, row)
        torch.testing.assert_close(ours["start"], plain["start"], rtol=0, atol=0)
        assert torch.equal(
            ours["order"], plain["order"]
        )  # a global-generator loader, whatever the methods drew
        assert not torch.equal(ours["end"]["head.weight"], plain["end"]["head.weight"])
    assert not torch.equal(written(asked, "plain", 1)["order"], plain["order"])


def test_records_are_those_of_any_trial_with_costs_from_the_steps(ask, run):
    asked = ask(seeds=1)
    results = run(asked)
    final = results["drop_key(rate=0.2)", 0]
    assert final["status"] == "finished"
    assert final["primary"] == ["accuracy", "max"]
    assert final["valid"]["accuracy"] == final["test"]["accuracy"]
    assert final["steps"] == 12
    assert 0 < final["step_cpu_seconds"] < 1
    assert final["parameters"] > 1000
    trial = asked.plan.configs[1].settings[0].ids["0"]
    lines = RunStore(asked.folder / trial).lines()
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4]
    assert set(lines[0]) == {"epoch", "step", "train", "valid", "seconds"}
    assert RunStore(asked.folder / trial).trial().id == trial


def test_a_handle_of_the_plain_row_has_every_method_and_does_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
    seen = []
    handle = BaselineHandle(
        model, Observer(RandomStream(0), Clock(), lambda progress, terms: seen.append(progress))
    )
    assert isinstance(handle, Handle)
    public = [n for n, v in vars(Handle).items() if not n.startswith("_") and callable(v)]
    x = torch.randn(4, 3)
    handle.progress(0.5)
    loss, terms = handle.loss(lambda: model(x), lambda out: out.sum())
    assert list(terms) == ["task"]
    assert loss is terms["task"]
    assert handle.penalties() == {}
    assert handle.penalty() == 0
    assert handle.parameters() == []
    assert handle.kernels() == {}
    handle.load_state_dict(handle.state_dict())
    with handle.disable(), handle.mc_mode(), handle.averaged():
        model(x)
    assert handle.mc_average(lambda: model(x), 2).shape == (4, 3)
    assert "baseline" in repr(handle)
    handle.set_builtin_dropout(rate=lambda depth, progress: 0.2 + 0.1 * progress)
    handle.attach_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    handle.progress(1.0)
    assert model[1].p == pytest.approx(0.3)
    with pytest.raises(ValueError, match="cannot vary with depth"):
        handle.set_builtin_dropout(rate=linear(0.3, 0.0))
    for entered in (handle.at_start(), handle.interpolate(0.5)):
        with pytest.raises(RuntimeError, match="starting weights"), entered:
            pass
    handle.remove()
    assert model[1].p == 0.5
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    with pytest.raises(RuntimeError):
        handle.progress(0.1)
    called = {
        "progress",
        "loss",
        "penalties",
        "penalty",
        "parameters",
        "state_dict",
        "load_state_dict",
        "disable",
    }
    called |= {
        "mc_mode",
        "mc_average",
        "kernels",
        "remove",
        "builtin_dropout",
        "set_builtin_dropout",
        "attach_optimizer",
        "averaged",
        "at_start",
        "interpolate",
    }
    assert called <= set(
        vars(BaselineHandle)
    )  # nothing comes from the real handle, which needs its sites
    for name in (
        set(public) - called
    ):  # a method that the handle gains must work, or be left out, here too
        assert inspect.signature(getattr(BaselineHandle, name)), name
        pytest.fail(f"Handle.{name} is new: call it on a BaselineHandle in this test")


def test_the_stream_leaves_the_global_generator_alone_and_goes_on_by_itself():
    model = torch.nn.Dropout(0.5)
    RandomStream(3).attach(model)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    first, second = model(torch.ones(64)), model(torch.ones(64))
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(first, second)
    again = torch.nn.Dropout(0.5)
    RandomStream(3).attach(again)
    assert torch.equal(again(torch.ones(64)), first)


def test_activation_checkpointing_inside_the_stream_has_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    class Net(torch.nn.Module):
        def __init__(self, recompute):
            super().__init__()
            torch.manual_seed(0)
            self.part = torch.nn.Sequential(
                torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8)
            )
            self.recompute = recompute

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=False) if self.recompute else self.part(x)

    grads = []
    for recompute in (False, True):
        net = Net(recompute)
        RandomStream(1).attach(net)
        net(torch.ones(4, 8)).square().sum().backward()
        grads.append(net.part[0].weight.grad)
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_comments_and_layout_do_not_make_another_trial_and_code_does(script, ask):
    before = ask().plan.runs
    script.write_text(
        "# a remark\n"
        + script.read_text().replace("def train(trial):", "def train( trial ):\n    'So.'")
    )
    assert set(ask().plan.runs) == set(before)
    script.write_text(
        script.read_text()
        + "\nif __name__ == '__main__':\n    study = dampen.compare(train, seeds=9)\n"
    )
    assert set(ask().plan.runs) == set(before)
    script.write_text(script.read_text().replace("batch_size=16", "batch_size=12"))
    assert not set(ask().plan.runs) & set(before)


def test_a_script_that_starts_a_comparison_when_it_is_imported_is_told_about_the_guard(script, ask):
    digest = digest_of_file(script)
    script.write_text(
        script.read_text()
        + "\nstudy = dampen.compare(train, methods='drop_key')\nprint(study.best)\n"
    )
    assert digest_of_file(script) == digest
    with pytest.raises(LabError, match='if __name__ == "__main__"'):
        as_if_new(script)


def test_local_imports_count_and_foreign_ones_do_not(script):
    (script.parent / "parts").mkdir()
    (script.parent / "parts" / "__init__.py").write_text("from .deep import K\n")
    (script.parent / "parts" / "deep.py").write_text("K = 1\n")
    (script.parent / "unused.py").write_text("K = 1\n")
    script.write_text("from parts import K\nimport json\n" + script.read_text())
    digest = digest_of_file(script)
    (script.parent / "unused.py").write_text("K = 2\n")
    assert digest_of_file(script) == digest
    (script.parent / "parts" / "deep.py").write_text("K = 2\n")
    assert digest_of_file(script) != digest


def test_changed_code_makes_new_trials_and_says_so_unless_told_it_is_the_same(script, ask, run):
    first = ask(seeds=1)
    run(first)
    script.write_text(script.read_text().replace('"nll": loss.item()', '"nll": 2 * loss.item()'))
    changed = ask(seeds=1)
    assert not set(changed.plan.runs) & set(first.plan.runs)
    assert "has changed since 2 trials were recorded" in changed.remark
    same = ask(seeds=1, same_code=True)
    assert set(same.plan.runs) == set(first.plan.runs)
    assert "count all the same" in same.remark
    run(changed)
    listed = [skipped.reason for skipped in make_report([changed.folder]).skipped]
    assert len(listed) == 2
    assert (
        "a result of older code of train.py:train (plain, seed 0); --ignore-code-change"
        in " ".join(listed)
    )


def test_code_that_changes_while_a_study_runs_is_refused(script, ask, run):
    asked = ask(seeds=1)
    script.write_text(script.read_text().replace("width=16", "width=32"))
    with pytest.raises(LabError, match="was changed after this run had started"):
        run(asked)


def test_an_error_names_the_file_and_the_line_in_the_users_code(script, ask, run):
    script.write_text(
        script.read_text()
        + "\n\ndef broken(trial):\n    trial.regularize(torch.nn.Linear(2, 2))\n    return 1 / 0\n"
    )
    line = script.read_text().splitlines().index("    return 1 / 0") + 1
    with pytest.raises(
        LabError, match=rf"train.py, line {line}, in broken: ZeroDivisionError: division by zero"
    ):
        run(ask(name="broken", seeds=1, methods="drop_key"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "returned None instead of test metrics"),
        ("return {'accuracy': 'high'}", "test.accuracy must be a number"),
        ("return {'accuracy': 0.5}", "never called trial.regularize"),
    ],
)
def test_what_is_no_result_is_refused(script, ask, run, body, message):
    script.write_text(script.read_text() + f"\n\ndef odd(trial):\n    {body}\n")
    asked = ask(name="odd", seeds=1)
    with pytest.raises((LabError, TypeError), match=message):
        for row in asked.plan.configs:
            (trial,) = row.settings[0].ids.values()
            run_trial(
                asked.plan.runs[trial],
                asked.folder / trial,
                Execution(threads=1, function=asked.function),
            )


def test_a_loss_that_becomes_nan_is_a_diverged_trial(script, ask, run):
    script.write_text(
        script.read_text().replace(
            "F.cross_entropy(out, yb)", "F.cross_entropy(out, yb) * float('nan')"
        )
    )
    with pytest.raises(Diverged, match="'task' became NaN or infinite first"):
        run(ask(seeds=1))


def test_a_killed_trial_goes_on_bit_exactly_from_its_checkpoint(script, ask, run, tmp_path):
    whole = ask("drop_key(rate=0.3)", seeds=1, folder=tmp_path / "whole")
    expected = run(whole)
    cut = ask("drop_key(rate=0.3)", seeds=1, folder=tmp_path / "cut")
    cut.plan.save(cut.folder)
    for row in cut.plan.configs:
        trial = row.settings[0].ids["0"]
        calls = []
        options = Execution(threads=1, function=cut.function)

        def stop(calls=calls):
            calls.append(1)
            return len(calls) >= 4  # two calls an epoch: in the middle of training

        with pytest.raises(Stopped):
            run_trial(cut.plan.runs[trial], cut.folder / trial, options, stop=stop)
        result = run_trial(cut.plan.runs[trial], cut.folder / trial, options)
        assert result["resumed"] == 1
        assert result["test"] == expected[row.name, 0]["test"]
        ours, theirs = written(cut, row.name), written(whole, row.name)
        assert torch.equal(ours["order"], theirs["order"])
        for name, value in theirs["end"].items():
            assert torch.equal(value, ours["end"][name]), name
        lines = [RunStore(a.folder / trial).lines() for a in (whole, cut)]
        assert [{k: v for k, v in line.items() if k != "seconds"} for line in lines[0]] == [
            {k: v for k, v in line.items() if k != "seconds"} for line in lines[1]
        ]


def test_rows_in_every_form():
    class Mine(DropKey):
        pass

    rows = read_rows(
        [
            "drop_key(rate=0.2), r_drop + drop_head",
            DropKey(0.1),
            [DropKey(0.1), RDrop(1.0)],
            {"mine": Mine(0.1)},
            {
                "decay": {"params": {"weight_decay": 0.1}},
                "both": {"methods": DropKey(0.3), "params": {"lr": 1}},
            },
        ]
    )
    assert [r.name for r in rows.rows] == [
        "plain",
        "drop_key(rate=0.2)",
        "r_drop + drop_head",
        "drop_key",
        "drop_key + r_drop",
        "mine",
        "decay",
        "both",
    ]
    assert rows.rows[5].methods[0]["object"] in rows.objects
    assert rows.rows[6].params == {"weight_decay": 0.1}
    assert rows.rows[7].methods == [{"name": "drop_key", "rate": 0.3}]
    with pytest.raises(ConfigError, match="two rows are called 'drop_key'"):
        read_rows([DropKey(0.1), "drop_key"])
    with pytest.raises(ConfigError, match="expected a regularizer"):
        read_rows([3])
    with pytest.raises(ConfigError, match="no row 'x'"):
        read_rows(["drop_key"], reference="x")


def test_an_object_and_its_text_are_the_same_trial_and_every_method_has_a_plain_form():
    from dampen.registry import methods

    for name, kind in methods().items():
        made = kind()
        if not made.does_nothing:
            assert plain_form(made) == {"name": name}, name
    (_, text) = read_rows(
        "drop_key(rate=linear(start=0.3, end=0.0, along='depth'), unit='column')"
    ).rows
    (_, made) = read_rows(DropKey(linear(0.3, 0.0), unit="column")).rows
    assert text.methods == made.methods


def test_ids_of_function_trials_round_trip_and_others_stay():
    spec = {
        "function": {"name": "t.py:f", "code": "0" * 16, "params": {"lr": 1.0}},
        "methods": ["drop_key"],
        "seed": 3,
    }
    trial = Run.from_dict(spec)
    assert Run.from_dict(json.loads(json.dumps(trial.to_dict()))).id == trial.id
    assert Run.from_dict({**spec, "seed": 4}).id != trial.id
    assert set(trial.to_dict()) == {"function", "methods", "seed"}
    with pytest.raises(ConfigError, match="function.code"):
        Run.from_dict({**spec, "function": {"name": "x"}})
    built_in = Run.from_stored({"data": {"name": "digits"}, "model": {"name": "vit", "depth": 2}})
    assert built_in.id == "6fab25b61d789ede"
    assert "function" not in built_in.to_dict()


def test_a_nested_function_is_sent_by_value_with_what_it_closes_over():
    def make(width):
        def train(trial):
            return {"accuracy": float(width)}

        return train

    one, two = as_function(make(1)), as_function(make(2))
    assert one.pickled is not None
    assert one.code.digest != two.code.digest
    assert one.code.digest == as_function(make(1)).code.digest
    assert replace(two).load()(None) == {"accuracy": 2.0}


def test_words_of_ones_own_in_the_log_are_no_fields_of_events(tmp_path, script):
    """`test`, `count`, `steps`, ... mean something else in an event: what a listener gets must still be one."""
    words = "test=0.4, count=1.5, steps=2.5, terms=1.0, phase=3.0, status=1.0, message=2.0, variance=0.1"
    logged = f"trial.log(epoch=1, valid={{'accuracy': 0.5}}, {words})"
    script.write_text(f"def train(trial):\n    {logged}\n    return {{'accuracy': 0.5}}\n")
    asked = request_own(as_if_new(script), "drop_key", 1, folder=tmp_path / "runs")
    (trial,) = (t for t in asked.plan.runs.values() if not t.methods)
    sent = []
    options = Execution(threads=1, progress_seconds=0.0, function=asked.function)
    run_trial(trial, asked.folder / trial.id, options, sent.append)
    (epoch,) = (e for e in map(parse_event, sent) if e.kind == "epoch")
    assert (epoch.epoch, epoch.valid, epoch.test, epoch.status) == (1, {"accuracy": 0.5}, {}, "")
    assert RunStore(asked.folder / trial.id).lines()[0]["test"] == 0.4


def test_methods_added_after_a_look_are_noted_whichever_way_they_are_added(ask, run, tmp_path):
    asked = ask("drop_key(rate=0.2)", seeds=2)
    run(asked)
    again = ask("drop_key(rate=0.2), drop_head(rate=0.2)", seeds=2)
    assert again.plan.header["added"] == {"drop_head(rate=0.2)": 1}
    run(again)
    third = ask("r_drop", seeds=2)
    assert third.plan.header["added"] == {"drop_head(rate=0.2)": 1, "r_drop": 2}
    assert "added" not in ask("drop_key(rate=0.2)", seeds=2, folder=tmp_path / "x").plan.header
