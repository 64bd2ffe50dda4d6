import json
import math

import pytest
import torch

from dampen.studies.errors import ConfigError, Diverged
from dampen.studies.run import Run, TrainOptions
from dampen.studies.store import RunStore
from dampen.studies.trainer.checkpoint import fingerprint, load_state, saved_states
from dampen.studies.trainer.optim import (
    Meter,
    MovingAverage,
    NotFinite,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    task_loss,
)
from dampen.studies.trainer.state import TrialState
from dampen.studies.trainer.train import run_trial


def test_training_learns_and_leaves_a_complete_record(tmp_path, small, quick):
    events = []
    result = run_trial(small(epochs=12, lr=5e-3), tmp_path, quick, events.append)
    assert result["status"] == "finished"
    assert result["test"]["accuracy"] > 0.5  # chance is 0.1
    lines = RunStore(tmp_path).lines()
    assert [line["epoch"] for line in lines] == list(range(1, 13))
    assert lines[-1]["train"]["task"] < lines[0]["train"]["task"]
    best = max(lines, key=lambda line: line["valid"]["accuracy"])
    assert result["valid"] == best["valid"]
    assert result["selected_epoch"] == best["epoch"]
    assert RunStore(tmp_path).final() == result
    environment = RunStore(tmp_path).sessions()[0]
    assert environment["threads"] == 1
    assert environment["packages"]["torch"] == torch.__version__
    assert not saved_states(tmp_path, "checkpoint")
    assert not (tmp_path / "lock.holder").exists()
    assert [e["kind"] for e in events if e["kind"] != "progress"] == [
        "start",
        *["epoch"] * 12,
        "finish",
    ]
    progress = [e for e in events if e["kind"] == "progress"]
    assert progress[-1]["step"] == progress[-1]["steps"] == result["steps"]
    assert "task" in progress[0]["terms"]
    assert progress[0]["epoch"] == 1
    assert (
        progress[-1]["epoch"] == progress[-1]["epochs"] == 12
    )  # not one more at an epoch's last step


def test_a_finished_trial_is_not_run_again(tmp_path, small, quick):
    first = run_trial(small(epochs=1), tmp_path, quick)
    events = []
    assert run_trial(small(epochs=1), tmp_path, quick, events.append) == first
    assert not events


def test_the_same_trial_gives_the_same_weights_and_seeds_differ(tmp_path, small, quick):
    a = run_trial(small(epochs=1), tmp_path / "a", quick)
    b = run_trial(small(epochs=1), tmp_path / "b", quick)
    c = run_trial(small(epochs=1, seed=1), tmp_path / "c", quick)
    assert a["last_weights"] == b["last_weights"] != c["last_weights"]


def test_trials_of_one_seed_start_from_the_same_weights_and_see_the_same_batches(small, quick):
    plain, dropped = (
        TrialState(small(), quick),
        TrialState(small([{"name": "drop_key", "rate": 0.3}]), quick),
    )
    for (name, p), (_, q) in zip(
        plain.raw.state_dict().items(), dropped.raw.state_dict().items(), strict=True
    ):
        assert torch.equal(p, q), name
    one, two = next(plain.batches())[0][0], next(dropped.batches())[0][0]
    assert torch.equal(one["index"], two["index"])


def test_a_plain_trial_has_no_handle(small, quick):
    assert TrialState(small(), quick).handle is None


def test_the_saved_weights_are_the_selected_ones(tmp_path, small, quick):
    trial = small(epochs=4, lr=0.02)
    result = run_trial(trial, tmp_path, quick)
    (path,) = saved_states(tmp_path, "weights")
    session = TrialState(trial, quick)
    session.raw.load_state_dict(load_state(path)["model"])
    assert session.evaluate("valid") == pytest.approx(result["valid"])
    assert session.evaluate("test") == pytest.approx(result["test"])


