"""Mixture of experts: every implementation equals a loop over tokens; the balancing losses equal closed forms."""

import math
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config
from transformers.activations import ACT2FN
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as mixtral_balancing_loss

from fratrie import (
    FratrieDecoderConfig,
    FratrieDecoderForCausalLM,
    FratrieDecoderForSequenceClassification,
    FratrieEncoderConfig,
    FratrieEncoderForMaskedLM,
    FratrieEncoderForSequenceClassification,
    FratrieEncoderForTokenClassification,
    FratrieEncoderModel,
    FratrieSeq2SeqConfig,
    FratrieSeq2SeqForConditionalGeneration,
)
from fratrie.modeling import experts
from fratrie.modeling.experts import MixtureOfExperts, Router, load_balancing_loss, router_z_loss

VOCAB, EXPERTS = 30, 4
SPARSE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "num_experts": EXPERTS,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "experts_implementation": "eager",  # the default has no float64 kernel
}


def build(model_class=FratrieEncoderModel, dtype=torch.float64, **fields):
    config_class = model_class.config_class
    torch.manual_seed(0)
    return model_class(config_class(**{**SPARSE, **fields})).to(dtype).eval()


def layer_of(model) -> MixtureOfExperts:
    return model.layers[0].feed_forward


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# --- the layer -----------------------------------------------------------------------------------------------------


def naive(layer, config, tokens):
    """Token by token: the k most probable experts, weighted, and the shared ones."""
    act, outputs = ACT2FN[config.hidden_act], []
    for token in tokens:
        probabilities = (layer.router.weight @ token).softmax(0)
        chosen = sorted(range(config.num_experts), key=lambda e: -probabilities[e])[: config.num_experts_per_tok]
        scale = sum(probabilities[e] for e in chosen) + config.router_norm_eps if config.norm_topk_prob else 1.0
        output = layer.shared_experts(token[None])[0] if layer.shared_experts is not None else 0.0
        if config.shared_experts_gate:
            output = output / (1 + (-(layer.shared_experts_gate.weight[0] @ token)).exp())
        for expert in chosen:
            if config.gated_feed_forward:
                gate, up = (layer.experts.gate_up_proj[expert] @ token).chunk(2)
                inner = act(gate) * up
            else:
                inner = act(layer.experts.up_proj[expert] @ token)
            output = output + probabilities[expert] / scale * (layer.experts.down_proj[expert] @ inner)
        outputs.append(output)
    return torch.stack(outputs)


LAYOUTS = {
    "plain": {},
    "gated": {"gated_feed_forward": True, "hidden_act": "silu"},
    "top one": {"num_experts_per_tok": 1},
    "all": {"num_experts_per_tok": EXPERTS},
    "unnormed": {"norm_topk_prob": False},
    "normed to less than one": {"router_norm_eps": 0.5},
    "shared": {"num_shared_experts": 2, "moe_intermediate_size": 8},
    "shared behind a gate": {
        "num_shared_experts": 2,
        "shared_expert_intermediate_size": 5,
        "shared_experts_gate": True,
    },
    "gated shared": {"num_shared_experts": 1, "gated_feed_forward": True, "norm_topk_prob": False},
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
implementations = pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])


@pytest.fixture
def grouped_kernel_on_a_cpu(monkeypatch):
    """Let the grouped kernel run where it is asked for, as it does on an accelerator."""
    monkeypatch.setattr(experts, "_uses_grouped_kernel", lambda config, _: config._experts_implementation != "eager")


with_grouped_kernel = pytest.mark.usefixtures("grouped_kernel_on_a_cpu")


@with_grouped_kernel
@layouts
@implementations
def test_equals_a_loop_over_tokens_with_gradients(layout, implementation):
    # Grouped matrix multiplication has no float64 kernel.
    dtype, tolerance = (torch.float32, 2e-5) if implementation == "grouped_mm" else (torch.float64, 1e-10)
    model = build(dtype=dtype, experts_implementation=implementation, **LAYOUTS[layout])
    layer = layer_of(model)
    hidden = torch.randn(2, 5, 16, dtype=dtype, requires_grad=True)
    outputs = layer(hidden)
    expected = naive(layer, model.config, hidden.flatten(0, 1)).view_as(hidden)
    close(outputs, expected, tolerance)
    inputs, weights = [hidden, *layer.parameters()], torch.randn_like(outputs)
    gradients, wanted = (torch.autograd.grad((x * weights).sum(), inputs) for x in (outputs, expected))
    for gradient, other in zip(gradients, wanted, strict=True):
        close(gradient, other, 10 * tolerance)


