"""Half precision, and activation checkpointing: less memory, the same model."""

from typing import Any

import pytest
import torch
from combinations import (
    CASES,
    DECODER,
    ENCODER,
    SEQ2SEQ,
    Case,
    case_of,
    cases,
    output_mask,
    padded_inputs,
    training_inputs,
)

from fratrie.modeling.block import Block

every_case = pytest.mark.parametrize("case", CASES, ids=str)
half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@half
@every_case
@torch.no_grad()
def test_half_precision_is_near_full_precision(case: Case, dtype: torch.dtype):
    inputs = padded_inputs(case.sibling)
    mask = output_mask(case.sibling, inputs)
    model = case.build()
    expected = model(**inputs).logits[mask]
    model.to(dtype)
    for kwargs in [{"use_cache": False}, {"use_cache": True}] if case.sibling in (DECODER, SEQ2SEQ) else [{}]:
        logits = model(**inputs, **kwargs).logits
        assert logits.dtype == dtype
        error = (logits[mask].float() - expected).abs()
        assert error.mean() < 0.03 * expected.std(), error.mean() / expected.std()


@every_case
def test_bfloat16_trains(case: Case):
    model = case.build().to(torch.bfloat16).train()
    loss = model(**training_inputs(case.sibling)).loss
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in model.parameters())
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("case", cases(names=("default", "llama", "alibi", "linear_full", "mixtral")), ids=str)
def test_autocast_trains_near_full_precision(case: Case):
    model = case.build().train()
    inputs = training_inputs(case.sibling)
    expected = model(**inputs).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=0.02, atol=0.02)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    "case", cases(names=("default", "sinusoidal_scaled", "t5", "linear", "odd_experts_linear")), ids=str
)
@torch.no_grad()
def test_double_precision_is_double_throughout(case: Case):
    inputs = padded_inputs(case.sibling)
    model = case.build().double()
    logits = model(**inputs).logits
    assert logits.dtype == torch.float64
    mask = output_mask(case.sibling, inputs)
    kwargs = {} if case.sibling == ENCODER else {"use_cache": False}
    other = case.build(attn_implementation="eager").double()(**inputs, **kwargs).logits
    torch.testing.assert_close(other[mask], logits[mask], rtol=1e-6, atol=1e-6)


def fully_masked_row(sibling: str) -> dict[str, torch.Tensor]:
    inputs = padded_inputs(sibling)
    inputs["attention_mask"][2] = 0
    return inputs


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    cases(names=("default", "t5", "sliding_alibi", "all_mixers", "padding_kept", "linear", "linear_to_sliding")),
    ids=str,
)
def test_a_row_without_a_single_real_token_gives_no_nan(case: Case, dtype: torch.dtype, implementation: str):
    model = case.build(attn_implementation=implementation).to(dtype)
    caching: list[dict[str, Any]] = [{}] if case.sibling == ENCODER else [{"use_cache": False}, {"use_cache": True}]
    for kwargs in caching:
        logits = model(**fully_masked_row(case.sibling), **kwargs).logits
        logits.float().square().mean().backward()
        assert logits.isfinite().all()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("case", cases(names=("default", "all_mixers", "padding_kept", "mixtral")), ids=str)
@torch.no_grad()
def test_a_row_without_real_tokens_leaves_the_other_rows_alone(case: Case):
    model = case.build()
    inputs, masked = padded_inputs(case.sibling), fully_masked_row(case.sibling)
    mask = output_mask(case.sibling, inputs)
    mask[2] = False
    torch.testing.assert_close(model(**masked).logits[mask], model(**inputs).logits[mask], rtol=2e-5, atol=2e-5)


def test_a_batch_of_nothing_but_padding_gives_no_nan():
    for case in cases(names=("default", "linear", "sliding", "mixtral")):
        inputs = padded_inputs(case.sibling)
        inputs["attention_mask"].zero_()
        assert case.build()(**inputs).logits.isfinite().all(), case