def test_methods_log_their_penalties_by_name(tmp_path, small, quick):
    from dampen.registry import methods

    with_penalty = [
        n for n in ("head_diversity", "explicit_dropout", "attention_entropy") if n in methods()
    ]
    arguments = {
        "head_diversity": {"weight": 0.1},
        "explicit_dropout": {"value": 0.1, "ffn": 0.1},
        "attention_entropy": {"weight": 0.1},
    }
    for name in with_penalty:
        result = run_trial(
            small([{"name": name, **arguments[name]}], epochs=1), tmp_path / name, quick
        )
        assert [t for t in result["train"] if t.startswith(name)], result["train"]
        assert math.isfinite(result["train"]["task"])
    result = run_trial(
        small([{"name": "drop_key", "rate": 0.3}], epochs=1), tmp_path / "drop_key", quick
    )
    assert set(result["train"]) == {"task"}  # no penalty, no term


def test_accumulated_steps_equal_whole_steps(tmp_path, small, quick):
    whole = run_trial(small(epochs=1), tmp_path / "whole", quick)
    parts = run_trial(small(epochs=1, accumulate=4), tmp_path / "parts", quick)
    assert parts["train"]["task"] == pytest.approx(whole["train"]["task"], rel=1e-5)
    assert parts["test"]["nll"] == pytest.approx(whole["test"]["nll"], rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16"}, {"precision": "fp16", "clip": 1.0}, {"optimizer": "sgd", "lr": 0.1}],
)
def test_precisions_and_optimizers_learn(tmp_path, small, quick, options):
    result = run_trial(
        small(**{"epochs": 6, "lr": 5e-3, "warmup": 1.0, **options}), tmp_path, quick
    )
    lines = RunStore(tmp_path).lines()
    assert lines[-1]["train"]["task"] < lines[0]["train"]["task"] - 0.1
    assert result["test"]["accuracy"] > 0.15


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch"
)
def test_a_compiled_trial_ends_like_an_eager_one(tmp_path, small, quick):
    methods = [{"name": "explicit_dropout", "value": 0.05, "ffn": 0.05}]
    eager, compiled = (
        run_trial(small(methods, epochs=1, compile=c), tmp_path / str(c), quick)
        for c in (False, True)
    )
    assert compiled["train"] == pytest.approx(eager["train"], rel=1e-3)
    assert compiled["test"]["nll"] == pytest.approx(eager["test"]["nll"], rel=1e-3)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"clip": 0.5}])
def test_one_device_without_fabrics_wrappers_ends_on_the_same_bits_as_with_them(
    tmp_path, small, quick, options
):
    trial = small([{"name": "drop_key", "rate": 0.3}], epochs=1, **options)
    result = run_trial(trial, tmp_path, quick)
    s = TrialState(trial, quick)
    assert s.alone
    s.model.train()
    for ((batch, _),) in s.batches():
        set_learning_rate(s.optimizer, learning_rate(s.step, s.total, s.per_epoch, s.options))
        s.handle.progress(s.step / s.total)
        s.fabric.backward(s.losses(batch)[0])
        if s.options.clip:
            s.fabric.clip_gradients(
                s.model, s.optimizer, max_norm=s.options.clip, error_if_nonfinite=False
            )
        s.optimizer.step()
        s.optimizer.zero_grad(set_to_none=True)
        s.step += 1
    assert fingerprint(s.raw.state_dict()) == result["last_weights"]


def test_the_average_of_a_method_is_what_is_evaluated(tmp_path, small, quick):
    """Of equal trainings, the one with WeightAverage is evaluated at another point."""
    average = {"name": "weight_average", "kind": "swa", "start": 0.0}
    plain, averaged = (TrialState(small(methods, lr=0.05), quick) for methods in ([], [average]))
    for state in (plain, averaged):
        for ((batch, _),) in state.batches():
            state.backward(state.losses(batch)[0])
            state.stepper.step()
            state.stepper.zero_grad()
    own, found = dict(plain.raw.named_parameters()), averaged.weights()
    assert all(torch.equal(p, own[n]) for n, p in averaged.raw.named_parameters())
    assert not all(torch.equal(p, found[n]) for n, p in own.items())
    assert averaged.evaluate("valid") != plain.evaluate("valid")