@with_grouped_kernel
@implementations
def test_the_implementation_that_is_asked_for_runs(implementation, monkeypatch):
    """Hugging Face dispatches by the config; a spy on the plain loop tells whether it did."""
    calls = []
    plain = experts._Experts.forward
    monkeypatch.setattr(experts._Experts, "forward", lambda self, *args: calls.append(1) or plain(self, *args))
    model = build(dtype=torch.float32, experts_implementation=implementation)
    assert model.config._experts_implementation == implementation
    model(torch.ones(1, 3, dtype=torch.long))
    assert bool(calls) == (implementation == "eager")
    other = "batched_mm" if implementation == "eager" else "eager"
    model.set_experts_implementation(other)
    calls.clear()
    model(torch.ones(1, 3, dtype=torch.long))
    assert bool(calls) == (other == "eager")


def test_the_default_is_grouped_where_the_sizes_allow_it_and_the_loop_on_a_cpu(monkeypatch):
    model, calls = build(experts_implementation=None), []
    assert model.config._experts_implementation == "grouped_mm"
    loop = experts._Experts.forward
    monkeypatch.setattr(experts._Experts, "forward", lambda self, *args: calls.append(1) or loop(self, *args))
    layer_of(model)(torch.randn(3, 16, dtype=torch.float64))
    assert calls and experts._uses_grouped_kernel(model.config, torch.empty(3, 16, device="meta"))


@pytest.mark.parametrize("elsewhere", [[[1, 4], [4, 4], [0, 3], [6, 2]], [[4, 4]] * 4], ids=["some", "all"])
def test_choices_beyond_the_experts_are_left_out(elsewhere):
    """Expert parallelism marks what another rank computes so."""
    layer, index = layer_of(build(gated_feed_forward=True)).experts, torch.tensor(elsewhere)
    hidden, weights = (torch.rand(4, size, dtype=torch.float64, requires_grad=True) for size in (16, 2))
    expected = torch.zeros(4, 16, dtype=torch.float64)
    for token, slot in (index < EXPERTS).nonzero().tolist():
        gate, up = (layer.gate_up_proj[index[token, slot]] @ hidden[token]).chunk(2)
        inner = layer.act_fn(gate) * up
        expected[token] += weights[token, slot] * (layer.down_proj[index[token, slot]] @ inner)
    found, inputs = layer(hidden, index, weights), [hidden, weights]
    close(found, expected)
    if expected.requires_grad:
        gradients, wanted = (torch.autograd.grad(x.square().sum(), inputs) for x in (found, expected))
        for gradient, other in zip(gradients, wanted, strict=True):
            close(gradient, other)


