"""`generate()` of a model that was left in training mode: under no_grad, with a key-value cache, so that a forward has
fewer queries than keys. No method has a reason to fail there, and penalties keep nothing."""

import pytest
import torch
import transformers as tr

import dampen
from dampen.checking.subjects import with_companion, with_example
from dampen.registry import methods
from dampen.regularizer import UnsupportedModel

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
IDS = torch.randint(3, 50, (2, 5), generator=torch.Generator().manual_seed(0))
LEFT = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])


def llama(implementation="sdpa"):
    config = tr.LlamaConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, attn_implementation=implementation
    )
    return tr.LlamaForCausalLM(config)


def t5():
    config = tr.T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=8,
        num_layers=1,
        num_heads=2,
        d_ff=24,
        decoder_start_token_id=0,
    )
    return tr.T5ForConditionalGeneration(config)


MODELS = {"sdpa": llama, "eager": lambda: llama("eager"), "t5": t5}
FORMS = {f"explicit_dropout {form}": form for form in ("paper", "exact", "inverted")}


def make(name):
    if name in FORMS:
        terms = dict.fromkeys(("query", "key", "value", "attended_value", "query_key", "ffn"), 0.1)
        return dampen.ExplicitDropout(**terms, form=FORMS[name])
    if name == "drop_path":
        return dampen.DropPath(0.1)  # the default is 0 in a stack of one layer
    return with_example(methods()[name])()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", [*methods(), *FORMS])
@pytest.mark.filterwarnings("ignore")
def test_generate_in_train_mode(name, model):
    torch.manual_seed(0)
    net = MODELS[model]().train()
    method = make(name)
    try:
        reg = dampen.regularize(net, with_companion([method]))
    except UnsupportedModel:
        return
    settings = {"max_new_tokens": 4, "do_sample": False, "attention_mask": LEFT, "pad_token_id": 0}
    for beams in (1, 2):
        torch.manual_seed(1)
        made = net.generate(IDS, num_beams=beams, **settings)
        assert made.shape[0] == 2
    assert reg._taken() == {}
    if method.only_reads and method.passes == 1:  # two passes have a companion that draws
        reg.remove()
        torch.manual_seed(1)
        assert torch.equal(made, net.generate(IDS, num_beams=2, **settings))


@pytest.mark.filterwarnings("ignore")
def test_penalties_are_counted_again_afterwards():
    """Between two training steps, as a trainer's sampling does; and in a `reg.loss` under no_grad, which asks."""
    found = []
    for generates in (False, True):
        torch.manual_seed(0)
        net = llama().train()
        reg = dampen.regularize(net, make("explicit_dropout exact"))
        for _ in range(2):
            net(IDS)
            found.append(reg.penalty().item())
            if generates:
                net.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            _, terms = reg.loss(
                lambda net=net: net(IDS, use_cache=False), lambda out: out.logits.sum()
            )
        assert len(terms) > 1
        assert all(value.item() > 0 for name, value in terms.items() if name != "task")
    assert found[:2] == found[2:]
    assert found[0] > 0
