"""The attention implementations of Hugging Face: which are served, what they are called with, what they refuse.

No flash kernel runs on a CPU. A stand-in with the same call, written out here, takes its place, and must give what
sdpa gives: so layouts, scaling, windows and the form of the masks are right.
"""

from typing import Any

import pytest
import torch
from combinations import (
    DECODER,
    ENCODER,
    SEQ2SEQ,
    SIBLINGS,
    Case,
    case_of,
    cases,
    documents,
    gives_weights,
    output_mask,
    padded_inputs,
    stack_configs,
)
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig
from transformers.integrations.flex_attention import WrappedFlexAttention
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fratrie.modeling.attention import CrossAttention, SoftmaxAttention
from fratrie.modeling.latent_attention import LatentAttention

BIASES = ("relative", "alibi")


def has_bias(case: Case) -> bool:
    return any(config.position_type in BIASES for config in stack_configs(case.config()))


def needs_scores(case: Case) -> bool:
    """Whether some mixer adds to its single scores, or masks them in a way of its own."""
    mixers = [mixer for config in stack_configs(case.config()) for mixer in config.mixers]
    return any(mixer.adds_to_scores or mixer.mask_form == "globals" for mixer in mixers)


WITH_BIAS = [case for case in cases() if has_bias(case) or needs_scores(case)]
WITHOUT_BIAS = [case for case in cases() if case not in WITH_BIAS]


def window(module: torch.nn.Module, sliding_window: int | None, queries: int, keys: int) -> torch.Tensor:
    """Which key each query sees, by causality and window, counted from the end as flash kernels do."""
    distance = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if module.is_causal:
        seen = distance >= 0
    if sliding_window is not None and keys > sliding_window:
        reach = sliding_window - 1  # Hugging Face calls flash with (sliding_window - 1, sliding_window - 1)
        seen = seen & (distance.abs() <= reach)
    return seen


class FlashStandIn:
    """Flash attention's call and meaning, written out, with a record of its calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        assert "position_bias" not in kwargs
        config = module.config
        assert query.shape[1] == config.num_attention_heads
        assert key.shape[:-1] == value.shape[:-1] and key.shape[1] == config.num_key_value_heads
        head, value_head = module.head_dim, module.head_dim
        if isinstance(module, LatentAttention):  # smaller values are padded within
            head, value_head = sum(module.sizes), module.value_size
        assert query.shape[-1] == key.shape[-1] == head and value.shape[-1] == value_head <= head
        assert attention_mask is None or attention_mask.shape == (key.shape[0], key.shape[2])
        self.calls.append({
            "module": module, "scaling": scaling, "window": sliding_window, "dropout": dropout, "mask": attention_mask,
        })  # fmt: skip
        if kwargs.get("cu_seq_lens_q") is None:
            return attend(module, query * scaling, key, value, attention_mask, sliding_window), None
        queries, keys = (kwargs[name].diff().tolist() for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
        parts = zip(query.split(queries, 2), key.split(keys, 2), value.split(keys, 2), strict=True)
        mixed = [attend(module, q * scaling, k, v, None, sliding_window) for q, k, v in parts]
        return torch.cat(mixed, dim=1), None


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """Softmax attention of scaled queries, written out."""
    seen = window(module, sliding_window, query.shape[2], key.shape[2])[None, None]
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, None, :].bool()
    key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    scores = (query @ key.transpose(2, 3)).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ value).transpose(1, 2)


@pytest.fixture
def flash(monkeypatch) -> FlashStandIn:
    """The stand-in under the name `flash_attention_2`, whose masks stay Hugging Face's."""
    stand_in = FlashStandIn()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", stand_in)
    return stand_in


def use(model: torch.nn.Module, implementation: str) -> torch.nn.Module:
    """Set an implementation without the check that its package is installed."""
    for config in (model.config, *stack_configs(model.config)):
        config._attn_implementation = implementation
    return model


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def bidirectional_window(case: Case) -> bool:
    """Whether a sliding layer looks to both sides, where flash counts its window in another way (see below)."""
    return "sliding_attention" in stack_configs(case.config())[0].layer_types and case.sibling != DECODER


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("case", [case for case in WITHOUT_BIAS if not bidirectional_window(case)], ids=str)
@torch.no_grad()
def test_flash_attention_gives_what_sdpa_gives(case: Case, side: str, flash: FlashStandIn):
    model = case.build()
    inputs = padded_inputs(case.sibling, side)
    mask = output_mask(case.sibling, inputs)
    caching: list[dict[str, Any]] = [{}] if case.sibling == ENCODER else [{"use_cache": False}, {"use_cache": True}]
    for kwargs in caching:
        use(model, "sdpa")
        expected = model(**inputs, **kwargs).logits[mask]
        assert not flash.calls
        close(use(model, "flash_attention_2")(**inputs, **kwargs).logits[mask], expected)
        softmax = [gives for config in stack_configs(model.config) for gives in gives_weights(config)]
        assert bool(flash.calls) == (any(softmax) or case.sibling == SEQ2SEQ)
        check_calls(flash)
        flash.calls.clear()


