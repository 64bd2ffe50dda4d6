"""Hugging Face's Trainer resumed in the middle, and its best checkpoint taken back."""

import pytest
import torch

import dampen
from dampen import HardMasking, Mixout
from tests.integrations.hf_loop import arguments, logged, make
from tests.integrations.tiny import METHODS, bert, same, sentences, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]


@pytest.mark.parametrize("kind", [*METHODS, "learned", "mixout"])
def test_resumed_in_the_middle_equals_a_run_in_one_go(tmp_path, kind):
    made = {
        **METHODS, "learned": lambda: [HardMasking(0.3, learn="rate")], "mixout": lambda: [Mixout(0.5)],
    }  # fmt: skip
    results, data = [], sentences(32)
    for resume in (False, True):
        model = bert(seed=0)
        reg = None if made[kind]() is None else dampen.regularize(model, made[kind]())
        args = arguments(tmp_path / str(resume), 2, save_strategy="steps", save_steps=2)
        trainer = make(model, data, args, reg)
        if resume:
            source = tmp_path / "False" / "checkpoint-2"
            trainer.train(resume_from_checkpoint=str(source))
        else:
            trainer.train()
        learnt = {} if reg is None else reg.state_dict()["parameters"]
        results.append((weights(model), learnt, logged(trainer)[-2:]))
    same(results[0][0], results[1][0])
    same(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]
    if kind in ("learned", "mixout"):
        assert results[0][1]


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
