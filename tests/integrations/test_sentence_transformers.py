"""sentence-transformers' trainer against a loop written by hand: both forwards of a siamese step count."""

import pytest
import torch
from torch.nn import functional as F

import dampen
from dampen import DropKey, RDrop
from dampen.integrations import hf
from tests.integrations.hf_loop import logged
from tests.integrations.tiny import METHODS, OFF, SIZES, same, weights
from tests.integrations.trl_data import arguments, loop, plain_sgd, tokenizer, words

st = pytest.importorskip("sentence_transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]  # of the libraries; ours are errors that raise
KINDS = {**METHODS, "two_pass": lambda: [DropKey(0.3), RDrop(2.0, distance="mse")]}


def embedder(folder, seed=0):
    """A tiny BERT with mean pooling, made on the spot."""
    import transformers as tr

    torch.manual_seed(seed)
    path = folder / "bert"
    tr.BertModel(tr.BertConfig(vocab_size=30, **SIZES, **OFF)).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return st.SentenceTransformer(str(path), device="cpu")


def make(folder, model, accumulation, kind):
    from datasets import Dataset
    from sentence_transformers.losses import CosineSimilarityLoss

    generator = torch.Generator().manual_seed(0)
    rows = [
        {"a": words(4, generator), "b": words(5 - i % 2, generator), "label": float(i % 2)} for i in range(32)
    ]  # fmt: skip
    trainer = st.SentenceTransformerTrainer(
        model=model, args=arguments(st.SentenceTransformerTrainingArguments, folder, accumulation),
        train_dataset=Dataset.from_list(rows), loss=CosineSimilarityLoss(model), **plain_sgd(model),
    )  # fmt: skip
    methods = KINDS[kind]()
    return trainer if methods is None else hf.install(trainer, dampen.regularize(model, methods))


def by_hand(model, kind, batches, accumulation):
    """Squared error of the cosine, the trainer divides by the micro-batches of a step."""
    methods = KINDS[kind]()
    reg = None if methods is None else dampen.regularize(model, methods)

    def micro_loss(inputs, micro):
        def forward():
            pair = []
            for column in "ab":
                given = {k: inputs[f"{column}_{k}"] for k in ("input_ids", "attention_mask")}
                pair.append(model(given)["sentence_embedding"])
            return pair

        def task(pair):
            return F.mse_loss(torch.cosine_similarity(*pair), inputs["label"].float())

        if reg is None:
            return task(forward()) / accumulation
        return reg.loss(forward, task, logits=torch.cat)[0] / accumulation

    return loop(model, reg, batches, accumulation, micro_loss)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_a_loop_by_hand_also_when_resumed(tmp_path, kind, accumulation):
    model = embedder(tmp_path)
    trainer, seen = make(tmp_path / "one", model, accumulation, kind), []
    take = trainer.collect_features
    trainer.collect_features = lambda inputs: (seen.append(dict(inputs)), take(inputs))[
        1
    ]  # it shuffles by itself
    trainer.train()
    batches = seen[::2] if kind == "two_pass" else seen  # each pass asks for its features
    twin = embedder(tmp_path)
    losses = by_hand(twin, kind, batches, accumulation)
    assert logged(trainer) == pytest.approx(losses, rel=1e-5)
    same(weights(model), weights(twin), tolerance=1e-6)
    again = embedder(tmp_path, seed=5)
    resumed = make(tmp_path / "two", again, accumulation, kind)
    resumed.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-2"))
    assert logged(resumed)[-2:] == logged(trainer)[-2:]
    same(weights(again), weights(model))
