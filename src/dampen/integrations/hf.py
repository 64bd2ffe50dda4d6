"""Hugging Face's Trainer, and those built on it: TRL's SFT and DPO trainers, sentence-transformers.

    reg = dampen.regularize(model, [DropKey(0.1), RDrop(1.0)])
    trainer = Trainer(model=model, args=args, train_dataset=data)
    dampen.integrations.hf.install(trainer, reg)
    trainer.train()

What it sees to: penalties reach the loss once, as the mean over a step's micro-batches and ranks;
two-pass methods run `compute_loss` twice; schedules follow `global_step / max_steps`; the terms are
logged by name; checkpoints hold the handle's state. Evaluation, `predict` and `generate` are left
as they are.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import TrainerCallback

from dampen.handle import Handle
from dampen.integrations.watching import OutputWatch, predictions, watching
from dampen.methods.neftune import NEFTune

STATE = "dampen.pt"
"""The handle's state in a checkpoint's folder."""


def install(trainer: Any, reg: Handle) -> Any:
    """Make a trainer that exists train with `reg`; returns the trainer, which is changed in place.

    The model was regularized before the trainer was made, or is `trainer.model` and was regularized
    since. A trainer class of your own can say `class MyTrainer(hf.Regularized, Trainer)` instead,
    and take `regularization=reg`.

    Args:
        trainer: a Trainer of transformers, TRL or sentence-transformers.
        reg: the handle that `dampen.regularize` returned.
    """
    if isinstance(trainer, Regularized):
        raise ValueError(
            f"this {type(trainer).__name__} has a regularization already: install it once."
        )
    if not hasattr(trainer, "compute_loss") or not hasattr(trainer, "add_callback"):
        raise TypeError(
            f"install takes a transformers.Trainer or a subclass of it, got "
            f"{type(trainer).__name__}."
        )
    check(trainer, reg)
    cls = type(trainer)
    trainer.__class__ = type(
        cls.__name__, (Regularized, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__}
    )
    trainer.adopt(reg)
    return trainer


class Regularized:
    """Mixin in front of a Trainer class: `class MyTrainer(Regularized, Trainer)`, then
    `MyTrainer(..., regularization=reg)`.

    Args:
        regularization: the handle that `dampen.regularize` returned.
    """

    regularization: Handle

    def __init__(self, *args: Any, regularization: Handle, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check(self, regularization)
        self.adopt(regularization)

    def adopt(self: Any, reg: Handle) -> None:
        """Take over a regularization: its schedules follow training from here on.

        Args:
            reg: the handle that `dampen.regularize` returned.
        """
        self.regularization = reg
        # sums of this process since they were last logged
        self._dampen_terms: dict[str, Tensor] = {}
        self._dampen_logged = 0  # the step at which they were
        self.add_callback(Progress(self))

    # --- the loss

    def compute_loss(
        self: Any,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """The trainer's own loss of each pass, and the penalties; plain outside training.

        Args:
            model: the model.
            inputs: one batch of the trainer.
            return_outputs: as transformers passes it.
            num_items_in_batch: what the trainer passes to its loss.
        """
        reg, inner = self.regularization, super().compute_loss  # type: ignore[misc]
        if not (reg.model.training and torch.is_grad_enabled()):
            return inner(
                model,
                inputs,
                return_outputs=return_outputs,
                num_items_in_batch=num_items_in_batch,
                **kwargs,
            )
        valid = valid_positions(inputs, shifted(self)) if reg.reads_outputs else None
        last: list[Any] = []

        def forward() -> tuple[Tensor, Tensor | None]:
            # a copy, because trainers take the labels out of what they get; outputs only where the
            # trainer itself requests them, because TRL's cost a forward of their own
            loss = inner(
                model,
                dict(inputs),
                return_outputs=return_outputs,
                num_items_in_batch=num_items_in_batch,
                **kwargs,
            )
            if return_outputs:
                loss, last[:] = loss[0], [loss[1]]
            return loss, self._dampen_predictions(watch) if reg.reads_outputs else None

        trainer: Any = self
        below = backbone_of(trainer.model) if reg.reads_outputs else None
        with watching(trainer.model, reg, below) as watch:
            total, terms = reg.loss(
                forward, lambda pair: pair[0], logits=lambda pair: pair[1], valid=valid
            )
        steps = trainer.current_gradient_accumulation_steps
        # the task's loss is over the whole step; a penalty is not yet
        if averaged_already(self, num_items_in_batch):
            total = sum(
                (v / steps for name, v in terms.items() if name != "task"), start=terms["task"]
            )
            self._dampen_note({k: v if k == "task" else v / steps for k, v in terms.items()})
        else:  # the trainer divides the sum itself
            self._dampen_note({k: v / steps for k, v in terms.items()})
        if return_outputs:
            return (total, last[0])
        return total

    def _dampen_predictions(self: Any, watch: OutputWatch) -> Tensor:
        """What two passes are compared by. TRL's fused head gives no logits: they are made of the
        hidden states."""
        outputs, hidden = watch.take()
        found = predictions(outputs)
        if found is None and hidden:
            head = self.accelerator.unwrap_model(self.model).get_output_embeddings()
            found = head(hidden[-1])
        if found is None:
            kinds = ", ".join(sorted({type(o).__name__ for o in outputs})) or "none"
            raise TypeError(
                f"two passes are compared by the model's logits, but {type(self).__name__} got "
                "outputs without any "
                f"({kinds}). Use methods of one pass here."
            )
        return found

    # --- logs

    def _dampen_note(self: Any, terms: dict[str, Tensor]) -> None:
        for name, value in terms.items():
            old = self._dampen_terms.get(name)
            self._dampen_terms[name] = value.detach() if old is None else old + value.detach()

    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The trainer's log of a training loss, with its parts by name: they sum to it.

        Args:
            logs: as transformers passes them.
        """
        if "loss" in logs and self._dampen_terms:
            names = sorted(self._dampen_terms)
            here = torch.stack([self._dampen_terms[n].float() for n in names])
            mean = self.accelerator.gather(here.unsqueeze(0)).mean(0)
            steps = max(1, self.state.global_step - self._dampen_logged)
            logs.update({f"dampen/{n}": v.item() / steps for n, v in zip(names, mean, strict=True)})
            self._dampen_terms, self._dampen_logged = {}, self.state.global_step
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    # --- checkpoints

    def _save_checkpoint(
        self: Any, model: nn.Module, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        super()._save_checkpoint(model, trial, *args, **kwargs)  # type: ignore[misc]
        folder = os.path.join(
            self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}"
        )
        state = self.regularization.state_dict()
        if self.args.should_save and os.path.isdir(folder):
            torch.save(state, os.path.join(folder, STATE))

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        """Called by every way to resume, after the model is in place."""
        if checkpoint is not None:
            load_state(self.regularization, str(checkpoint))
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_best_model(self: Any) -> None:
        super()._load_best_model()  # type: ignore[misc]
        if self.state.best_model_checkpoint is not None:
            before = self.regularization.state_dict()["progress"]
            load_state(self.regularization, self.state.best_model_checkpoint)
            # the weights go back, training does not
            self.regularization.progress(before)