@pytest.mark.parametrize("kernel", ["eager", "grouped_mm", "compiled"])
def test_under_autocast_the_experts_multiply_in_its_dtype(kernel, request):
    """Not in the weights' dtype, as a kernel that autocast does not know would."""
    if kernel == "grouped_mm":
        request.getfixturevalue("grouped_kernel_on_a_cpu")
    name = "eager" if kernel == "eager" else "grouped_mm"
    layer = layer_of(build(dtype=torch.float32, experts_implementation=name, gated_feed_forward=True))
    run = torch.compile(layer, backend="eager", fullgraph=True) if kernel == "compiled" else layer
    hidden = torch.randn(9, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(hidden)
        _, weights, index = layer.router(hidden)
    found.square().sum().backward()
    assert layer.experts.down_proj.grad.dtype == torch.float32 and layer.experts.down_proj.grad.any()
    expected = layer.experts.bfloat16()(hidden.bfloat16(), index, weights)
    assert torch.equal(found, expected.float())


ODD = [
    {"moe_intermediate_size": 12},
    {"intermediate_size": 20},
    {"hidden_size": 12},
    {"moe_intermediate_size": 9, "gated_feed_forward": True},
]


@pytest.mark.parametrize("fields", ODD, ids=str)
def test_odd_sizes_fall_back_to_eager(fields):
    model = build(dtype=torch.float32, experts_implementation=None, **fields)
    assert model.config._experts_implementation == "eager"
    assert model(torch.ones(1, 3, dtype=torch.long)).last_hidden_state.isfinite().all()
    model.to(torch.bfloat16)
    assert model(torch.ones(1, 3, dtype=torch.long)).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("fields", ODD, ids=str)
def test_odd_sizes_refuse_grouped_mm(fields):
    with pytest.raises(ValueError, match=r"multiples of 8.*'eager' or 'batched_mm'"):
        build(experts_implementation="grouped_mm", **fields)


def test_a_seq2seq_model_of_odd_sizes_refuses_grouped_mm():
    fields = {**SPARSE, "moe_intermediate_size": 12, "experts_implementation": None}
    model = FratrieSeq2SeqForConditionalGeneration(FratrieSeq2SeqConfig(**fields))
    assert model(torch.ones(1, 3).long(), decoder_input_ids=torch.ones(1, 2).long()).logits.isfinite().all()
    with pytest.raises(ValueError, match=r"multiples of 8"):
        FratrieSeq2SeqForConditionalGeneration(
            FratrieSeq2SeqConfig(**{**fields, "experts_implementation": "grouped_mm"})
        )


@with_grouped_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@implementations
def test_runs_in_every_precision(dtype, implementation):
    model = build(dtype=dtype, experts_implementation=implementation, moe_intermediate_size=16)
    states = model(torch.randint(1, VOCAB, (2, 5))).last_hidden_state
    states.float().square().mean().backward()
    assert states.dtype == dtype and states.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_layers_can_be_dense_or_sparse():
    model = build(mlp_layer_types=["dense", "sparse"])
    assert [type(layer.feed_forward).__name__ for layer in model.layers] == ["FeedForward", "MixtureOfExperts"]
    logits = model(torch.ones(2, 3, dtype=torch.long), output_router_logits=True).router_logits
    assert [tuple(layer.shape) for layer in logits] == [(6, EXPERTS)]


# --- the router ----------------------------------------------------------------------------------------------------

ROUTERS = {
    "deepseek": {"router_scoring": "sigmoid", "router_selection_bias": True, "router_num_groups": 4,
                 "router_groups_per_tok": 2, "routed_scaling_factor": 2.5},
    "unnormed": {"router_scoring": "sigmoid", "router_selection_bias": True, "router_num_groups": 4,
                 "router_groups_per_tok": 3, "norm_topk_prob": False},
    "one group": {"router_scoring": "sigmoid", "router_selection_bias": True, "routed_scaling_factor": 0.5},
    "no bias": {"router_scoring": "sigmoid", "router_num_groups": 2, "num_experts_per_tok": 6},
    "softmax in groups": {"router_num_groups": 4, "router_groups_per_tok": 2, "router_selection_bias": True},
    "every group": {"router_num_groups": 4, "router_groups_per_tok": 4, "num_experts_per_tok": 12},
}  # fmt: skip


def router_of(name, **fields):
    settings = {"num_experts": 12, "num_experts_per_tok": 3, **ROUTERS[name], **fields}
    config = FratrieEncoderConfig(**{**SPARSE, **settings})
    torch.manual_seed(0)
    router = Router(config)
    torch.nn.init.normal_(router.weight, std=0.4)
    if router.selection_bias is not None:
        router.selection_bias.normal_(std=0.3)
    return router, config


def spread(weights_NP, index_NP, experts=12):
    """Weights `(N, E)`, zero for the experts that are not chosen; the order of the choices is free."""
    assert all(len(set(row)) == len(row) for row in index_NP.tolist())
    return torch.zeros(len(index_NP), experts, dtype=weights_NP.dtype).scatter(1, index_NP, weights_NP)


@pytest.mark.parametrize("name", [name for name in ROUTERS if ROUTERS[name].get("router_scoring") == "sigmoid"])
def test_the_router_equals_deepseeks(name):
    router, config = router_of(name)
    theirs = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=16,
            n_routed_experts=12,
            num_experts_per_tok=config.num_experts_per_tok,
            n_group=config.router_num_groups,
            topk_group=config.router_groups_per_tok,
            norm_topk_prob=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
        )
    )
    theirs.weight.data.copy_(router.weight)
    if router.selection_bias is not None:
        theirs.e_score_correction_bias.copy_(router.selection_bias)
    tokens = torch.randn(300, 16)
    (logits, *choice), (their_logits, *their_choice) = router(tokens), theirs(tokens)
    close(logits, their_logits, 1e-6)
    close(spread(*choice), spread(*their_choice), 1e-6)


