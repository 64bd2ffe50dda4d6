"""LoRA on a causal language model with TRL's SFTTrainer: a tiny Llama with random weights, on a copying task.

    dampen audit examples/lora_trl.py:build
    dampen compare examples/lora_trl.py:train --methods "drop_key(rate=0.1), nef_tune, drop_head" --seeds 4

For real: `AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B")` in `build`, its tokenizer, your dataset with
`prompt` and `completion` in `rows`, `max_steps` of a few hundred, and `use_cpu=True` away.
"""

import peft
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

import dampen
from dampen.integrations import hf

WORDS = {w: i for i, w in enumerate(["<pad>", "<s>", "</s>", *"abcdefghijkl"])}


def rows(count: int, seed: int) -> Dataset:
    """Synthetic: four letters to be written again, in reverse."""
    draw = torch.Generator().manual_seed(seed)
    letters = torch.randint(3, len(WORDS), (count, 4), generator=draw).tolist()
    names = list(WORDS)
    texts = [[names[i] for i in row] for row in letters]
    return Dataset.from_list(
        [{"prompt": " ".join(t), "completion": " " + " ".join(t[::-1])} for t in texts]
    )


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def adapted() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    lora = peft.LoraConfig(r=4, lora_dropout=0.05, target_modules=["q_proj", "v_proj", "up_proj"])
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)


def build(batch: int = 4) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """For the audit: the model, and a batch with its labels."""
    ids = torch.randint(3, len(WORDS), (batch, 9), generator=torch.Generator().manual_seed(0))
    return adapted(), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def train(trial: dampen.Trial) -> dict[str, float]:
    """Fine-tune the adapters; `install` lets penalties and second passes reach the trainer's loss."""
    model = adapted()
    reg = trial.regularize(model)
    arguments = trl.SFTConfig(
        output_dir=str(trial.folder / "sft"), max_steps=trial.params.get("steps", 60), seed=trial.seed,
        learning_rate=1e-2, per_device_train_batch_size=16, completion_only_loss=True, save_strategy="no",
        report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=model, args=arguments, train_dataset=rows(256, 1), eval_dataset=rows(64, 2),
        processing_class=tokenizer(),
    )  # fmt: skip
    hf.install(trainer, reg)
    trainer.train()
    return {"nll": trainer.evaluate()["eval_loss"]}
