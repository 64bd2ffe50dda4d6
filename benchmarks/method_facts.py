"""What a method's card says beyond its docstring: the equation, rates to start with, when and when not.

Rates are suggestions from the papers or from our own records, and say which; measured effects are not written here but
read from the records (`reproductions.pages.method_effects`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """One method. `equation` is LaTeX; `start` is shown in the README's table."""

    equation: str
    start: str
    rates: tuple[tuple[str, str], ...]  # situation, what to set and who says so
    when: str
    never: str


def _facts(equation: str, start: str, rates: dict[str, str], when: str, never: str) -> Facts:
    return Facts(equation, start, tuple(rates.items()), when, never)


FACTS = {
    "anchor_kl": _facts(
        r"J = \lambda\, \mathrm{KL}\big(p_0 \,\Vert\, p\big), \quad p_0 \text{ the frozen start}",
        "`AnchorKL(0.1)`",
        {"fine-tuning": "0.01 to 1; tune on a logarithmic scale"},
        "when fine-tuning should not change predictions elsewhere; with LoRA it needs no second copy",
        "from scratch, or where the head is new: the start predicts nothing",
    ),
    "arora_dropout": _facts(
        r"J = \frac{p}{1-p} \sum_j \Big(\frac{1}{n}\sum_i x_{ij}^2\Big) \lVert W_{:j} \rVert^2",
        "`AroraDropout(value=0.01, ffn=0.01)`",
        {
            "small models": "weights of 0.001 to 0.1; tune on a logarithmic scale",
            "query or key": "not advised (the paper's rows with it collapse)",
        },
        "as a baseline for explicit penalties, or where training must be deterministic",
        "on queries and keys: it knows nothing of the other factor of their product",
    ),
    "attention_entropy": _facts(
        r"J = \lambda\, \mathrm{mean}\; \max\!\big(0,\; f \log m - H(A)\big)",
        "`AttentionEntropy(0.01)`",
        {"unstable training": "weight 0.01 to 0.1, floor 0.3 to 0.5"},
        "when attention collapses onto single keys and the loss becomes unstable",
        "on long sequences: it needs the matrix of weights, so the fused kernel is lost",
    ),
    "blurred_attention": _facts(
        r"L' = L * g_\sigma = Q\,(g_\sigma * K)^\top, \quad \sigma \sim U(0, \sigma_{\max})",
        "`BlurredAttention(5, 1.0)`",
        {
            "images": "width 5, sigma 1 with grid=(rows, columns); above width 9 the paper reports a loss"
        },
        "for images and audio, where neighbouring keys carry the same thing; add Consistency for a stronger effect",
        "where a token and its neighbour mean different things (code, tables)",
    ),
    "concrete_dropout": _facts(
        r"J = \lambda \Big[ \tfrac{l^2}{2(1-p)} \lVert W \rVert^2 + d\,\big(\log 2 - H(p)\big) \Big]",
        "`ConcreteDropout(0.1, weight=1e-4)`",
        {"any model": "weight = 1 / training examples (the paper); rate 0.1 at the start"},
        "when the rate of dropout should be learned for each layer instead of tuned",
        "without `reg.parameters()` in the optimizer: the rates then stay where they start",
    ),
    "confidence_penalty": _facts(
        r"J = \lambda\, \mathrm{mean}\,\big(\log C - H(\mathrm{softmax}(z))\big)",
        "`ConfidencePenalty(0.1)`",
        {"images": "0.1 (the paper)", "text": "up to 2 (the paper)"},
        "when predictions are overconfident and label smoothing is not available in the trainer",
        "beside label smoothing: both do the same",
    ),
    "consistency": _facts(
        r"J = \lambda\, \mathrm{KL}\big(\mathrm{softmax}(z_1) \,\Vert\, \mathrm{softmax}(z_2)\big)",
        "`Consistency(1.0)` beside a random method",
        {"beside DropKey, blur or dropout": "weight 0.5 to 3"},
        "when a step may cost twice as much and calibration matters",
        "alone: two passes that draw nothing agree anyway (refused)",
    ),
    "drop_attention": _facts(
        r"A'_{ij} = \frac{m_{ij} A_{ij}}{\sum_k m_{ik} A_{ik}}, \quad m_{ij} \sim \mathrm{Bernoulli}(1-p)",
        "`DropAttention(0.1)`",
        {
            "ordinary attention dropout": "normalized=False, rate 0.1",
            "normalized": "the same as DropKey",
        },
        "to reproduce what frameworks call attention dropout",
        "as something other than DropKey: normalized and by elements they are the same function",
    ),
    "drop_connect": _facts(
        r"y = \big(W \odot m / (1-p)\big)\, x, \quad m_{oj} \sim \mathrm{Bernoulli}(1-p)",
        "`DropConnect(0.1)`",
        {"feed-forward maps": "rate 0.05 to 0.2"},
        "for small models with wide maps",
        "on small batches: one mask serves the whole batch, so gradients are noisier than with dropout",
    ),
    "drop_head": _facts(
        r"O_h' = \frac{H}{\sum_k m_k}\, m_h\, O_h, \quad m_h \sim \mathrm{Bernoulli}(1-p)",
        "`DropHead(0.2)`",
        {"text": "vshape(0.2) over training (the paper)", "little data": "0.2 (our demo)"},
        "almost free, and it keeps one head from doing everything",
        "with one or two heads",
    ),
    "drop_key": _facts(
        r"A = \mathrm{softmax}(L'), \quad L'_{ij} = -\infty \text{ with probability } p \text{, else } L_{ij}",
        "`DropKey(linear(0.3, 0.0))`",
        {
            "from scratch on little data": "0.2 to 0.3, falling with depth",
            "ImageNet size": "0.05 to 0.1 (the paper)",
            "fine-tuning text": 'unit="column", 0.1 (HiddenKey)',
        },
        "the first to try on images and audio when training long enough to overfit",
        "when training is short or underfits: there it only slows learning down",
    ),
    "drop_path": _facts(
        r"x_{l+1} = x_l + \frac{m}{1-p}\, f_l(x_l), \quad m \sim \mathrm{Bernoulli}(1-p) \text{ per sample}",
        "`DropPath(linear(0.0, 0.1))`",
        {"12 layers and more": "0.1, rising with depth", "4 layers or fewer": "0.05"},
        "for deep models trained from scratch",
        "in very shallow models, where a branch is most of the model",
    ),
    "embedding_dropout": _facts(
        r"e' = m \odot e / (1-p)",
        "`EmbeddingDropout(0.1)`",
        {"fine-tuning text": "0.1"},
        "as one of the usual places of dropout in text models",
        "on images with few patches, where a lost channel cannot be recovered: try PatchDropout",
    ),
    "explicit_dropout": _facts(
        r"J = \sum_t \lambda_t\, \tfrac{p^2}{2}\, \lVert T_t \rVert^2, \quad T \in \{QK^\top,\; V,\; AV,\; xW^\top\}",
        "`ExplicitDropout(value=0.1, ffn=0.1)`",
        {
            "337 digits": "lambda 1 to 3 (our record)",
            "published window": '0.06 to 0.13 in reduction="mean" at batch 64',
            "exact or inverted form": "stay below 3, or detach_inputs=True (our record)",
            "fine-tuning": "far below 0.1, which ruined MiniLM on 385 sentences (our record)",
        },
        "when training should be deterministic and the strength of each place set on its own",
        "with lambda taken from a paper unseen: it depends on the reduction; use author_weight or tune it",
    ),
    "explicit_mixout": _facts(
        r"J = \tfrac{1}{2}\,\tfrac{p}{1-p} \sum_j \Big(\sum_i x_{ij}^2\Big) \lVert (W-U)_{:j} \rVert^2",
        "`ExplicitMixout(0.1)`",
        {"fine-tuning": "weight 0.01 to 1"},
        "as a weight decay towards the pre-trained weights that knows which features are used",
        "from scratch: there is nothing to stay close to",
    ),
    "feed_forward_dropout": _facts(
        r"y = W\,(m \odot x / (1-p))",
        "`FeedForwardDropout(0.1)`",
        {"from scratch": "0.1 to 0.2"},
        "the ordinary dropout that most papers compare with",
        "beside a model's own dropout at the same place (print(reg) lists it)",
    ),
    "flooding": _facts(
        r"\tilde L = |L - b| + b",
        "`Flooding(0.05)`",
        {"classification": "level 0 to 0.1, tuned on validation (the paper)"},
        "when the training loss goes to 0 and the validation loss rises",
        "with a level above what validation reaches: training then never gets there",
    ),
    "hard_masking": _facts(
        r"L'_{ij} = -\infty \text{ (or } 0 \text{) with probability } p \text{ for } j \in \mathrm{top}_k(L_i)",
        "`HardMasking(0.2)`",
        {"little data": "0.2 to 0.3, top 0.1; above 0.5 the paper reports a loss"},
        "when single keys dominate the attention",
        'with fill="zero" on shifted scores: zeroing a negative score raises its weight',
    ),
    "head_diversity": _facts(
        r"J = \lambda\, \mathrm{mean}_{h \ne h'} \cos^2(O_h, O_{h'})",
        "`HeadDiversity(0.01)`",
        {"any": "0.01 to 0.1"},
        "when heads copy each other",
        "with one head",
    ),
    "hidden_dropout": _facts(
        r"x_{l+1} = x_l + m \odot f_l(x_l) / (1-p)",
        "`HiddenDropout(0.1)`",
        {"fine-tuning text": "0.1", "HiddenKey": "0.1 beside column DropKey and R-Drop"},
        "the residual dropout of the original Transformer, in models that have none",
        "beside the model's own hidden dropout",
    ),
    "input_masking": _facts(
        r"e_i' = m_i\, e_i, \quad m_i \sim \mathrm{Bernoulli}(1-p), \text{ labels unchanged}",
        "`InputMasking(0.15)`",
        {
            "pre-training a decoder": "0.15 (MEAP)",
            "fine-tuning a decoder": "0.1 (MEAP); two_pass=True keeps the plain loss beside it",
        },
        "for language models that ignore parts of a long input",
        "where single tokens carry the label: short texts, code",
    ),
    "l2_sp": _facts(
        r"J = \tfrac{\lambda}{2} \lVert W - U \rVert^2, \quad U \text{ the pre-trained weights}",
        "`L2SP(0.01)`",
        {"fine-tuning": "0.001 to 0.1 (the paper)"},
        "as the weight decay of fine-tuning",
        "from scratch, or on maps that are frozen under LoRA",
    ),
    "layer_drop": _facts(
        r"x_{l+1} = x_l + m_l\,(f_l(x_l) - x_l), \quad m_l \sim \mathrm{Bernoulli}(1-p)",
        "`LayerDrop(0.1)`",
        {"12 layers and more": "0.2 (the paper)"},
        "for deep models that should also run with fewer layers",
        "in shallow models",
    ),
    "lora_dropout": _facts(
        r"W + \frac{s}{(1-p)^2}\, \mathrm{diag}(m_B)\, B A\, \mathrm{diag}(m_A), \quad m \sim \mathrm{Bernoulli}(1-p)",
        "`LoRADropout(0.1)`",
        {"fine-tuning with LoRA": "0.1 to 0.5; tune it with the rank"},
        "when fine-tuning with LoRA overfits and the rank should stay as it is",
        "without adapters, or beside a large `lora_dropout` at the same place",
    ),
    "mixout": _facts(
        r"W' = U + \frac{(1-m)\odot(W-U)}{1-p}, \quad m \sim \mathrm{Bernoulli}(p)",
        "`Mixout(0.7)`",
        {"fine-tuning a large text model on little data": "0.7 to 0.9 (the paper)"},
        "when fine-tuning forgets or diverges between seeds",
        "from scratch",
    ),
    "nef_tune": _facts(
        r"e' = e + \frac{\alpha}{\sqrt{n d}}\, u, \quad u \sim U(-1, 1)^{n \times d}",
        "`NEFTune(5)`",
        {"instruction tuning": "alpha 5 to 15 (the paper)"},
        "for instruction tuning",
        "beside the trainer's own neftune_noise_alpha (refused)",
    ),
    "patch_dropout": _facts(
        r"X' = X_S, \quad S \subset \{1..n\} \text{ random}, \; |S| = \lceil (1-p)\, n \rceil",
        "`PatchDropout(0.3)`",
        {"images": "0.3 (our demo); up to 0.5 for speed"},
        "for images: it regularizes and makes a step cheaper at once",
        "where every token counts: text, detection of small things",
    ),
    "projection_dropout": _facts(
        r"y = W\,(m \odot x / (1-p)) \text{ for the attention's projections}",
        "`ProjectionDropout(0.1)`",
        {"from scratch": "0.1"},
        "to put dropout at the one place of Explicit Dropout's figure 1 that frameworks leave out",
        "on q, k and v at once in small models, where it removes the same channel from all three",
    ),
    "r_drop": _facts(
        r"J = \tfrac{\alpha}{2}\big(\mathrm{KL}(P_1 \Vert P_2) + \mathrm{KL}(P_2 \Vert P_1)\big)",
        "`RDrop(1.0)` beside a random method",
        {"text": "1 to 5 (the paper)", "ViT": "0.3 to 0.6 (the paper)"},
        "when a step may cost twice as much",
        "alone, in a model that draws nothing (refused)",
    ),
    "skip_ablation": _facts(
        r"x_{l+1} = f_l(x_l) \text{ instead of } x_l + f_l(x_l)",
        "`SkipAblation(attention=True)`",
        {"study only": "no rate"},
        "to see what a skip is worth (Always Skip Attention)",
        "to make a model better",
    ),
    "token_graying": _facts(
        r"X' = U (S / \max S)^{\varepsilon} V^\top \quad\text{or}\quad c' = "
        r"\mathrm{sign}(c) (|c| / \max|c|)^{\varepsilon}",
        "`TokenGraying()`",
        {"images": 'kind="dct", eps 0.95; kind="svd", eps 0.7 (the paper)'},
        "for image models whose first layers are badly conditioned",
        "expecting much: our records show no gain on digits and small CIFAR",
    ),
    "weight_average": _facts(
        r"\bar w \leftarrow b\,\bar w + (1-b)\, w",
        "`WeightAverage('ema')`",
        {
            "any training": 'kind="ema", decay 0.99 to 0.9999, higher for longer training',
            "a constant or cyclic learning rate": 'kind="swa", start 0.75 (the paper)',
            "long training": 'kind="lawa", window 5 (the paper averages the last 6 epochs)',
        },
        "nearly free: training does not change, and the average is often better than the last weights",
        "where the learning rate falls to 0: the last weights are nearly their own average",
    ),
    "z_loss": _facts(
        r"J = \lambda\, \mathrm{mean}\, \log^2 Z, \quad Z = \sum_j e^{z_j}",
        "`ZLoss(1e-4)`",
        {"language models": "1e-4 (PaLM)"},
        "when logits drift and training in bfloat16 becomes unstable",
        "expecting better generalization: it is about stability",
    ),
    "weight_decay": _facts(
        r"w \leftarrow w - \eta\,(u + \lambda\, w), \quad \text{cautious: } "
        r"\lambda\, [u w \ge 0]\, w",
        "`WeightDecay(0.05)`",
        {
            "from scratch": "0.05 to 0.1; with cautious=True the same rate (the paper)",
            "fine-tuning": "0.01, or L2SP towards the start",
        },
        "to schedule the decay over training or depth, and to compare plain and cautious decay",
        "beside a weight_decay of the optimizer: it is replaced, with a warning",
    ),
}
"""By registry name."""
