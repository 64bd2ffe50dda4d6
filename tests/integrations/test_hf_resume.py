"""Hugging Face's Trainer resumed in the middle, and its best checkpoint taken back."""

import pytest
import torch

import dampen
from dampen import HardMasking, Mixout
from tests.full import product
from tests.integrations.hf_loop import arguments, bare, logged, make
from tests.integrations.tiny import METHODS, bert, same, sentences, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]


KINDS = {
    **METHODS,
    "learned": lambda: [HardMasking(0.3, learn="rate")],
    "mixout": lambda: [Mixout(0.5)],
}


@pytest.mark.parametrize(("kind", "accumulation"), product(KINDS, [1, 4]))
def test_resumed_in_the_middle_equals_a_loop_by_hand(tmp_path, kind, accumulation):
    """Resumed from other weights, those that Mixout starts from among them: the loop never stopped."""
    data, logs = sentences(32), []

    def made(seed):
        model, methods = bert(seed=seed), KINDS[kind]()
        return model, None if methods is None else dampen.regularize(model, methods)

    twin, hand = made(0)
    losses = bare(twin, hand, data, accumulation)
    for resume in (False, True):
        model, reg = made(5 if resume else 0)
        args = arguments(tmp_path / str(resume), accumulation, save_strategy="steps", save_steps=2)
        trainer = make(model, data, args, reg)
        trainer.train(
            resume_from_checkpoint=str(tmp_path / "False" / "checkpoint-2") if resume else None
        )
        same(weights(model), weights(twin))
        if reg is not None:
            learnt = reg.state_dict()["parameters"]
            same(learnt, hand.state_dict()["parameters"])
            assert bool(learnt) == (kind in ("learned", "mixout"))
        logs.append(logged(trainer)[-2:])
    assert logs[0] == logs[1] == pytest.approx(losses[-2:], rel=1e-6)


def test_resume_from_a_checkpoint_without_the_handles_state_says_so(tmp_path):
    model = bert()
    args = arguments(tmp_path, 1, save_strategy="steps", save_steps=2)
    make(model, sentences(), args, None).train()
    reg = dampen.regularize(model, Mixout(0.5))
    trainer = make(model, sentences(), args, reg)
    with pytest.raises(FileNotFoundError, match=r"no dampen.pt"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_load_best_model_at_end_takes_the_learned_rates_back(tmp_path):
    model = bert()
    reg = dampen.regularize(model, HardMasking(0.3, learn="rate"))
    args = arguments(
        tmp_path, 1, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True,
    )  # fmt: skip
    trainer = make(model, sentences(), args, reg)
    trainer.train()
    best = torch.load(f"{trainer.state.best_model_checkpoint}/dampen.pt", weights_only=True)
    same(reg.state_dict()["parameters"], best["parameters"])
    last = torch.load(tmp_path / "checkpoint-4" / "dampen.pt", weights_only=True)
    if trainer.state.best_model_checkpoint != str(tmp_path / "checkpoint-4"):
        assert any(not torch.equal(last["parameters"][n], v) for n, v in best["parameters"].items())