@torch.no_grad()
def route_naively(router, config, token):
    """Weights of the chosen experts by their number, one at a time."""
    logits = [float(row @ token) for row in router.weight]
    if config.router_scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        scores = [math.exp(x) / sum(map(math.exp, logits)) for x in logits]
    bias = [0.0] * len(scores) if router.selection_bias is None else router.selection_bias.tolist()
    rank = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = len(rank) // config.router_num_groups
    groups = [range(start, start + size) for start in range(0, len(rank), size)]
    groups.sort(key=lambda group: -sum(sorted(rank[e] for e in group)[-2:]))
    allowed = [expert for group in groups[: config.router_groups_per_tok] for expert in group]
    chosen = sorted(allowed, key=lambda e: -rank[e])[: config.num_experts_per_tok]
    total = sum(scores[e] for e in chosen) if config.norm_topk_prob else 1.0
    return {e: scores[e] / total * config.routed_scaling_factor for e in chosen}


@pytest.mark.parametrize("name", ROUTERS)
def test_the_router_equals_a_choice_token_by_token(name):
    router, config = router_of(name)
    router.double()
    tokens = torch.randn(60, 16).double()
    _, *choice = router(tokens)
    expected = torch.zeros(60, 12).double()
    for row, token in enumerate(tokens):
        for expert, weight in route_naively(router, config, token).items():
            expected[row, expert] = weight
    close(spread(*choice), expected)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_selection_bias_changes_the_choice_and_not_the_weights(scoring):
    fields = {"router_scoring": scoring, "router_num_groups": 1, "router_groups_per_tok": 1, "norm_topk_prob": False}
    router, _ = router_of("deepseek", **fields, routed_scaling_factor=1.0)
    tokens = torch.randn(50, 16)
    router.selection_bias.zero_()
    logits, _, before = router(tokens)
    router.selection_bias[7] = 10.0
    biased_logits, weights, after = router(tokens)
    assert torch.equal(biased_logits, logits)
    assert (after == 7).any(1).all() and not (before == 7).any(1).all()
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    close(weights, scores.gather(1, after), 1e-6)


def test_the_weights_sum_to_the_scaling_factor():
    for name in ("deepseek", "one group", "softmax in groups"):
        router, config = router_of(name)
        _, weights, _ = router(torch.randn(20, 16))
        close(weights.sum(-1), torch.full((20,), float(config.routed_scaling_factor)), 1e-6)


def test_a_token_that_no_expert_wants_gets_no_nan():
    """All sigmoids are zero in float32; the sum of the weights must not divide by it."""
    router, _ = router_of("deepseek", router_selection_bias=False)
    router.weight.data.fill_(-100.0)
    _, weights, _ = router(torch.full((2, 16), 5.0))
    assert weights.isfinite().all()


DEEPSEEK = {**ROUTERS["deepseek"], "num_experts": 8}


@with_grouped_kernel
@implementations
def test_the_layer_mixes_its_experts_with_the_routers_weights(implementation):
    dtype, tolerance = (torch.float32, 2e-5) if implementation == "grouped_mm" else (torch.float64, 1e-10)
    model = build(dtype=dtype, experts_implementation=implementation, **DEEPSEEK)
    layer, config = layer_of(model), model.config
    layer.router.selection_bias.normal_(std=0.3)
    hidden = torch.randn(7, 16, dtype=dtype)
    expected = torch.zeros_like(hidden)
    for row, token in enumerate(hidden):
        for expert, weight in route_naively(layer.router, config, token).items():
            inner = ACT2FN[config.hidden_act](layer.experts.up_proj[expert] @ token)
            expected[row] += weight * (layer.experts.down_proj[expert] @ inner)
    close(layer(hidden), expected, tolerance)


def test_no_gradient_reaches_the_selection_bias():
    model = build(FratrieEncoderForMaskedLM, **DEEPSEEK).train()
    model(IDS, attention_mask=MASK, labels=TOKEN_LABELS).loss.backward()
    router = model.model.layers[0].feed_forward.router
    assert not router.selection_bias.requires_grad and router.selection_bias.grad is None
    assert router.weight.grad.any()
    assert not [name for name, _ in model.named_parameters() if "selection_bias" in name]


