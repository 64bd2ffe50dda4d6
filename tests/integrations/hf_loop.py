"""What the tests of Hugging Face's Trainer share: a trainer on little data, and the loop by hand that it must equal."""

import torch
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

import dampen
from dampen.integrations import hf
from tests.integrations.tiny import METHODS, batch

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


def bare(model, reg, data, accumulation, steps=4, **options):
    """The loop that a user would write: each micro-batch's task loss over the step's items, penalties averaged."""
    language = options.get("language", False)
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
            loss = micro_loss(model, reg, inputs, items, accumulation, **options)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def micro_loss(
    model, reg, inputs, items, accumulation, smoothing=0.0, language=False, tokens=False, autocast=False
):  # fmt: skip
    """`language`: position t predicts the label at t + 1; `tokens`: the label at t."""
    given = dict(inputs)
    labels = given.pop("labels") if smoothing else given["labels"]

    def task(out):
        if smoothing:
            return LabelSmoother(epsilon=smoothing)(
                out, labels, shift_labels=language, num_items_in_batch=items
            )
        return out.loss

    valid = labels != -100 if tokens else None
    if language:
        valid = F.pad(labels[..., 1:], (0, 1), value=-100) != -100
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if reg is None:
            return task(model(**given, num_items_in_batch=items))
        _, terms = reg.loss(lambda: model(**given, num_items_in_batch=items), task, valid=valid)
    return sum(
        (v / accumulation for name, v in terms.items() if name != "task"), start=terms["task"]
    )


def regularized(model, kind):
    methods = METHODS[kind]()
    return None if methods is None else dampen.regularize(model, methods)
