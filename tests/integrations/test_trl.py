"""TRL's SFT and DPO trainers, and sentence-transformers: penalties once, references plain."""

import pytest
import torch

import dampen
from dampen import DropKey, ExplicitDropout, RDrop
from dampen.integrations import hf
from tests.integrations.test_hf import RATE, Seeded, logged
from tests.integrations.tiny import METHODS, llama, same, weights

trl = pytest.importorskip("trl")
pytestmark = [pytest.mark.filterwarnings("ignore")]  # of the libraries; ours are errors that raise


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 30)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def words(count, generator):
    return " ".join(f"w{int(i)}" for i in torch.randint(3, 30, (count,), generator=generator))


def arguments(cls, folder, accumulation, **options):
    given = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation, "max_steps": 3,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
        "max_grad_norm": 0.0, "bf16": False, **options,
    }  # fmt: skip
    return cls(str(folder), **given)


def sft(folder, model, accumulation, **options):
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)
    rows = [{"prompt": words(3, generator), "completion": " " + words(3 + i % 3, generator)} for i in range(24)]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return trl.SFTTrainer(
        model=model, args=arguments(trl.SFTConfig, folder, accumulation, **options), processing_class=tokenizer(),
        train_dataset=Dataset.from_list(rows), callbacks=[Seeded()],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    )  # fmt: skip


def dpo(folder, model, accumulation, reference=True, **options):
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)
    rows = [
        {"prompt": words(3, generator), "chosen": " " + words(3, generator), "rejected": " " + words(4, generator)}
        for _ in range(24)
    ]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    return trl.DPOTrainer(
        model=model, ref_model=llama() if reference else None, processing_class=tokenizer(), callbacks=[Seeded()],
        args=arguments(trl.DPOConfig, folder, accumulation, **options), train_dataset=Dataset.from_list(rows),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    )  # fmt: skip


class ByHand:
    """A trainer's own batches and task loss, with everything else written out."""

    def __init__(self, trainer, reg, averaged):
        self.trainer, self.reg, self.averaged = trainer, reg, averaged

    def train(self, steps, accumulation, batches=None):
        trainer, model = self.trainer, self.trainer.model.train()
        optimizer = trainer.optimizer or trainer.create_optimizer()
        batches, losses = iter(batches or trainer.get_train_dataloader()), []
        for step in range(steps):
            micro = [next(batches) for _ in range(accumulation)]
            torch.manual_seed(100 + step)
            items = trainer._get_num_items_in_batch(micro, torch.device("cpu"))
            if self.reg is not None:
                self.reg.progress(step / steps)
            total = 0.0
            for inputs in micro:
                loss = trainer.compute_loss(model, dict(inputs), num_items_in_batch=items)
                loss = loss if self.averaged else loss / accumulation
                if self.reg is not None:
                    loss = loss + self.reg.penalty() / accumulation
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
        return losses


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", ["plain", "stochastic", "penalty"])
def test_sft_equals_a_loop_by_hand(tmp_path, kind, accumulation):
    model, twin = llama(), llama()
    methods = METHODS[kind]()
    trainer = sft(tmp_path, model, accumulation)
    if methods is not None:
        hf.install(trainer, dampen.regularize(trainer.model, methods))
    trainer.train()
    other = sft(tmp_path, twin, accumulation)
    reg = None if methods is None else dampen.regularize(other.model, METHODS[kind]())
    losses = ByHand(other, reg, averaged=True).train(3, accumulation)
    assert logged(trainer) == pytest.approx(losses, rel=1e-5)
    same(weights(model), weights(twin), tolerance=1e-6)


