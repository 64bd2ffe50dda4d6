"""Hugging Face's Trainer against a loop written by hand: logged losses and final weights, to the bit."""

import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

import dampen
from dampen import AttentionEntropy, DropKey, ExplicitDropout, HardMasking, Mixout, NEFTune, RDrop
from dampen.integrations import hf
from tests.integrations.tiny import METHODS, batch, bert, llama, same, sentences, texts, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]

RATE, SIZE = 0.1, 2


class Seeded(TrainerCallback):
    """The same draws in each step as in the loop by hand."""

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(100 + state.global_step)


def arguments(folder, accumulation=1, steps=4, **options):
    given = {
        "per_device_train_batch_size": SIZE, "gradient_accumulation_steps": accumulation, "max_steps": steps,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
        "max_grad_norm": 0.0, "seed": 3, "train_sampling_strategy": "sequential", **options,
    }  # fmt: skip
    return TrainingArguments(str(folder), **given)


def make(model, data, args, reg, cls=Trainer):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = cls(
        model=model, args=args, train_dataset=data, eval_dataset=data[:4], optimizers=(optimizer, schedule),
        callbacks=[Seeded()],
    )  # fmt: skip
    return trainer if reg is None else hf.install(trainer, reg)


def logged(trainer, key="loss"):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def bare(model, reg, data, accumulation, steps=4, smoothing=0.0, language=False, autocast=False):
    """The loop that a user would write: each micro-batch's task loss over the step's items, penalties averaged."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model.train()
    losses = []
    for step in range(steps):
        torch.manual_seed(100 + step)
        if reg is not None:
            reg.progress(step / steps)
        start = step * SIZE * accumulation
        rows = [data[(start + i) % len(data)] for i in range(SIZE * accumulation)]
        micro = [batch(rows[i : i + SIZE]) for i in range(0, len(rows), SIZE)]
        counted = [m["labels"][..., 1:] if language else m["labels"] for m in micro]
        items = sum((c != -100).sum() for c in counted)
        total = torch.zeros(())
        for inputs in micro:
            loss = micro_loss(model, reg, inputs, items, accumulation, smoothing, language, autocast)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def micro_loss(model, reg, inputs, items, accumulation, smoothing, language, autocast):
    given = dict(inputs)
    labels = given.pop("labels") if smoothing else given["labels"]

    def task(out):
        if smoothing:
            return LabelSmoother(epsilon=smoothing)(out, labels, shift_labels=language, num_items_in_batch=items)
        return out.loss

    valid = (F.pad(labels[..., 1:], (0, 1), value=-100) != -100) if language else None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if reg is None:
            return task(model(**given, num_items_in_batch=items))
        _, terms = reg.loss(lambda: model(**given, num_items_in_batch=items), task, valid=valid)
    return sum((v / accumulation for name, v in terms.items() if name != "task"), start=terms["task"])


def regularized(model, kind):
    methods = METHODS[kind]()
    return None if methods is None else dampen.regularize(model, methods)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("language", [False, True])
def test_same_losses_and_weights_as_a_loop_by_hand(tmp_path, kind, accumulation, language):
    build, data = (llama, texts(32)) if language else (bert, sentences(32))
    model, twin = build(), build()
    trainer = make(model, data, arguments(tmp_path, accumulation), regularized(model, kind))
    trainer.train()
    losses = bare(twin, regularized(twin, kind), data, accumulation, language=language)
    assert logged(trainer) == pytest.approx(losses, rel=1e-6)
    same(weights(model), weights(twin))


@pytest.mark.parametrize("language", [False, True])
@pytest.mark.parametrize("kind", ["penalty", "two_pass"])
def test_label_smoothing(tmp_path, kind, language):
    build, data = (llama, texts(32)) if language else (bert, sentences(32))
    model, twin = build(), build()
    trainer = make(model, data, arguments(tmp_path, 4, label_smoothing_factor=0.2), regularized(model, kind))
    trainer.train()
    losses = bare(twin, regularized(twin, kind), data, 4, smoothing=0.2, language=language)
    assert logged(trainer) == pytest.approx(losses, rel=1e-6)
    same(weights(model), weights(twin))


def test_bf16(tmp_path):
    model, twin, data = bert(), bert(), sentences(32)
    trainer = make(model, data, arguments(tmp_path, 2, bf16=True), regularized(model, "penalty"))
    trainer.train()
    losses = bare(twin, regularized(twin, "penalty"), data, 2, autocast=True)
    assert logged(trainer) == pytest.approx(losses, rel=1e-2)
    same(weights(model), weights(twin), tolerance=2e-2)


def test_a_loss_function_of_ones_own(tmp_path):
    """`compute_loss_func` gets the whole step's items and is not divided: the penalty is."""

    def own(outputs, labels, num_items_in_batch=None):
        logits, targets = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        return F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

    data, runs = texts(32), []
    for given in (own, None):
        model = llama()
        reg = dampen.regularize(model, ExplicitDropout(value=3.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        trainer = Trainer(
            model=model, args=arguments(tmp_path, 4), train_dataset=data, compute_loss_func=given,
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        )  # fmt: skip
        hf.install(trainer, reg)
        trainer.train()
        runs.append((logged(trainer), weights(model)))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-5)
    same(runs[0][1], runs[1][1], tolerance=1e-5)


def test_terms_are_logged_by_name_and_sum_to_the_loss(tmp_path):
    model, data = bert(), sentences(32)
    reg = dampen.regularize(model, [DropKey(0.3), ExplicitDropout(value=3.0, ffn=1.0), RDrop(2.0)])
    trainer = make(model, data, arguments(tmp_path, 4, logging_steps=2), reg)
    trainer.train()
    names = ["task", "explicit_dropout.value", "explicit_dropout.ffn1", "explicit_dropout.ffn2", "r_drop"]
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
    assert torch.equal(model.eval().generate(prompt, **given), plain.eval().generate(prompt, **given))


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


def test_token_classification_and_regression_with_r_drop(tmp_path):
    import transformers as tr

    from tests.integrations.tiny import OFF, SIZES

    torch.manual_seed(0)
    model = tr.BertForTokenClassification(tr.BertConfig(vocab_size=30, **SIZES, **OFF, num_labels=4))
    data = [{**row, "labels": row["labels"].where(row["labels"] < 0, row["labels"] % 4)} for row in texts()]
    reg = dampen.regularize(model, [DropKey(0.3), RDrop(2.0)])
    trainer = make(model, data, arguments(tmp_path, 2), reg)
    trainer.train()
    assert all(v > 0 for v in logged(trainer, "dampen/r_drop"))

    model = bert(labels=1)
    data = [{**row, "labels": row["labels"].float()} for row in sentences()]
    reg = dampen.regularize(model, [DropKey(0.3), RDrop(2.0, distance="mse")])
    trainer = make(model, data, arguments(tmp_path, 2), reg)
    trainer.train()
    assert all(v > 0 for v in logged(trainer, "dampen/r_drop"))


def test_a_trainer_class_of_ones_own(tmp_path):
    class MyTrainer(hf.Regularized, Trainer):
        pass

    model, twin, data = bert(), bert(), sentences(32)
    reg = dampen.regularize(model, METHODS["penalty"]())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = MyTrainer(
        model=model, args=arguments(tmp_path, 4), train_dataset=data, optimizers=(optimizer, schedule),
        regularization=reg,
    )  # fmt: skip
    trainer.train()
    bare(twin, dampen.regularize(twin, METHODS["penalty"]()), data, 4)
    same(weights(model), weights(twin))


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