def check_calls(flash: FlashStandIn) -> None:
    for call in flash.calls:
        module = call["module"]
        cross = isinstance(module, CrossAttention)
        assert isinstance(module, SoftmaxAttention)
        assert module.is_causal == (module.config.is_causal_stack and not cross)
        scale = module.config.attention_scale
        size = sum(module.sizes) if isinstance(module, LatentAttention) else module.head_dim
        assert call["scaling"] == (size**-0.5 if scale is None else scale)
        sliding = not cross and module.config.layer_types[module.layer_idx] == "sliding_attention"
        assert (call["window"] is not None) == sliding
        assert call["dropout"] == 0.0
        assert call["mask"] is None or call["mask"].ndim == 2


@pytest.mark.parametrize("case", [case for case in WITHOUT_BIAS if bidirectional_window(case)], ids=str)
@torch.no_grad()
def test_flash_attention_of_a_bidirectional_window_gives_what_sdpa_gives(case: Case, flash: FlashStandIn):
    """HF's masks reach `sliding_window` to each side, its flash call one less: the model has to make up for it."""
    model = case.build()
    inputs = padded_inputs(case.sibling)
    mask = output_mask(case.sibling, inputs)
    expected = model(**inputs).logits[mask]
    close(use(model, "flash_attention_2")(**inputs).logits[mask], expected)
    assert flash.calls


@pytest.mark.parametrize("case", cases(ENCODER, DECODER, names=("default", "llama", "all_mixers")), ids=str)
@torch.no_grad()
def test_packed_rows_under_flash_attention_equal_separate_documents(case: Case, flash: FlashStandIn):
    if case.name == "all_mixers" and case.sibling == ENCODER:
        case = case_of(ENCODER, "linear_full")  # without the bidirectional window
    model = use(case.build(), "flash_attention_2")
    rows = documents()
    ids = torch.cat(rows)[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    separate = torch.cat([model(row[None]).logits[0] for row in rows])
    flash.calls.clear()
    close(model(ids, position_ids=positions).logits[0], separate)
    bounds = torch.tensor([0, 9, 15, 18], dtype=torch.int32)
    hints = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 9, "max_length_k": 9}
    close(model(ids, position_ids=positions, **hints).logits[0], separate)
    close(model(ids, **hints).logits[0], separate)
    assert flash.calls


@pytest.mark.parametrize("case", cases(DECODER, names=("default", "llama", "sliding_full", "all_mixers")), ids=str)
def test_generation_under_flash_attention_equals_sdpa(case: Case, flash: FlashStandIn):
    model = case.build()
    inputs = padded_inputs(DECODER, "left")
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**inputs, **settings)
    assert torch.equal(use(model, "flash_attention_2").generate(**inputs, **settings), expected)
    assert len(flash.calls) == 6 * sum(gives_weights(model.config))


@pytest.mark.parametrize("case", cases(SEQ2SEQ, names=("default", "llama")), ids=str)
def test_generation_of_an_encoder_decoder_under_flash_attention_equals_sdpa(case: Case, flash: FlashStandIn):
    model = case.build()
    inputs = {name: padded_inputs(ENCODER, "left")[name] for name in ("input_ids", "attention_mask")}
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**inputs, **settings)
    assert torch.equal(use(model, "flash_attention_2").generate(**inputs, **settings), expected)
    assert flash.calls