def load(folder, **fields):
    return FratrieEncoderModel.from_pretrained(
        folder, experts_implementation="eager", output_loading_info=True, **fields
    )


def test_the_selection_bias_is_saved_and_loaded(tmp_path):
    model = build(dtype=torch.float32, **DEEPSEEK)
    for layer in model.layers:
        layer.feed_forward.router.selection_bias.normal_()
    model.save_pretrained(tmp_path)
    loaded, info = load(tmp_path)
    assert not any(info.values()), info
    for layer, other in zip(model.layers, loaded.eval().layers, strict=True):
        assert torch.equal(layer.feed_forward.router.selection_bias, other.feed_forward.router.selection_bias)
    close(loaded(IDS).last_hidden_state, model(IDS).last_hidden_state, 1e-5)


def test_a_router_in_float32_reads_the_states_of_a_model_in_float64():
    """Hugging Face loads DeepSeek's so, and a converted model keeps what it was given."""
    model = build(**DEEPSEEK)
    expected = model(IDS).last_hidden_state
    for layer in model.layers:
        layer.feed_forward.router.float()
    close(model(IDS).last_hidden_state, expected, 1e-5)


def test_the_selection_bias_is_zero_at_first_and_where_a_checkpoint_has_none(tmp_path, monkeypatch):
    model = build(dtype=torch.float32, **{**DEEPSEEK, "router_selection_bias": False})
    assert "selection_bias" not in str(model.state_dict().keys())
    model.save_pretrained(tmp_path)
    empty_like = torch.empty_like

    def poisoned(*args, **kwargs):
        tensor = empty_like(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() and tensor.device.type != "meta" else tensor

    monkeypatch.setattr(torch, "empty_like", poisoned)
    loaded, info = load(tmp_path, router_selection_bias=True)
    assert set(info["missing_keys"]) == {f"layers.{i}.feed_forward.router.selection_bias" for i in (0, 1)}
    for each in (loaded, build(**DEEPSEEK)):
        for layer in each.layers:
            bias = layer.feed_forward.router.selection_bias
            assert bias.shape == (8,) and torch.equal(bias, torch.zeros_like(bias))
    close(loaded.eval()(IDS).last_hidden_state, model(IDS).last_hidden_state, 1e-5)


# --- the losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_balance_of_a_uniform_router_is_one(top_k):
    assert load_balancing_loss((torch.zeros(12, EXPERTS),) * 3, top_k).item() == pytest.approx(1)
    ring = torch.eye(EXPERTS).repeat(6, 1) * 50  # sure of itself, and each expert as often as the others
    assert load_balancing_loss((ring,), 1).item() == pytest.approx(1)


@pytest.mark.parametrize("top_k", [1, 2])
def test_balance_of_a_collapsed_router_is_the_number_of_experts_over_the_choices(top_k):
    collapsed = torch.zeros(12, EXPERTS)
    collapsed[:, 2] = 80.0
    assert load_balancing_loss((collapsed,), top_k).item() == pytest.approx(EXPERTS / top_k)


def test_balance_is_the_mean_over_layers():
    """Not the loss of all layers' tokens together, which would let layers hide each other's collapse."""
    layers = tuple(torch.eye(EXPERTS)[expert].expand(5, EXPERTS) * 80 for expert in range(EXPERTS))
    assert load_balancing_loss(layers, 1).item() == pytest.approx(EXPERTS)
    assert load_balancing_loss((layers[0], torch.zeros(5, EXPERTS)), 1).item() == pytest.approx((EXPERTS + 1) / 2)


def test_balance_by_its_definition_and_with_gradient():
    logits = torch.randn(20, EXPERTS, requires_grad=True)
    probabilities = logits.softmax(-1)
    counts = torch.zeros(EXPERTS)
    for row in probabilities:
        for expert in row.topk(2).indices:
            counts[expert] += 1
    expected = EXPERTS * sum(counts[e] / 40 * probabilities[:, e].mean() for e in range(EXPERTS))
    loss = load_balancing_loss((logits,), 2)
    close(loss, expected, 1e-6)
    close(*(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, expected)), 1e-6)