def test_sft_with_two_passes_compares_the_tokens_that_have_labels(tmp_path):
    """The fused head gives no logits: they are made of the hidden states, and the terms sum to the loss."""
    model = llama()
    reg = dampen.regularize(model, [DropKey(0.3), RDrop(2.0)])
    trainer = hf.install(sft(tmp_path, model, 4), reg)
    trainer.train()
    terms = [a + b for a, b in zip(logged(trainer, "dampen/task"), logged(trainer, "dampen/r_drop"), strict=True)]
    assert terms == pytest.approx(logged(trainer), rel=1e-5)
    assert all(v > 0 for v in logged(trainer, "dampen/r_drop"))


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", ["plain", "penalty"])
def test_dpo_equals_a_loop_by_hand(tmp_path, kind, accumulation):
    model, twin = llama(), llama()
    methods = METHODS[kind]()
    trainer = dpo(tmp_path, model, accumulation)
    if methods is not None:
        hf.install(trainer, dampen.regularize(trainer.model, methods))
    trainer.train()
    other = dpo(tmp_path, twin, accumulation)
    reg = None if methods is None else dampen.regularize(other.model, METHODS[kind]())
    losses = ByHand(other, reg, averaged=False).train(3, accumulation)
    assert logged(trainer) == pytest.approx(losses, rel=1e-5)
    same(weights(model), weights(twin), tolerance=1e-6)


def test_dpo_wants_no_noise_unless_it_is_said(tmp_path):
    model = llama()
    reg = dampen.regularize(model, DropKey(0.3))
    with pytest.raises(ValueError, match="disable_dropout=True"):
        hf.install(dpo(tmp_path, model, 1), reg)
    trainer = hf.install(dpo(tmp_path, model, 1, disable_dropout=False), reg)
    trainer.train()
    assert all(v > 0 for v in logged(trainer))


def test_dpo_reference_pass_of_an_adapter_is_plain(tmp_path):
    """Policy and reference are one model in training mode there; at the start both give the same log-probabilities if
    the reference pass is plain and the policy has only penalties."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    reg = dampen.regularize(model, DropKey(0.4), sites="*")
    trainer = hf.install(dpo(tmp_path, model, 1, reference=False, disable_dropout=False), reg)
    seen = []
    for layer in reg.clones:
        original = layer.mask
        object.__setattr__(layer, "mask", lambda *a, f=original: (seen.append(torch.is_grad_enabled()), f(*a))[1])
    trainer.train()
    assert seen
    assert all(seen)


def test_sentence_transformers(tmp_path):
    """Both forwards of a siamese step count, as in a loop by hand."""
    st = pytest.importorskip("sentence_transformers")
    from datasets import Dataset
    from sentence_transformers.losses import CosineSimilarityLoss

    runs = []
    for _ in range(2):
        model = sentence_model(st, tmp_path)
        generator = torch.Generator().manual_seed(0)
        rows = [
            {"a": words(4, generator), "b": words(5, generator), "label": float(i % 2)} for i in range(16)
        ]  # fmt: skip
        args = st.SentenceTransformerTrainingArguments(
            str(tmp_path / "out"), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3,
            logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, max_grad_norm=0.0,
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        trainer = st.SentenceTransformerTrainer(
            model=model, args=args, train_dataset=Dataset.from_list(rows), loss=CosineSimilarityLoss(model),
            callbacks=[Seeded()],
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        )  # fmt: skip
        runs.append((model, trainer))
    (model, trainer), (twin, other) = runs
    hf.install(trainer, dampen.regularize(model, ExplicitDropout(value=3.0)))
    seen, take = [], trainer.collect_features
    trainer.collect_features = lambda inputs: (seen.append(dict(inputs)), take(inputs))[1]  # it shuffles by itself
    trainer.train()
    reg = dampen.regularize(twin, ExplicitDropout(value=3.0))
    losses = ByHand(other, reg, averaged=False).train(3, 2, seen)
    assert logged(trainer) == pytest.approx(losses, rel=1e-5)
    same(weights(model), weights(twin), tolerance=1e-6)

    model = sentence_model(st, tmp_path)
    reg = dampen.regularize(model, [DropKey(0.3), RDrop(1.0, distance="mse")])
    trainer = st.SentenceTransformerTrainer(
        model=model, args=trainer.args, train_dataset=Dataset.from_list(rows), loss=CosineSimilarityLoss(model)
    )
    hf.install(trainer, reg)
    trainer.train()
    assert all(v > 0 for v in logged(trainer, "dampen/r_drop"))


def sentence_model(st, folder):
    """A tiny BERT with mean pooling, made on the spot."""
    import transformers as tr

    from tests.integrations.tiny import OFF, SIZES

    torch.manual_seed(0)
    path = folder / "bert"
    tr.BertModel(tr.BertConfig(vocab_size=30, **SIZES, **OFF)).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return st.SentenceTransformer(str(path), device="cpu")