@pytest.mark.parametrize("case", cases(DECODER, names=("llama", "sliding_full")), ids=str)
def test_continuous_batching_under_flash_attention_equals_generate(case: Case, flash: FlashStandIn):
    """There the rows of a batch come packed, with a paged cache and without a mask."""
    model = case.build()
    texts = [document.tolist() for document in documents((9, 5, 2), seed=3)]
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = [model.generate(torch.tensor([text]), **settings)[0, len(text) :].tolist() for text in texts]
    outputs = use(model, "flash_attention_2").generate_batch(
        inputs=texts,
        generation_config=GenerationConfig(**settings, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(page_size=16, num_blocks=16, max_batch_tokens=32),
        warmup=False,
    )
    assert [output.error for output in outputs.values()] == [None] * 3
    assert [output.generated_tokens for output in outputs.values()] == expected
    assert flash.calls


def test_attention_dropout_reaches_the_kernel_in_training_only(flash: FlashStandIn):
    for sibling in SIBLINGS:
        model = use(case_of(sibling, "dropouts").build(), "flash_attention_2")
        model.train()(**padded_inputs(sibling))
        assert {call["dropout"] for call in flash.calls} == {0.1}
        flash.calls.clear()
        model.eval()(**padded_inputs(sibling))
        assert {call["dropout"] for call in flash.calls} == {0.0}
        flash.calls.clear()


@pytest.mark.parametrize("case", WITH_BIAS, ids=str)
def test_flash_attention_with_a_position_bias_is_refused_by_name(case: Case, tmp_path):
    pattern = (
        r"(position_type='(relative|alibi)' adds a bias|mixer_types=\[.* add to the attention scores).*"
        r" flash attention cannot: use attn_implementation='sdpa'"
    )
    with pytest.raises(ValueError, match=pattern):
        case.build(attn_implementation="flash_attention_2")
    model = case.build()
    with pytest.raises(ValueError, match=pattern):
        model.set_attn_implementation("flash_attention_2")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=pattern):
        type(model).from_pretrained(tmp_path, attn_implementation="flash_attention_2")


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
def test_what_takes_no_single_scores_is_refused_with_global_tokens(implementation: str):
    model = case_of(ENCODER).build(mixer_types=["softmax", "longformer"])
    with pytest.raises(ValueError, match=r"'longformer'\] need a mask of single scores, which (flash|flex) attention"):
        model.set_attn_implementation(implementation)


@pytest.mark.parametrize("sibling", SIBLINGS)
def test_flash_attention_without_its_package_is_refused_by_name(sibling: str):
    with pytest.raises(ImportError, match=r"FlashAttention2 .* doesn't seem to be installed"):
        case_of(sibling).build(attn_implementation="flash_attention_2")