class Progress(TrainerCallback):
    """Sets the progress of training for the schedules.

    Args:
        trainer: a Trainer of transformers, TRL or sentence-transformers.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # `model_init` makes another model for each trial
        check(self.trainer, self.trainer.regularization)
        self.trainer._dampen_terms, self.trainer._dampen_logged = {}, state.global_step
        self.trainer.regularization.attach_optimizer(kwargs["optimizer"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.regularization.progress(min(1.0, state.global_step / max(1, state.max_steps)))


def check(trainer: Any, reg: Handle) -> None:
    """Raise where a trainer cannot train with a regularization, saying what to do.

    Args:
        trainer: a Trainer of transformers, TRL or sentence-transformers.
        reg: the handle that `dampen.regularize` returned.
    """
    if not isinstance(reg, Handle):
        raise TypeError(f"install takes what dampen.regularize returned, got {type(reg).__name__}.")
    if all(reg.model is not m for m in trainer.model.modules()):
        raise ValueError(
            f"the trainer's {type(trainer.model).__name__} is not the model that was regularized "
            "(a "
            f"{type(reg.model).__name__}), nor is that a part of it. Regularize the model first "
            "and give the trainer "
            "that same object, or call dampen.regularize(trainer.model, ...) and install what it "
            "returns."
        )
    if getattr(trainer.args, "n_gpu", 1) > 1:
        raise ValueError(
            f"the Trainer would run on {trainer.args.n_gpu} devices with nn.DataParallel, whose "
            "copies of the model "
            "lose penalties. Start one process per device: torchrun --nproc_per_node=N script.py."
        )
    if trainer.args.neftune_noise_alpha is not None and any(
        isinstance(m, NEFTune) for m in reg.methods
    ):
        raise ValueError(
            "TrainingArguments(neftune_noise_alpha=...) and dampen.NEFTune "
            "would both add noise to the embeddings. Leave one of them out."
        )
    random = [r for r in reg.clones if r.stochastic and r.passes == 1 and not r.always_idle]
    if getattr(trainer.args, "disable_dropout", False) and random:
        raise ValueError(
            f"{type(trainer).__name__} trains with disable_dropout=True, because its loss compares "
            "the policy with a "
            f"reference and noise would count as a difference, but {random[0]} draws at random. "
            "Use penalties "
            "(ExplicitDropout), or say disable_dropout=False if you mean it."
        )


def averaged_already(trainer: Any, num_items_in_batch: Tensor | int | None) -> bool:
    """Whether the trainer's loss is an average over all micro-batches of a step, so that it divides
    no more: as `Trainer.training_step` decides it.

    Args:
        trainer: a Trainer of transformers, TRL or sentence-transformers.
        num_items_in_batch: what the trainer passes to its loss.
    """
    said = getattr(trainer, "loss_is_scaled_for_ga", None)
    if said is not None:
        return bool(said)
    return (trainer.model_accepts_loss_kwargs and num_items_in_batch is not None) or (
        trainer.compute_loss_func is not None
    )


def valid_positions(inputs: dict[str, Any], shift: bool) -> Tensor | None:
    """Which predictions count: of tokens those that have a label; all where there is one prediction
    per sample.

    Args:
        inputs: one batch of the trainer.
        shift: position t predicts the label at t + 1.
    """
    labels = inputs.get("labels")
    # DPO: the tokens whose probabilities are compared
    if labels is None and "completion_mask" in inputs:
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    if isinstance(labels, Tensor) and labels.ndim >= 2 and not labels.is_floating_point():
        return (F.pad(labels[..., 1:], (0, 1), value=-100) if shift else labels) != -100
    return None


def shifted(trainer: Any) -> bool:
    """Whether position t predicts the label at t + 1.

    Args:
        trainer: a Trainer of transformers, TRL or sentence-transformers.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model = trainer.accelerator.unwrap_model(trainer.model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def backbone_of(model: nn.Module) -> nn.Module | None:
    """The module below a language model's head, if the model has one.

    Args:
        model: the model.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    head = getattr(base, "get_output_embeddings", lambda: None)()
    inner = getattr(base, "base_model", None)
    if head is not None and isinstance(inner, nn.Module) and inner is not base:
        return inner
    return None


def load_state(reg: Handle, folder: str) -> None:
    """Take the handle's state out of a checkpoint's folder.

    Args:
        reg: the handle that `dampen.regularize` returned.
        folder: of the checkpoint.
    """
    path = os.path.join(folder, STATE)
    if os.path.exists(path):
        reg.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    elif reg.state_dict()["parameters"]:
        raise FileNotFoundError(
            f"the checkpoint {folder} has no {STATE}, so the values that {reg.methods[0].name} "
            "keeps beside the "
            "weights are not in it: it was saved by a trainer without install(trainer, reg). Start "
            "anew, or "
            "continue without that method."
        )
