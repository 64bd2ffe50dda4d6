"""A Hugging Face Trainer on a tiny BERT with random weights and a synthetic task, compared with three regularizers.

    dampen compare examples/hf_trainer.py:train --methods "drop_key(rate=0.1), drop_head, r_drop + drop_key(rate=0.1)"

With a saved model of your own: `BertForSequenceClassification.from_pretrained(FOLDER)`.
"""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import dampen
from dampen.integrations import hf


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Synthetic: twelve token numbers; the class is whether more of them are even."""
    ids = torch.randint(4, 64, (count, 12), generator=torch.Generator().manual_seed(seed))
    labels = ((ids % 2 == 0).sum(1) > 6).long()
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": label}
        for row, label in zip(ids, labels, strict=True)
    ]


def train(trial: dampen.Trial) -> dict[str, float]:
    """The usual Trainer; `install` lets penalties and second passes reach its loss."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    model = BertForSequenceClassification(
        BertConfig(vocab_size=64, num_labels=2, max_position_embeddings=16, **sizes)
    )
    reg = trial.regularize(model)
    arguments = TrainingArguments(
        output_dir=str(trial.folder / "hf"),
        num_train_epochs=trial.params.get("epochs", 5),
        per_device_train_batch_size=32,
        learning_rate=trial.params.get("lr", 1e-3),
        seed=trial.seed,
        data_seed=trial.seed,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=sentences(512, seed=1))
    hf.install(trainer, reg)
    trainer.train()
    test = sentences(512, seed=2)
    labels = torch.stack([s["labels"] for s in test])
    logits = torch.tensor(trainer.predict(test).predictions)
    nll = torch.nn.functional.cross_entropy(logits, labels).item()
    return {"accuracy": (logits.argmax(-1) == labels).float().mean().item(), "nll": nll}