def test_an_unknown_implementation_is_refused_by_name():
    with pytest.raises(ValueError, match='`attn_implementation="flash_intention"` is not supported'):
        case_of(ENCODER).build(attn_implementation="flash_intention")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "compiled"), [(case_of(SEQ2SEQ, "llama"), False), (case_of(DECODER, "sliding_relative"), True)], ids=str
)
@torch.no_grad()
def test_flex_attention_forward_equals_sdpa(case: Case, compiled: bool, monkeypatch: pytest.MonkeyPatch):
    """Forward, without gradient, is the only pass that it has on a CPU.

    Hugging Face compiles it on first use, which takes half a minute for each set of masks: one of them stands for all.
    """
    if not compiled:
        monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda _: flex_attention)
    inputs = padded_inputs(case.sibling)
    mask = output_mask(case.sibling, inputs)
    expected = case.build()(**inputs).logits[mask]
    model = case.build(attn_implementation="flex_attention")
    torch.testing.assert_close(model(**inputs).logits[mask], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", cases(names=("default", "llama", "all_mixers", "sliding_relative")), ids=str)
@torch.no_grad()
def test_an_implementation_of_ones_own_is_called_with_its_own_masks(case: Case):
    """Without a mask function of its own name an implementation would get no mask, and padding would leak."""
    calls = []

    def own(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any) -> Any:
        calls.append(None if mask is None else mask.dtype)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

    AttentionInterface.register("own", own)
    AttentionMaskInterface.register("own", sdpa_mask)
    inputs = padded_inputs(case.sibling, "left")
    mask = output_mask(case.sibling, inputs)
    caching: list[dict[str, Any]] = [{}] if case.sibling == ENCODER else [{"use_cache": False}, {"use_cache": True}]
    try:
        for kwargs in caching:
            expected = case.build()(**inputs, **kwargs).logits[mask]
            close(case.build(attn_implementation="own")(**inputs, **kwargs).logits[mask], expected)
    finally:
        del AttentionInterface._global_mapping["own"], AttentionMaskInterface._global_mapping["own"]
    assert calls


@pytest.mark.parametrize("case", cases(names=("default", "padding_kept")), ids=str)
@torch.no_grad()
def test_padding_is_refused_for_an_attention_without_a_mask_function(case: Case):
    """Hugging Face would hand it no mask at all."""
    AttentionInterface.register("maskless", ALL_ATTENTION_FUNCTIONS["sdpa"])
    try:
        model = case.build(attn_implementation="maskless")
        kwargs = {} if case.sibling == ENCODER else {"use_cache": True}
        with pytest.raises(ValueError, match=r"'maskless' has no mask function.*AttentionMaskInterface.register"):
            model(**padded_inputs(case.sibling), **kwargs)
    finally:
        del AttentionInterface._global_mapping["maskless"]


@pytest.mark.parametrize("case", cases(names=("default", "all_mixers")), ids=str)
@torch.no_grad()
def test_the_implementation_can_be_changed_and_only_eager_gives_weights(case: Case):
    model = case.build("base", attn_implementation="sdpa")
    inputs = padded_inputs(case.sibling)
    field = "decoder_attentions" if case.sibling == SEQ2SEQ else "attentions"
    assert not getattr(model(**inputs, output_attentions=True), field)
    model.set_attn_implementation("eager")
    assert {config._attn_implementation for config in stack_configs(model.config)} == {"eager"}
    assert len(getattr(model(**inputs, output_attentions=True), field)) > 0


def test_attentions_asked_for_in_the_configuration_need_eager():
    for sibling in (ENCODER, DECODER):
        config = case_of(sibling).config(attn_implementation="sdpa")
        with pytest.raises(ValueError, match=r"`output_attentions` .* set to sdpa.* set it to 'eager'"):
            config.output_attentions = True


@torch.no_grad()
def test_attentions_can_be_asked_for_in_the_configuration():
    for case in cases(ENCODER, DECODER, names=("default",)):
        model = case.build("base", attn_implementation="eager")
        expected = model(**padded_inputs(case.sibling), output_attentions=True).attentions
        model.config.output_attentions = True
        actual = model(**padded_inputs(case.sibling)).attentions
        assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


EXPERTS = ("mixtral", "shared_experts", "linear_to_sliding")


@pytest.mark.parametrize("case", cases(names=EXPERTS), ids=str)
def test_implementations_of_experts_agree_forward_and_backward(case: Case):
    inputs = padded_inputs(case.sibling)
    mask = output_mask(case.sibling, inputs)
    outputs, grads = [], []
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        model = case.build(experts_implementation=implementation)
        logits = model(**inputs).logits[mask]
        logits.square().sum().backward()
        outputs.append(logits.detach())
        grads.append({name: x.grad for name, x in model.named_parameters() if "experts" in name or "router" in name})
    for logits, gradients in zip(outputs[1:], grads[1:], strict=True):
        close(logits, outputs[0])
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, grads[0][name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("case", cases(names=EXPERTS), ids=str)
def test_setting_the_implementation_of_experts_changes_the_kernel(case: Case, monkeypatch):
    """Hugging Face's heuristic looks for experts in the model's own file only, where a silent no-op would follow."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    calls = []
    original = ALL_EXPERTS_FUNCTIONS["batched_mm"]
    monkeypatch.setitem(
        ALL_EXPERTS_FUNCTIONS._global_mapping,
        "batched_mm",
        lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs))[1],
    )
    model = case.build()
    with torch.no_grad():
        model(**padded_inputs(case.sibling))
        assert not calls
        model.set_experts_implementation("batched_mm")
        model(**padded_inputs(case.sibling))
    assert calls


@pytest.mark.parametrize("case", cases(names=("odd_experts_linear",)), ids=str)
def test_experts_of_a_size_that_the_grouped_kernel_cannot_take_fall_back_or_are_refused_by_name(case: Case):
    assert {config._experts_implementation for config in stack_configs(case.build().config)} == {"eager"}
    with pytest.raises(ValueError, match=r"multiples of 8.*'eager' or 'batched_mm'"):
        case.build(experts_implementation="grouped_mm")
    close(
        case.build(experts_implementation="batched_mm")(**padded_inputs(case.sibling)).logits,
        case.build()(**padded_inputs(case.sibling)).logits,
    )


@pytest.mark.parametrize("sibling", SIBLINGS)
def test_a_dense_model_of_odd_sizes_is_not_bothered_by_experts(sibling: str):
    model = case_of(sibling).build(hidden_size=20, intermediate_size=15)
    assert model(**padded_inputs(sibling)).logits.isfinite().all()
