"""The encoder of images: the contract of `test_common` and `test_saving`, for pixels in the place of tokens."""

import logging
from typing import Any

import pytest
import torch
import transformers
from combinations import LINEAR, SIZES, SLIDING
from transformers import AutoModel, AutoModelForImageClassification

from fratrie import (
    FratrieEncoderConfig,
    FratrieEncoderForImageClassification,
    FratrieEncoderModel,
    norm_slots,
)
from fratrie.modeling.block import Block

VIT = {
    **norm_slots("pre"),
    "embedding_norm": None,
    "patch_size": 4,
    "image_size": 12,
    "num_channels": 3,
    "max_position_embeddings": 10,
    "classifier_pooling": "first",
    "num_labels": 5,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "vit": {},
    "post_norm_mean": {**norm_slots("post"), "embedding_norm": "layer_norm", "classifier_pooling": "mean"},
    "rotary_experts": {"position_type": "rotary", "num_experts": 4, "gated_feed_forward": True},
    "sinusoidal_mixers": {"position_type": "sinusoidal", "layer_types": [SLIDING, LINEAR], "sliding_window": 2},
    "relative_perceptron": {"position_type": "relative", "classifier_hidden_sizes": [16]},
}
TOKENS = 10  # nine patches and the vector that stands for the image
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def build(layout: str = "vit", model_class: Any = FratrieEncoderForImageClassification, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = FratrieEncoderConfig(**{**SIZES, **VIT, **LAYOUTS[layout], **fields})
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def images(batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 3, 12, 12, generator=torch.Generator().manual_seed(1))


LABELS = torch.tensor([4, 0, 2])


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(pixel_values=images(), labels=LABELS).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


# --- outputs -------------------------------------------------------------------------------------------------------


@every_layout
@torch.no_grad()
def test_scores_are_those_of_the_head_on_the_pooled_states(layout: str):
    model = build(layout)
    logits = model(pixel_values=images()).logits
    assert logits.shape == (3, 5) and logits.isfinite().all() and logits.std() > 0.05
    states = model.model(pixel_values=images()).last_hidden_state
    assert states.shape == (3, TOKENS, 32)
    pooled = states.mean(1) if model.config.classifier_pooling == "mean" else states[:, 0]
    close(logits, model.classifier(pooled))


@every_layout
@torch.no_grad()
def test_an_image_alone_equals_the_image_in_a_batch(layout: str):
    model = build(layout)
    alone = torch.cat([model(pixel_values=image[None]).logits for image in images()])
    close(model(pixel_values=images()).logits, alone)


@torch.no_grad()
def test_every_patch_and_its_place_count():
    model = build()
    expected = model(pixel_values=images()).logits
    for top in range(0, 12, 4):
        for left in range(0, 12, 4):
            other = images()
            other[:, :, top + 1, left + 2] += 3
            assert (model(pixel_values=other).logits - expected).abs().max() > 1e-3
    swapped = images()
    swapped[..., :4], swapped[..., 4:8] = images()[..., 4:8], images()[..., :4]
    assert (model(pixel_values=swapped).logits - expected).abs().max() > 1e-3


@every_layout
@torch.no_grad()
def test_hidden_states_are_one_a_layer_and_the_embeddings(layout: str):
    model = build(layout)
    outputs = model(pixel_values=images(), output_hidden_states=True)
    assert len(outputs.hidden_states) == 3
    assert {state.shape for state in outputs.hidden_states} == {(3, TOKENS, 32)}
    last = model.model(pixel_values=images()).last_hidden_state
    assert torch.equal(outputs.hidden_states[-1], last)
    close(outputs.logits, model(pixel_values=images()).logits)


@every_layout
@torch.no_grad()
def test_attentions_are_one_a_softmax_layer_and_sum_to_one(layout: str):
    model = build(layout, attn_implementation="eager")
    attentions = model(pixel_values=images(), output_attentions=True).attentions
    assert len(attentions) == sum(kind != LINEAR for kind in model.config.layer_types)
    for weights in attentions:
        assert weights.shape == (3, 4, TOKENS, TOKENS)
        close(weights.sum(-1), torch.ones(3, 4, TOKENS))


@every_layout
def test_eager_equals_sdpa_forward_and_backward(layout: str):
    (loss, expected), (other, actual) = (
        gradients(build(layout, attn_implementation=name)) for name in ("eager", "sdpa")
    )
    close(other, loss)
    for name, gradient in expected.items():
        if not name.endswith("k_proj.bias"):
            close(actual[name], gradient, 1e-4)


@torch.no_grad()
def test_a_tuple_on_request_holds_the_same():
    model = build()
    named = model(pixel_values=images(), labels=LABELS, output_hidden_states=True)
    plain = model(pixel_values=images(), labels=LABELS, output_hidden_states=True, return_dict=False)
    assert isinstance(plain, tuple) and len(plain) == len(named.to_tuple()) == 3
    assert torch.equal(plain[0], named.loss) and torch.equal(plain[1], named.logits)


@pytest.mark.parametrize("layout", ["vit", "rotary_experts"])
@torch.no_grad()
def test_forward_compiles_into_one_graph(layout: str):
    torch._dynamo.reset()
    model = build(layout, experts_implementation="batched_mm")
    expected = model(pixel_values=images()).logits
    close(torch.compile(model, fullgraph=True, backend="eager")(pixel_values=images()).logits, expected)


# --- training ------------------------------------------------------------------------------------------------------


@every_layout
def test_every_parameter_gets_a_gradient(layout: str):
    for name, gradient in gradients(build(layout).train())[1].items():
        assert gradient is not None and gradient.isfinite().all(), name
        if not name.endswith("k_proj.bias"):  # what is added to all keys alike leaves a softmax as it is
            assert gradient.abs().max() > 0, name


@every_layout
def test_three_steps_lower_the_loss(layout: str):
    model = build(layout).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(pixel_values=images(), labels=LABELS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05


@every_layout
def test_activation_checkpointing_gives_equal_loss_and_gradients(layout: str):
    loss, expected = gradients(build(layout).train())
    model = build(layout).train()
    runs: list[int] = []
    for module in model.modules():
        if isinstance(module, Block):
            module.mixer.register_forward_hook(lambda *_: runs.append(1))
    model.activation_checkpointing_enable()
    again, actual = gradients(model)
    assert len(runs) == 4  # each block forward, and once more in backward
    close(again, loss, 1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_router_losses_join_the_loss_in_training_and_where_they_are_asked_for():
    model = build("rotary_experts", router_aux_loss_coef=0.5, router_z_loss_coef=0.25)
    evaluated = model(pixel_values=images(), labels=LABELS)
    asked_for = model(pixel_values=images(), labels=LABELS, output_router_logits=True)
    trained = model.train()(pixel_values=images(), labels=LABELS)
    assert [tuple(logits.shape) for logits in asked_for.router_logits] == [(3 * TOKENS, 4)] * 2
    close(asked_for.loss, trained.loss)
    close(trained.loss - evaluated.loss, 0.5 * trained.aux_loss + 0.25 * trained.z_loss)
    assert trained.loss > evaluated.loss + 0.05
    assert model.eval()(pixel_values=images()).router_logits is None


PROBLEMS = {
    "single_label_classification": (LABELS, torch.nn.functional.cross_entropy),
    "multi_label_classification": (
        torch.eye(5)[LABELS],
        torch.nn.functional.binary_cross_entropy_with_logits,
    ),
    "regression": (torch.randn(3, 5), torch.nn.functional.mse_loss),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_problem_types(problem: str):
    labels, expected = PROBLEMS[problem]
    outputs = build(problem_type=problem)(pixel_values=images(), labels=labels)
    close(outputs.loss, expected(outputs.logits, labels))
    model = build()
    assert model.config.problem_type is None
    if problem == "multi_label_classification":
        labels = labels.long()
    if problem != "regression":  # several float targets might be either: they are read as labels
        model(pixel_values=images(), labels=labels)
        assert model.config.problem_type == problem


def test_labels_that_do_not_fit_are_named():
    model = build(problem_type="single_label_classification")
    with pytest.raises(ValueError, match="Label 5 lies outside the 5 labels"):
        model(pixel_values=images(), labels=torch.tensor([0, 5, 1]))
    with pytest.raises(ValueError, match=r"\(2,\) do not fit one label"):
        model(pixel_values=images(), labels=torch.tensor([0, 1]))


def test_micro_batches_add_up_to_the_loss_of_the_whole_batch():
    model = build("post_norm_mean")
    whole = model(pixel_values=images(), labels=LABELS).loss
    parts = [
        model(pixel_values=images()[rows], labels=LABELS[rows], num_items_in_batch=torch.tensor(3)).loss
        for rows in (slice(0, 1), slice(1, 3))
    ]
    close(sum(parts), whole)


# --- precision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_layout
@torch.no_grad()
def test_half_precision_is_near_full_precision(layout: str, dtype: torch.dtype):
    """With pixels in float32, as image processors give them, and in the model's own precision."""
    model = build(layout)
    expected = model(pixel_values=images()).logits
    model.to(dtype)
    for pixels in (images(), images().to(dtype)):
        logits = model(pixel_values=pixels).logits
        assert logits.dtype == dtype
        assert (logits.float() - expected).abs().mean() < 0.03 * expected.std()


@every_layout
def test_bfloat16_trains(layout: str):
    loss, grads = gradients(build(layout).to(torch.bfloat16).train())
    assert loss.dtype == torch.float32 and loss.isfinite()
    assert all(grad.dtype == torch.bfloat16 and grad.isfinite().all() for grad in grads.values())


# --- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.fixture
def warnings_of_transformers(caplog):
    """What transformers logs, which it does not propagate by itself."""
    transformers.utils.logging.enable_propagation()
    caplog.set_level(logging.WARNING)
    yield caplog
    transformers.utils.logging.disable_propagation()


@every_layout
@torch.no_grad()
def test_a_reloaded_model_gives_the_same_output_quietly(layout: str, tmp_path, warnings_of_transformers):
    model = build(layout)
    model.save_pretrained(tmp_path)
    reloaded, info = AutoModelForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert type(reloaded) is FratrieEncoderForImageClassification
    assert not any(info.values()) and not warnings_of_transformers.records
    state, expected = reloaded.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    close(reloaded.eval()(pixel_values=images()).logits, model(pixel_values=images()).logits, 1e-6)


@every_layout
def test_nothing_is_left_uninitialised_when_weights_are_missing(layout: str, monkeypatch):
    empty_like = torch.empty_like

    def poisoned(*args, **kwargs):
        tensor = empty_like(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() and tensor.device.type != "meta" else tensor

    monkeypatch.setattr(torch, "empty_like", poisoned)
    config = build(layout).config
    model = FratrieEncoderForImageClassification.from_pretrained(None, config=config, state_dict={})
    fresh = FratrieEncoderForImageClassification(config)
    for name, parameter in model.named_parameters():
        other = fresh.get_parameter(name)
        assert parameter.isfinite().all(), name
        if other.std(correction=0) == 0:
            assert torch.equal(parameter, other), name
        else:
            assert 0.4 < parameter.std() / other.std() < 2.5, name


@torch.no_grad()
def test_the_head_loads_a_bare_model_and_the_bare_model_the_head(tmp_path):
    base = build(model_class=FratrieEncoderModel)
    base.save_pretrained(tmp_path / "base")
    model, info = AutoModelForImageClassification.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert set(info["missing_keys"]) == {"classifier.out_proj.weight", "classifier.out_proj.bias"}
    assert not info["unexpected_keys"]
    expected = base(pixel_values=images()).last_hidden_state
    close(model.eval().model(pixel_values=images()).last_hidden_state, expected, 1e-6)
    model.save_pretrained(tmp_path / "head")
    bare, info = AutoModel.from_pretrained(tmp_path / "head", output_loading_info=True)
    assert not info["missing_keys"]
    close(bare.eval()(pixel_values=images()).last_hidden_state, expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_saved_dtype_is_kept(dtype: torch.dtype, tmp_path):
    build().to(dtype).save_pretrained(tmp_path)
    reloaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in reloaded.parameters()} == {dtype}


def test_what_the_library_reads_of_the_model():
    model = build()
    assert model.main_input_name == "pixel_values"
    assert model.get_input_embeddings() is model.model.embed_tokens
