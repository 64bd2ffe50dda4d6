"""Hugging Face's Trainer: what is logged, what stays plain, other heads, and what is refused."""

import pytest
import torch
import transformers as tr
from transformers import TrainerCallback

import dampen
from dampen import AttentionEntropy, DropKey, ExplicitDropout, NEFTune, RDrop
from dampen.integrations import hf
from tests.integrations.hf_loop import arguments, bare, logged, make
from tests.integrations.tiny import OFF, SIZES, batch, bert, llama, same, sentences, texts, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]


def test_terms_are_logged_by_name_and_sum_to_the_loss(tmp_path):
    model, data = bert(), sentences(32)
    reg = dampen.regularize(model, [DropKey(0.3), ExplicitDropout(value=3.0, ffn=1.0), RDrop(2.0)])
    trainer = make(model, data, arguments(tmp_path, 4, logging_steps=2), reg)
    trainer.train()
    names = [
        "task",
        "explicit_dropout.value",
        "explicit_dropout.ffn1",
        "explicit_dropout.ffn2",
        "r_drop",
    ]
    parts = [logged(trainer, f"dampen/{name}") for name in names]
    assert all(len(p) == 2 for p in parts)
    assert [sum(p) for p in zip(*parts, strict=True)] == pytest.approx(logged(trainer), rel=1e-5)
    assert all(value > 0 for p in parts for value in p)


def test_schedules_follow_the_steps(tmp_path):
    model, seen = bert(), []
    reg = dampen.regularize(model, DropKey(dampen.linear(0.4, 0.0, along="progress")))
    trainer = make(model, sentences(32), arguments(tmp_path, 2), reg)

    class See(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(round(reg.clones[0].rate.item(), 6))

    trainer.add_callback(See())
    trainer.train()
    assert seen == [0.4, 0.3, 0.2, 0.1]


def test_evaluate_predict_and_generate_are_plain(tmp_path):
    model, plain, data = llama(), llama(), texts()
    reg = dampen.regularize(model, [DropKey(0.4), ExplicitDropout(value=50.0), RDrop(5.0)])
    trainer = make(model, data, arguments(tmp_path), reg)
    other = make(plain, data, arguments(tmp_path), None)
    assert trainer.evaluate()["eval_loss"] == other.evaluate()["eval_loss"]
    assert (trainer.predict(data[:4]).predictions == other.predict(data[:4]).predictions).all()
    trainer.train()
    plain.load_state_dict(model.state_dict())
    prompt = batch(data[:2])["input_ids"][:, :3]
    given = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(
        model.eval().generate(prompt, **given), plain.eval().generate(prompt, **given)
    )


def test_gradient_checkpointing(tmp_path):
    runs = []
    for checkpointing in (False, True):
        model = llama()
        reg = dampen.regularize(model, [DropKey(0.3), ExplicitDropout(value=3.0)])
        args = arguments(
            tmp_path, 2, activation_checkpointing=checkpointing,
            activation_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        )  # fmt: skip
        trainer = make(model, texts(), args, reg)
        trainer.train()
        runs.append(logged(trainer))
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", ["regression", "tokens"])
def test_r_drop_for_regression_and_for_token_classification(tmp_path, kind, accumulation):
    """Squared distance of predictions; KL over the tokens that have a label. Against the loop by hand."""

    def build():
        torch.manual_seed(0)
        if kind == "regression":
            return bert(labels=1)
        return tr.BertForTokenClassification(
            tr.BertConfig(vocab_size=30, **SIZES, **OFF, num_labels=4)
        )

    if kind == "regression":
        data = [{**row, "labels": row["labels"].float()} for row in sentences(32)]
    else:
        data = [
            {**row, "labels": row["labels"].where(row["labels"] < 0, row["labels"] % 4)}
            for row in texts(32)
        ]
    methods = [DropKey(0.3), RDrop(2.0, distance="mse" if kind == "regression" else "kl")]
    model, twin = build(), build()
    trainer = make(
        model, data, arguments(tmp_path, accumulation), dampen.regularize(model, methods)
    )
    trainer.train()
    losses = bare(
        twin, dampen.regularize(twin, methods), data, accumulation, tokens=kind == "tokens"
    )
    assert logged(trainer) == pytest.approx(losses, rel=1e-6)
    same(weights(model), weights(twin))
    assert all(v > 0 for v in logged(trainer, "dampen/r_drop"))


def test_what_cannot_work_is_refused(tmp_path):
    model = bert()
    trainer = make(model, sentences(), arguments(tmp_path), None)
    with pytest.raises(ValueError, match="is not the model that was regularized"):
        hf.install(trainer, dampen.regularize(bert(), DropKey(0.1)))
    reg = dampen.regularize(model, [AttentionEntropy(0.1), DropKey(0.1)])
    hf.install(trainer, reg)
    with pytest.raises(ValueError, match="install it once"):
        hf.install(trainer, reg)
    with pytest.raises(TypeError, match="got a? ?list|got list"):
        hf.install([], reg)
    noisy = bert()
    trainer = make(noisy, sentences(), arguments(tmp_path, neftune_noise_alpha=5.0), None)
    with pytest.raises(ValueError, match="would both add noise"):
        hf.install(trainer, dampen.regularize(noisy, NEFTune()))