@pytest.mark.parametrize("padded", [False, True])
def test_balance_is_mixtrals_over_the_choices(padded):
    """One counts the choices of a token, the other their shares, which sum to one."""
    layers = tuple(torch.randn(3, 14, EXPERTS))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3]) if padded else None
    expected = mixtral_balancing_loss(layers, EXPERTS, 2, mask)
    close(2 * load_balancing_loss(layers, 2, mask, "model"), expected, 1e-5)
    by_layer = torch.stack([mixtral_balancing_loss((logits,), EXPERTS, 2, mask) for logits in layers]).mean()
    close(2 * load_balancing_loss(layers, 2, mask), by_layer, 1e-5)
    assert not torch.isclose(by_layer, expected)


def test_z_loss_by_its_definition():
    layers = (torch.randn(5, EXPERTS), torch.randn(5, EXPERTS) * 3)
    expected = sum(sum(row.exp().sum().log() ** 2 for row in layer) / 5 for layer in layers) / 2
    close(router_z_loss(layers), expected, 1e-5)
    assert router_z_loss((torch.zeros(3, EXPERTS),)).item() == pytest.approx(torch.tensor(4.0).log().item() ** 2)


@pytest.mark.parametrize("loss", [lambda x, m: load_balancing_loss(x, 2, m), router_z_loss], ids=["balance", "z"])
def test_padding_does_not_count(loss):
    logits, mask = torch.randn(12, EXPERTS), torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 0]])
    garbage = torch.where(mask.flatten().bool()[:, None], logits, 70.0)
    close(loss((garbage,), mask), loss((logits[mask.flatten().bool()],), None), 1e-6)


# --- in the training loss ------------------------------------------------------------------------------------------

IDS = torch.tensor([[5, 6, 7, 8, 9], [11, 12, 13, 0, 0]])
MASK = (IDS != 0).long()
TOKEN_LABELS = torch.where(MASK.bool(), IDS, -100)
HEADS = {
    "masked": (FratrieEncoderForMaskedLM, TOKEN_LABELS, {}),
    "sentences": (FratrieEncoderForSequenceClassification, torch.tensor([0, 1]), {}),
    "tokens": (FratrieEncoderForTokenClassification, torch.where(MASK.bool(), IDS % 2, -100), {}),
    "causal": (FratrieDecoderForCausalLM, TOKEN_LABELS, {}),
    "texts": (FratrieDecoderForSequenceClassification, torch.tensor([0, 1]), {}),
    "seq2seq": (FratrieSeq2SeqForConditionalGeneration, torch.tensor([[4, 5, 6], [7, 8, 9]]), {}),
}
all_heads = pytest.mark.parametrize("head", HEADS)


@all_heads
def test_router_losses_are_part_of_the_training_loss_alone(head):
    model_class, labels, _ = HEADS[head]
    weights = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.25}
    losses = {}
    for name, fields in (("with", weights), ("without", {"router_aux_loss_coef": 0.0})):
        model = build(model_class, **fields)
        losses[name, "eval"] = model(IDS, attention_mask=MASK, labels=labels).loss
        outputs = model.train()(IDS, attention_mask=MASK, labels=labels)
        losses[name, "train"] = outputs.loss
    model = build(model_class, **weights).train()
    outputs = model(IDS, attention_mask=MASK, labels=labels)
    close(losses["with", "eval"], losses["without", "eval"])
    close(losses["without", "train"], losses["without", "eval"])
    stacks = 2 if head == "seq2seq" else 1  # the output holds the mean over stacks, the loss their sum
    extra = stacks * (0.5 * outputs.aux_loss + 0.25 * outputs.z_loss).double()
    assert extra > 0.1
    close(losses["with", "train"] - losses["without", "train"], extra, 1e-6)
    outputs.loss.backward()
    routers = [p for name, p in model.named_parameters() if name.endswith("router.weight")]
    assert routers and all(router.grad.any() for router in routers)


