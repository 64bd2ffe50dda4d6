"""Synthetic words, a tokenizer and trainers for the tests of TRL and sentence-transformers. No downloads."""

import torch

from tests.integrations.hf_loop import RATE, Seeded


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 30)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def words(count, generator):
    return " ".join(f"w{int(i)}" for i in torch.randint(3, 30, (count,), generator=generator))


def arguments(cls, folder, accumulation, **options):
    """Four steps, a checkpoint after two."""
    given = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation, "max_steps": 4,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "steps", "save_steps": 2,
        "disable_tqdm": True, "max_grad_norm": 0.0, "bf16": False, **options,
    }  # fmt: skip
    return cls(str(folder), **given)


def plain_sgd(model):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    return {
        "optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        "callbacks": [Seeded()],
    }


def loop(model, reg, batches, accumulation, micro_loss, steps=4):
    """The bare loop: `micro_loss(inputs, items)` gives a task loss that is averaged over the step already, or one that
    is not (then it divides by itself), and the penalties of that micro-batch."""
    optimizer, losses = (
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE),
        [],
    )
    model.train()
    for step in range(steps):
        micro = batches[step * accumulation : (step + 1) * accumulation]
        torch.manual_seed(100 + step)
        if reg is not None:
            reg.progress(step / steps)
        total = 0.0
        for inputs in micro:
            loss = micro_loss(inputs, micro)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
