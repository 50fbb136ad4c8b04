"""The loss over chunks of rows is that of the whole logits, and so are its gradients and what models learn by it."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from fratrie import FratrieDecoderForCausalLM, FratrieEncoderForMaskedLM, FratrieSeq2SeqForConditionalGeneration
from fratrie.modeling import chunked_loss
from fratrie.modeling.chunked_loss import chunked_cross_entropy
from fratrie.modeling.heads import predict_tokens
from fratrie.modeling.losses import token_cross_entropy

ROWS, WIDTH, VOCAB = 7, 4, 11
LABELS = torch.tensor([3, -100, 0, 10, 3, -100, 7])
IDS = torch.randint(2, VOCAB, (3, 5), generator=torch.Generator().manual_seed(1))


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, WIDTH), (VOCAB, WIDTH), (VOCAB,))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def plain(states, weight, bias, labels, count=None):
    return token_cross_entropy(nn.functional.linear(states, weight, bias), labels, count)


def loss_and_gradients(function, tensors, *arguments):
    loss = function(*tensors, *arguments)
    return loss, *torch.autograd.grad(loss * 3, [tensor for tensor in tensors if tensor is not None])


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of one row, since what fits into one chunk takes the plain form, and blocks of a row or two."""
    monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", 4)
    monkeypatch.setattr(chunked_loss, "BLOCK_BYTES", 8 * VOCAB)


@pytest.fixture(params=[1, 3, ROWS])
def rows(request, small_chunks, monkeypatch):
    """Rows of a chunk."""
    monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", 8 * VOCAB * request.param)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("count", [None, 9, torch.tensor(9.0)], ids=str)
def test_loss_and_gradients_are_those_of_the_logits(count):
    for bias in (True, False):
        tensors = inputs() if bias else [*inputs()[:2], None]
        close(
            loss_and_gradients(chunked_cross_entropy, tensors, LABELS, count),
            loss_and_gradients(plain, tensors, LABELS, count),
        )


@pytest.mark.usefixtures("rows")
def test_gradients_by_differences():
    assert torch.autograd.gradcheck(chunked_cross_entropy, (*inputs(), LABELS))


@pytest.mark.usefixtures("rows")
@torch.no_grad()
def test_ignored_rows_on_a_device_where_they_are_not_left_out_first():
    """The sum over chunks passes over them too."""
    tensors = inputs()
    total, gradients = chunked_loss._sum_over_chunks((True,) * 3, *tensors, LABELS)
    with torch.enable_grad():
        expected = loss_and_gradients(plain, tensors, LABELS, 3)
    close((total / 3, *gradients), expected)


@pytest.mark.usefixtures("rows")
def test_nothing_to_predict_costs_nothing():
    for labels in (torch.full((ROWS,), -100), LABELS[:0]):
        states, weight, bias = inputs()
        states = states[: len(labels)]
        for each in loss_and_gradients(chunked_cross_entropy, [states, weight, bias], labels):
            assert not each.any()