def test_weight_decay_as_a_method_is_the_decay_of_the_trainer(tmp_path, small, quick):
    """Its rate takes the place of the training option: the same weights as with that option."""
    decay = {"name": "weight_decay", "rate": 0.3}
    runs = [
        run_trial(small(methods, epochs=1, weight_decay=own), tmp_path / str(i), quick)
        for i, (methods, own) in enumerate([([], 0.3), ([decay], 0.1)])
    ]
    assert runs[0]["test"] == runs[1]["test"]


def test_the_moving_average_is_what_is_evaluated(tmp_path, small, quick):
    result = run_trial(small(epochs=3, ema=0.9), tmp_path, quick)
    assert result["last_weights"] != result["selected_weights"]
    model = torch.nn.Linear(2, 2)
    start = model.weight.detach().clone()
    average = MovingAverage(model, 0.5)
    with torch.no_grad():
        model.weight += 1.0
    average.update(model)  # the first decay is 1/10
    with average.swapped_in(model):
        assert torch.allclose(model.weight, start + 0.9)
    assert torch.equal(model.weight, start + 1.0)


def test_early_stopping_counts_validations_without_improvement(tmp_path, small, quick):
    result = run_trial(small(epochs=50, lr=1e-9, patience=2, schedule="constant"), tmp_path, quick)
    lines = RunStore(tmp_path).lines()
    assert result["epochs"] == len(lines) < 50
    assert result["selected_epoch"] == len(lines) - 2


def test_tensorboard_gets_the_scalars(tmp_path, small, quick):
    from dataclasses import replace

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_trial(small(epochs=2), tmp_path, replace(quick, tensorboard=True))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert {"train/task", "valid/accuracy", "train/lr"} <= set(board.Tags()["scalars"])
    assert len(board.Scalars("valid/accuracy")) == 2


def test_nan_loss_stops_names_the_term_and_keeps_the_last_good_weights(
    tmp_path, small, quick, monkeypatch
):
    normal = TrialState.losses

    def explode(self, batch):
        loss, terms = normal(self, batch)
        bad = loss * (float("inf") if self.step == 3 else 1.0)
        return loss + bad, {**terms, "explicit_dropout.ffn": bad}

    monkeypatch.setattr(TrialState, "losses", explode)
    trial = small()
    with pytest.raises(
        Diverged, match=r"step 3 .*'explicit_dropout\.ffn' became NaN or infinite first"
    ):
        run_trial(trial, tmp_path, quick)
    final = RunStore(tmp_path).final()
    assert final["status"] == "diverged"
    assert final["terms"] == ["explicit_dropout.ffn"]
    (path,) = saved_states(tmp_path, "good")
    good = load_state(path)
    assert good["step"] == 3
    assert all(torch.isfinite(t).all() for t in good["model"].values())
    with pytest.raises(Diverged):  # the record says so again, without running
        run_trial(trial, tmp_path, quick)


def test_a_bad_gradient_under_a_fine_loss_never_reaches_the_weights(
    tmp_path, small, quick, monkeypatch
):
    normal = TrialState.losses

    def spoil(self, batch):
        loss, _ = normal(self, batch)
        if self.step == 2:
            zero = (self.probe * 0).sum()
            loss = loss + torch.sqrt(zero) * 0  # value 0, gradient 0 * inf
        return loss, {"task": loss}

    monkeypatch.setattr(TrialState, "losses", spoil)
    with pytest.raises(Diverged, match=r"step 2 .*the gradient became NaN"):
        run_trial(small(), tmp_path, quick)
    (path,) = saved_states(tmp_path, "good")
    assert all(torch.isfinite(t).all() for t in load_state(path)["model"].values())