def gradients(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(3)  # dropout
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@every_case
def test_activation_checkpointing_gives_equal_loss_and_gradients(case: Case):
    inputs = training_inputs(case.sibling)
    loss, expected = gradients(case.build().train(), inputs)
    model = case.build().train()
    runs = count_block_runs(model)
    model.activation_checkpointing_enable()
    assert model.is_activation_checkpointing
    again, actual = gradients(model, inputs)
    blocks = sum(isinstance(module, Block) for module in model.modules())
    assert runs == {"mixer": 2 * blocks}  # forward, and once more in backward
    torch.testing.assert_close(again, loss, rtol=1e-6, atol=1e-6)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def count_block_runs(model: torch.nn.Module) -> dict[str, int]:
    runs = {"mixer": 0}

    def count(*_: Any) -> None:
        runs["mixer"] += 1

    for module in model.modules():
        if isinstance(module, Block):
            module.mixer.register_forward_hook(count)
    return runs


@pytest.mark.parametrize("case", cases(names=("mixtral", "shared_experts")), ids=str)
def test_the_routers_losses_keep_their_gradient_under_checkpointing(case: Case):
    """Captured router logits lose their graph where the pass is run again; the balancing loss must not."""
    inputs = training_inputs(case.sibling)
    norms = []
    for checkpointing in (False, True):
        model = case.build(router_aux_loss_coef=5.0, router_z_loss_coef=2.0).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        _, actual = gradients(model, inputs)
        norms.append(torch.stack([g.norm() for name, g in actual.items() if "router" in name]))
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=1e-6)
    weak = case.build(router_aux_loss_coef=0.0, router_z_loss_coef=0.0).train()
    without = torch.stack([g.norm() for name, g in gradients(weak, inputs)[1].items() if "router" in name])
    assert (norms[0] > 2 * without).all()


def test_reentrant_checkpointing_keeps_the_routers_gradient():
    """With `use_reentrant=True` the captured router logits have no graph: a silent loss of the balancing loss."""
    inputs = training_inputs(DECODER)
    case = case_of(DECODER, "mixtral")
    _, expected = gradients(case.build(router_aux_loss_coef=5.0).train(), inputs)
    model = case.build(router_aux_loss_coef=5.0).train()
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    _, actual = gradients(model, inputs)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("sibling", "name"),
    [(SEQ2SEQ, "default"), (SEQ2SEQ, "t5"), (SEQ2SEQ, "unequal_stacks"), (DECODER, "t5"), (ENCODER, "t5")],
)
def test_reentrant_checkpointing_passes_gradients_through_encoder_states_and_position_biases(sibling: str, name: str):
    """It sees no gradient of what a layer is given by name."""
    case, inputs = case_of(sibling, name), training_inputs(sibling)
    _, expected = gradients(case.build().train(), inputs)
    model = case.build().train()
    model.activation_checkpointing_enable({"use_reentrant": True})
    _, actual = gradients(model, inputs)
    assert actual.keys() == expected.keys()
    for weight, gradient in expected.items():
        torch.testing.assert_close(actual[weight], gradient, atol=1e-5, rtol=1e-5, msg=weight)


@pytest.mark.parametrize("case", cases(DECODER, SEQ2SEQ, names=("default", "all_mixers")), ids=str)
def test_checkpointing_with_a_cache_asked_for_gives_the_same_loss(case: Case):
    inputs = training_inputs(case.sibling)
    loss, expected = gradients(case.build().train(), inputs)
    model = case.build().train()
    model.activation_checkpointing_enable()
    again, actual = gradients(model, {**inputs, "use_cache": True})
    torch.testing.assert_close(again, loss, rtol=1e-6, atol=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_checkpointing_can_be_switched_off_and_stays_out_of_evaluation():
    model = case_of(ENCODER).build()
    model.activation_checkpointing_enable()
    runs = count_block_runs(model)
    model(**training_inputs(ENCODER)).loss.backward()
    assert runs["mixer"] == 2  # evaluation mode
    model.train().activation_checkpointing_disable()
    model(**training_inputs(ENCODER)).loss.backward()
    assert runs["mixer"] == 4


@pytest.mark.parametrize("case", cases(ENCODER, DECODER, names=("default", "mixtral", "linear")), ids=str)
def test_checkpointing_of_packed_rows_gives_equal_gradients(case: Case):
    padded = training_inputs(case.sibling)
    _, expected = gradients(case.build().train(), padded)
    model = case.build().train()
    model.activation_checkpointing_enable()
    real = padded["attention_mask"].bool()
    packed = {
        "input_ids": padded["input_ids"][real][None],
        "labels": padded["labels"][real][None],
        "position_ids": (padded["attention_mask"].cumsum(-1) - 1)[real][None],
    }
    _, actual = gradients(model, packed)
    for name, gradient in expected.items():
        if not name.endswith("k_proj.bias"):
            torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