@pytest.mark.usefixtures("rows")
def test_a_second_pass_through_a_kept_graph():
    """The first may scale its gradients in place, and an optimizer may change them."""
    tensors = inputs()
    loss = chunked_cross_entropy(*tensors, LABELS)
    first = torch.autograd.grad(loss * 3, tensors, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.zero_()
    close(torch.autograd.grad(loss * 3, tensors), tuple(kept))


def test_a_weight_at_rest_gets_no_gradient_and_costs_none():
    states, weight, bias = inputs()
    weight.requires_grad_(False)
    loss = chunked_cross_entropy(states, weight, bias, LABELS)
    assert loss.grad_fn.next_functions[0][0].gradients[1] is None
    loss.backward()
    expected = loss_and_gradients(plain, [states, weight.requires_grad_(), bias], LABELS)
    close((states.grad * 3, bias.grad * 3), (expected[1], expected[3]))


def test_gradients_of_gradients_are_refused():
    tensors = inputs()
    with pytest.raises(ValueError, match=r"create_graph=True.*chunked_loss=False"):
        torch.autograd.grad(chunked_cross_entropy(*tensors, LABELS), tensors, create_graph=True)


def test_every_row_needs_a_label():
    with pytest.raises(ValueError, match=r"3 labels do not fit states of shape \(7, 4\)"):
        chunked_cross_entropy(*inputs(), LABELS[:3])


@pytest.mark.usefixtures("rows")
def test_autocast_rounds_the_products_but_not_the_sums():
    """As close to the exact loss and gradients as whole logits under autocast, and in the dtypes of the inputs."""
    tensors = inputs(torch.float32)
    exact = loss_and_gradients(plain, [tensor.double() for tensor in tensors], LABELS)
    with torch.autocast("cpu", torch.bfloat16):
        actual = loss_and_gradients(chunked_cross_entropy, tensors, LABELS)
        rounded = loss_and_gradients(plain, tensors, LABELS)
    for each, theirs, expected in zip(actual, rounded, exact, strict=True):
        assert each.dtype == torch.float32
        assert (each - expected).norm() <= 1.2 * (theirs - expected).norm() + 1e-3


# --- models --------------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 8,
    "pad_token_id": 0,
    "experts_implementation": "eager",  # in float64
}
MODELS = {
    "encoder": (FratrieEncoderForMaskedLM, {}),
    "encoder of masked rows": (FratrieEncoderForMaskedLM, {"sparse_prediction": True}),
    "decoder with experts": (FratrieDecoderForCausalLM, {"num_experts": 2, "router_z_loss_coef": 0.1}),
    "decoder with a head of its own": (FratrieDecoderForCausalLM, {"tie_word_embeddings": False}),
    "encoder-decoder": (FratrieSeq2SeqForConditionalGeneration, {}),
    "encoder-decoder with biases": (FratrieSeq2SeqForConditionalGeneration, {"lm_head_bias": True}),
}


def build(name="decoder with experts", chunked=True):
    model_class, changes = MODELS[name]
    torch.manual_seed(0)
    config = model_class.config_class(**SIZES, **changes, chunked_loss=chunked)
    return model_class(config).double().train()


def run(model, **arguments):
    return model(IDS, labels=IDS.where(IDS % 3 > 0, -100), **arguments)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [None, 20])
def test_models_learn_the_same(name, count):
    trained = []
    for chunked in (True, False):
        model = build(name, chunked)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            outputs = run(model, num_items_in_batch=count)
            assert (outputs.logits is None) == chunked
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append((outputs.loss, dict(model.named_parameters())))
    close(trained[0], trained[1], 1e-10)


def test_logits_are_there_in_evaluation_and_without_labels_or_gradients():
    model = build()
    assert model(IDS).logits.shape == (*IDS.shape, VOCAB)
    with torch.no_grad():
        assert run(model).logits is not None
    assert run(model.eval()).logits is not None


def hooked(model):
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)
    return model


def parametrized(model):
    nn.utils.parametrizations.weight_norm(model.lm_head)
    return model


def adapted(model):
    return get_peft_model(model, LoraConfig(target_modules=["lm_head"], init_lora_weights=False))


def replaced(model):
    """As Accelerate's hooks do."""
    layer = model.lm_head
    layer.forward = lambda states: nn.functional.linear(states, layer.weight) * 2
    return model


@pytest.mark.parametrize("change", [hooked, parametrized, adapted, replaced])
def test_output_layers_that_are_more_than_their_weights_are_called(change):
    losses = []
    for chunked in (True, False):
        model = change(build("decoder with a head of its own", chunked))
        outputs = run(model)
        assert outputs.logits is not None
        losses.append(outputs.loss)
    close(*losses)


def test_compiled_graphs_stay_whole():
    model, states, labels = build("decoder with a head of its own"), torch.randn(3, 5, 8).double(), IDS
    compiled = torch.compile(predict_tokens, fullgraph=True, backend="eager")
    close(compiled(model, states, labels, None)[0], predict_tokens(model, states, labels, None)[0])


def test_sums_in_float16_would_overflow_and_are_left_to_the_plain_form(monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", 2 * 50 * 19_999)  # two chunks
    states, weight = torch.full((20_000, 8), 10.0), torch.zeros(50, 8, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        loss = chunked_cross_entropy(states, weight, None, torch.zeros(20_000, dtype=torch.long))
    loss.backward()
    assert weight.grad.isfinite().all()
