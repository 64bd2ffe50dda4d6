"""Small files as users have them: a table, folders of images, a saved model."""

import csv
import random

import numpy as np
import torch


def write_csv(path, rows=120, seed=0, header=("text", "label"), delimiter=","):
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        out = csv.writer(file, delimiter=delimiter)
        out.writerow(header)
        for i in range(rows):
            words = ("good", "great", "fine") if i % 2 else ("bad", "poor", "awful")
            text = " ".join(draw.choices(words, k=3) + draw.choices("abcdefgh", k=4))
            out.writerow([text, "pos" if i % 2 else "neg"])
    return path


def write_images(folder, seed=0, per_class=12):
    from PIL import Image

    draw = np.random.default_rng(seed)
    for name in ("cats", "dogs"):
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            Image.fromarray(draw.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(
                folder / name / f"{i}.png"
            )
    return folder


def write_bert(folder):
    """A tiny BERT with its tokenizer, saved as Hugging Face does, with random weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        ["good great fine bad poor awful a b c d e f g h"] * 9,
        trainers.WordPieceTrainer(vocab_size=80, special_tokens=special, show_progress=False),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, **names
    ).save_pretrained(folder)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    torch.manual_seed(0)
    BertModel(
        BertConfig(vocab_size=len(tokenizer.get_vocab()), max_position_embeddings=64, **sizes)
    ).save_pretrained(folder)
    return folder