@all_heads
def test_router_logits_and_losses_are_returned_on_request_alone(head):
    model_class, labels, _ = HEADS[head]
    model = build(model_class)
    outputs = model(IDS, attention_mask=MASK, labels=labels)
    assert outputs.aux_loss is None and not any("router_logits" in name for name in outputs)
    loss = outputs.loss
    outputs = model(IDS, attention_mask=MASK, labels=labels, output_router_logits=True)
    assert outputs.aux_loss > 0 and outputs.z_loss > 0
    config = model.config.decoder if head == "seq2seq" else model.config
    extra = config.router_aux_loss_coef * outputs.aux_loss + config.router_z_loss_coef * outputs.z_loss
    stacks = 2 if head == "seq2seq" else 1  # of which the output has the mean
    close(outputs.loss, loss + stacks * extra)  # as in Hugging Face's models
    names = ["encoder_router_logits", "decoder_router_logits"] if head == "seq2seq" else ["router_logits"]
    for name in names:
        assert len(outputs[name]) == 2 and outputs[name][0].shape[-1] == EXPERTS
    dense = build(model_class, num_experts=0)
    assert dense(IDS, attention_mask=MASK, labels=labels, output_router_logits=True).aux_loss is None


def forms(head):
    """The same batch without padding, if its rows are equally long, padded left, and padded right."""
    ids, rows = torch.tensor([[5, 6, 7, 8], [11, 12, 13, 14]]), {}
    for side, widths in (("none", (0, 0)), ("left", (3, 0)), ("right", (0, 3))):
        padded = torch.nn.functional.pad(ids, widths, value=9)
        mask = torch.nn.functional.pad(torch.ones_like(ids), widths)
        labels = torch.tensor([0, 1]) if head in ("sentences", "texts") else torch.where(mask.bool(), padded % 2, -100)
        rows[side] = (padded, mask, labels)
    return rows