def test_the_meter_names_the_first_bad_term_even_when_it_looks_late():
    meter = Meter(torch.device("cpu"))
    meter.every = 10
    for step, penalty in enumerate([1.0, float("nan"), float("nan")]):
        meter.add(step, {"task": torch.tensor(1.0), "penalty": torch.tensor(penalty)})
    with pytest.raises(NotFinite) as caught:
        meter.flush()
    assert (caught.value.step, caught.value.names) == (1, ["penalty"])


def test_learning_rates():
    constant = TrainOptions(lr=1.0, schedule="constant", warmup=2.0)
    assert [learning_rate(s, 100, 2, constant) for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    steps = TrainOptions(lr=1.0, schedule="step", step_every=2.0, step_factor=0.1)
    assert [learning_rate(s, 100, 2, steps) for s in (3, 4, 8)] == pytest.approx([1.0, 0.1, 0.01])
    floor = TrainOptions(lr=1.0, final_lr=0.1)
    assert learning_rate(99, 100, 10, floor) == pytest.approx(0.1, abs=1e-3)


def test_norms_biases_and_learned_rates_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    learned = torch.nn.Parameter(torch.zeros(3, 3))
    model.register_parameter("learned", learned)
    decayed, free = make_optimizer(model, [learned], TrainOptions()).param_groups
    assert [p.ndim for p in decayed["params"]] == [2]
    assert free["weight_decay"] == 0
    assert any(p is learned for p in free["params"])


def test_losses_against_hand_written_ones():
    torch.manual_seed(0)
    logits, target = torch.randn(4, 3, 5), torch.randint(5, (4, 3))
    valid = torch.rand(4, 3) > 0.4
    logs = logits.log_softmax(-1)
    by_hand = -logs.gather(-1, target[..., None])[..., 0][valid].mean()
    assert task_loss(logits, target, valid, "cross_entropy") == pytest.approx(
        by_hand.item(), rel=1e-6
    )
    soft = torch.nn.functional.one_hot(target, 5).float()
    assert task_loss(logits, soft, valid, "cross_entropy") == pytest.approx(
        by_hand.item(), rel=1e-6
    )
    smooth = 0.9 * soft + 0.1 / 5
    assert task_loss(logits, target, valid, "cross_entropy", 0.1) == pytest.approx(
        -(smooth * logs).sum(-1)[valid].mean().item(), rel=1e-5
    )
    p = logits.sigmoid()
    binary = -(soft * p.log() + (1 - soft) * (1 - p).log()).mean(-1)[valid].mean()
    assert task_loss(logits, soft, valid, "binary_cross_entropy") == pytest.approx(
        binary.item(), rel=1e-5
    )


def test_all_problems_of_a_trial_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        Run.from_dict(
            {
                "data": {},
                "model": {"name": "vit"},
                "train": {"learning_rate": 1, "epochs": 0, "optimizer": "adamm"},
                "sedd": 1,
            }
        )
    text = str(caught.value)
    assert "sedd: unknown key; did you mean 'seed'?" in text
    assert "data.name: missing" in text
    assert "train.learning_rate: unknown key" in text
    assert "did you mean 'adamw'?" in text or "did you mean 'adam'?" in text
    assert "epochs: must be 1 or more, got 0" in text


def test_the_hash_sees_content_only(small):
    a = small()
    assert a.id == Run.from_dict(json.loads(json.dumps(a.to_dict()))).id
    assert a.id != small(lr=2.1e-3).id
    one = Run(
        {"name": "digits", "partial": False},
        {"name": "vit", "depth": 2},
        ({"name": "drop_key", "rate": 0},),
    )
    two = Run(
        {"name": "digits"}, {"depth": 2.0, "name": "vit"}, ({"rate": 0.0, "name": "drop_key"},)
    )
    assert one.id == two.id


def test_a_batch_larger_than_the_data_is_refused(tmp_path, small, quick):
    with pytest.raises(ConfigError, match="batch_size: 4096 is more than"):
        run_trial(small(batch_size=4096), tmp_path, quick)