@pytest.mark.parametrize("head", ["masked", "sentences", "tokens", "causal", "texts"])
@pytest.mark.parametrize("unpad", [True, False], ids=["unpadded", "rows"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_training_loss(head, unpad, side):
    model = build(HEADS[head][0], unpad_inputs=unpad, router_z_loss_coef=0.1).train()
    padded, plain = (
        model(ids, attention_mask=mask, labels=labels).loss
        for ids, mask, labels in (forms(head)[side], forms(head)["none"])
    )
    close(padded, plain, 1e-6)


def test_padding_of_labels_changes_no_seq2seq_training_loss():
    model = build(FratrieSeq2SeqForConditionalGeneration, router_z_loss_coef=0.1).train()
    labels = torch.tensor([[4, 5, 6], [7, 8, 9]])
    padded = torch.nn.functional.pad(labels, (0, 4), value=-100)
    close(model(IDS, attention_mask=MASK, labels=padded).loss, model(IDS, attention_mask=MASK, labels=labels).loss)


@pytest.mark.parametrize("head", ["masked", "sentences", "tokens", "causal", "texts", "seq2seq"])
def test_the_number_of_targets_spelled_out_changes_nothing(head):
    """`num_items_in_batch` of a batch that is the whole global batch is what is counted without it."""
    model_class, labels, _ = HEADS[head]
    model = build(model_class, router_z_loss_coef=0.1).train()
    count = labels[:, 1:].ne(-100).sum() if head == "causal" else labels.ne(-100).sum()
    losses = [
        model(IDS, attention_mask=MASK, labels=labels, **arguments).loss
        for arguments in ({}, {"num_items_in_batch": count}, {"num_items_in_batch": int(count)})
    ]
    close(losses[1], losses[0])
    close(losses[2], losses[0])


@pytest.mark.parametrize("head", ["masked", "tokens", "causal", "sentences"])
def test_micro_batches_of_equal_routing_add_up_to_the_batch(head):
    """A router loss is a mean over tokens: equal micro-batches share it, each by its part of the targets."""
    model_class, _, _ = HEADS[head]
    model = build(model_class, router_z_loss_coef=0.1).train()
    ids = torch.tensor([[5, 6, 7, 8]])
    labels = torch.tensor([1]) if head == "sentences" else ids % 2
    count = 4 * (ids.shape[1] - 1 if head == "causal" else labels.numel())
    whole = model(ids.repeat(4, 1), labels=labels.repeat(4, *[1] * (labels.ndim - 1))).loss
    parts = [model(ids, labels=labels, num_items_in_batch=count).loss for _ in range(4)]
    close(sum(parts), whole)


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
def test_the_balance_alone_depends_on_how_a_batch_is_cut(coefficient):
    model = build(FratrieDecoderForCausalLM, router_aux_loss_coef=coefficient, router_z_loss_coef=0.01).train()
    ids = torch.randint(1, VOCAB, (6, 8), generator=torch.Generator().manual_seed(1))

    def gradients(parts):
        model.zero_grad()
        for part in parts:
            model(part, labels=part, num_items_in_batch=6 * 7, use_cache=False).loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    whole, cut = gradients([ids]), gradients(ids.split(2))
    difference = ((whole - cut).norm() / whole.norm()).item()
    assert difference < 1e-8 if coefficient == 0 else 1e-5 < difference < 0.01


def test_generate_with_router_logits_asked_for_in_the_configuration():
    model = build(FratrieDecoderForCausalLM, output_router_logits=True)
    outputs = model.generate(IDS, attention_mask=MASK, max_new_tokens=3, do_sample=False)
    assert torch.equal(outputs, build(FratrieDecoderForCausalLM).generate(IDS, attention_mask=MASK, max_new_tokens=3))


def test_balancing_loss_trains_a_collapsed_router():
    """Steps on this loss alone, from a router that sends most tokens to one expert, bring near to even use."""
    fields = {"num_hidden_layers": 1, "num_experts_per_tok": 1, "router_aux_loss_coef": 1.0}
    model = build(FratrieEncoderForMaskedLM, **fields).train()
    block = model.model.layers[0]
    common = torch.ones(16).double()
    block.mixer_output_norm.bias.data.copy_(common)
    router = block.feed_forward.router
    router.weight.data[0] += 0.15 * common
    ids, labels = torch.randint(1, VOCAB, (8, 8)), torch.full((8, 8), -100)
    optimizer = torch.optim.Adam([router.weight], lr=0.05)
    history = []
    for _ in range(40):
        outputs = model(ids, labels=labels)
        history.append(outputs.aux_loss.item())
        optimizer.zero_grad()
        outputs.loss.backward()
        optimizer.step()
    assert history[0] > 2 and history[-1] < 1.1


def test_configurations_of_the_siblings():
    for config_class in (FratrieEncoderConfig, FratrieDecoderConfig):
        assert config_class(num_experts=3).mlp_layer_types == ["sparse"] * 6
        assert config_class().mlp_layer_types == ["dense"] * 6


def test_a_router_with_a_selection_bias_is_built_in_float32(tmp_path):
    config = FratrieDecoderConfig(**SPARSE, router_selection_bias=True)
    built = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    built.save_pretrained(tmp_path)
    loaded = FratrieDecoderForCausalLM.from_pretrained(pretrained_model_name_or_path=tmp_path, dtype=torch.bfloat16)
    for model in (built, loaded):
        exact = {name for name, weight in model.state_dict().items() if weight.dtype == torch.float32}
        assert exact == {name for name in model.state_dict() if "router" in name} != set()
    weights = loaded.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in built.state_dict().items())
    assert built.to(torch.bfloat16).model.layers[0].feed_forward.router.weight.dtype == torch.bfloat16


@torch.no_grad()
def test_dense_layers_alone_keep_their_last_matrix_in_float32(tmp_path):
    model = build(FratrieEncoderModel, float32_parts=["down_proj"], mlp_layer_types=["dense", "sparse"])
    model.save_pretrained(tmp_path)
    loaded = FratrieEncoderModel.from_pretrained(tmp_path, dtype=torch.float16)
    fine = {name for name, weight in loaded.named_parameters() if weight.dtype == torch.float32}
    assert fine == {f"layers.0.feed_forward.down_proj.{name}" for name in ("weight", "bias")}
    tokens = torch.full((1, 3, 16), 0.5)
    for layer, exact in zip(loaded.layers, model.layers, strict=True):
        close(layer.feed_forward(tokens.half()).double(), exact.feed_forward(tokens.double()), 0.02)


@torch.no_grad()
def test_no_token_and_a_traced_graph():
    """The loop depends on the tokens of each expert, which a trace would freeze."""
    settings = {**SPARSE, "experts_implementation": "grouped_mm", "return_dict": False, "use_cache": False}
    model = FratrieDecoderForCausalLM(FratrieDecoderConfig(**settings)).eval()
    assert model.model.layers[0].feed_forward(torch.zeros(0, 16)).shape == (0, 16)
    ids, others = torch.randint(1, VOCAB, (2, 2, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, (ids,), strict=False, check_trace=False)
    torch.testing.assert_close(traced(others)[0], model(others)[0], rtol=1e-4, atol=1e-4)
