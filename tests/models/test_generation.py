"""Generation through Hugging Face's `generate`: every way of decoding gives what decoding without a cache gives."""

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
import transformers
from combinations import (
    DECODER,
    LINEAR,
    SEQ2SEQ,
    SLIDING,
    Case,
    case_of,
    cases,
    documents,
    keeps_tokens,
    pad,
    spread,
    stack_configs,
)
from greedy import NEW, generate, prompts
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

decoder_case = pytest.mark.parametrize("case", cases(DECODER), ids=str)
seq2seq_case = pytest.mark.parametrize("case", cases(SEQ2SEQ), ids=str)
generating_case = pytest.mark.parametrize("case", cases(DECODER, SEQ2SEQ), ids=str)
softmax_decoder_case = pytest.mark.parametrize(
    "case", [case for case in cases(DECODER) if all(keeps_tokens(case.config()))], ids=str
)


@torch.no_grad()
def check_greedy(model: Any, inputs: dict[str, torch.Tensor], outputs: Any) -> None:
    """Each new token is the likeliest one after a run of the whole text before it, without any cache."""
    texts, start = outputs.sequences, outputs.sequences.shape[1] - len(outputs.logits)
    if model.config.is_encoder_decoder:
        logits = model(**inputs, decoder_input_ids=texts[:, :-1], use_cache=False).logits
    else:
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        mask = torch.nn.functional.pad(mask, (0, texts.shape[1] - 1 - mask.shape[1]), value=1)
        logits = model(texts[:, :-1], attention_mask=mask, use_cache=False).logits
    logits = logits[:, start - 1 :]
    torch.testing.assert_close(torch.stack(outputs.logits, 1), logits, rtol=1e-4, atol=1e-4)
    logits[..., model.config.eos_token_id] = -torch.inf
    assert torch.equal(texts[:, start:], logits.argmax(-1))


@pytest.fixture
def no_warnings(caplog):
    """Fails a test in which Python or transformers warns."""
    transformers.utils.logging.enable_propagation()
    caplog.set_level(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    transformers.utils.logging.disable_propagation()
    assert not caplog.records


@generating_case
def test_greedy_generation_equals_decoding_without_a_cache_and_warns_of_nothing(case: Case, no_warnings):
    model = case.build()
    inputs = prompts((6, 4))
    outputs = generate(model, inputs, output_logits=True, return_dict_in_generate=True)
    assert len(outputs.logits) == NEW
    check_greedy(model, inputs, outputs)


@generating_case
def test_dynamic_static_and_no_cache_give_the_same_scores(case: Case):
    model = case.build()
    inputs = prompts((6, 4))
    implementations = [{}, {"cache_implementation": "static"}]
    if case.sibling == SEQ2SEQ and not all(keeps_tokens(model.config.decoder)):
        del implementations[1]  # the next test
    expected = generate(model, inputs, use_cache=False, output_logits=True, return_dict_in_generate=True)
    assert expected.cache is None
    for kwargs in implementations:
        outputs = generate(model, inputs, output_logits=True, return_dict_in_generate=True, **kwargs)
        assert outputs.cache is not None
        assert torch.equal(outputs.sequences, expected.sequences)
        torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "case", [case for case in cases(SEQ2SEQ) if not all(keeps_tokens(case.config().decoder))], ids=str
)
def test_static_caches_of_an_encoder_decoder_with_states_give_the_same(case: Case):
    model = case.build()
    inputs = prompts((6, 4))
    expected = generate(model, inputs, use_cache=False)
    assert torch.equal(generate(model, inputs, cache_implementation="static"), expected)


@generating_case
def test_a_padded_prompt_is_continued_as_if_it_were_alone(case: Case):
    model = case.build()
    together = generate(model, prompts((7, 3)))
    for row, document in enumerate(documents((7, 3), seed=3)):
        alone = generate(model, {"input_ids": document[None]})
        assert torch.equal(together[row, -NEW:], alone[0, -NEW:])


@generating_case
def test_beam_search_with_a_cache_equals_beam_search_without(case: Case):
    model = case.build()
    inputs = prompts((6, 3))
    kwargs = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True, "return_dict_in_generate": True}
    with_cache = generate(model, inputs, **kwargs)
    without = generate(model, inputs, use_cache=False, **kwargs)
    assert with_cache.sequences.shape[0] == 4
    assert torch.equal(with_cache.sequences, without.sequences)
    torch.testing.assert_close(with_cache.sequences_scores, without.sequences_scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", cases(DECODER, SEQ2SEQ, names=("untied", "all_mixers", "llama")), ids=str)
@torch.no_grad()
def test_as_many_beams_as_tokens_find_the_likeliest_pair(case: Case):
    """With a beam for each token of the vocabulary, beam search over two tokens is exhaustive."""
    model = case.build()
    inputs = prompts((6,))
    vocabulary = torch.arange(model.config.vocab_size)
    if case.sibling == SEQ2SEQ:
        start = torch.zeros(1, 1, dtype=torch.long)
        first = model(**inputs, decoder_input_ids=start).logits[0, -1].log_softmax(-1)
        texts = torch.stack([torch.zeros_like(vocabulary), vocabulary], 1)
        repeated = {name: x.expand(len(vocabulary), -1) for name, x in inputs.items()}
        second = model(**repeated, decoder_input_ids=texts).logits[:, -1].log_softmax(-1)
    else:
        first = model(**inputs).logits[0, -1].log_softmax(-1)
        texts = torch.cat([inputs["input_ids"].expand(len(vocabulary), -1), vocabulary[:, None]], 1)
        second = model(texts).logits[:, -1].log_softmax(-1)
    end = model.config.eos_token_id
    pairs = (first[:, None] + second).index_fill(0, torch.tensor(end), -torch.inf)
    pairs[:, end] = -torch.inf
    best, place = pairs.flatten().max(0)
    outputs = generate(
        model, inputs, num_beams=len(vocabulary), max_new_tokens=2, min_new_tokens=2, length_penalty=0.0,
        output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    torch.testing.assert_close(outputs.sequences_scores[0], best, rtol=1e-4, atol=1e-4)
    assert outputs.sequences[0, -2:].tolist() == [int(place) // len(vocabulary), int(place) % len(vocabulary)]


@pytest.mark.parametrize("case", cases(DECODER, SEQ2SEQ, names=("default", "all_mixers", "mixtral")), ids=str)
def test_sampling_is_seeded_and_returns_several_texts(case: Case):
    model = case.build()

    def sample(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return generate(model, prompts(), do_sample=True, num_return_sequences=3, temperature=2.0)

    first = sample(1)
    assert first.shape[0] == 6
    assert torch.equal(first, sample(1))
    assert not torch.equal(first, sample(2))
    assert len(first[:3].unique(dim=0)) > 1


@pytest.mark.parametrize("case", cases(DECODER, names=("default", "llama", "all_mixers")), ids=str)
def test_sampling_follows_the_models_probabilities(case: Case):
    model = case.build()
    ids = documents((5,), seed=3)[0][None]
    with torch.no_grad():
        logits = model(ids).logits[0, -1] * 4
    samples = model.generate(
        ids, max_new_tokens=1, do_sample=True, temperature=0.25, top_k=0, num_return_sequences=2000
    )[:, -1]
    frequencies = torch.bincount(samples, minlength=len(logits)) / 2000
    assert (frequencies - logits.softmax(-1)).abs().max() < 0.06


@generating_case
def test_generation_from_embeddings_equals_generation_from_their_ids(case: Case):
    model = case.build()
    inputs = prompts((6, 4))
    expected = generate(model, inputs)
    embedded = dict(inputs)
    embedded["inputs_embeds"] = model.get_input_embeddings()(embedded.pop("input_ids")).detach()
    outputs = generate(model, embedded)
    assert torch.equal(outputs[:, -NEW:], expected[:, -NEW:])


@decoder_case
def test_a_returned_cache_is_continued(case: Case):
    model = case.build()
    ids = prompts()["input_ids"]
    expected = generate(model, {"input_ids": ids}, max_new_tokens=NEW)
    first = generate(model, {"input_ids": ids}, max_new_tokens=4, min_new_tokens=4, return_dict_in_generate=True)
    text = {"input_ids": first.sequences}
    if not any(keeps_tokens(model.config)):  # its states have no length: only the new tokens are given
        text = {"input_ids": first.sequences[:, -1:], "attention_mask": torch.ones_like(first.sequences)}
    outputs = generate(model, text, cache=first.cache, max_new_tokens=4, min_new_tokens=4)
    assert torch.equal(outputs[:, -4:], expected[:, -4:])


@decoder_case
@torch.no_grad()
def test_text_in_pieces_with_a_cache_equals_the_whole(case: Case):
    """Pieces of several tokens, left padding in the first, a window that is shorter than a piece."""
    model = case.build()
    ids, mask = pad(documents((12, 8), seed=4), "left")
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    cache, pieces = None, []
    for start, end in ((0, 5), (5, 6), (6, 10), (10, 12)):
        outputs = model(ids[:, start:end], attention_mask=mask[:, :end], cache=cache, use_cache=True)
        cache = outputs.cache
        pieces.append(outputs.logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(pieces, 1)[real], whole[real], rtol=1e-4, atol=2e-5)


@decoder_case
@torch.no_grad()
def test_text_in_pieces_without_a_mask_equals_the_whole_or_asks_for_positions(case: Case):
    model = case.build()
    (ids,) = documents((10,), seed=4)
    whole = model(ids[None], use_cache=False).logits
    cache = model(ids[None, :6], use_cache=True).cache
    needs_positions = not any(keeps_tokens(model.config)) and model.config.position_type == "rotary"
    if needs_positions:
        with pytest.raises(ValueError, match="do not know how many tokens they have seen: pass position_ids, or"):
            model(ids[None, 6:], cache=cache)
    positions = {"position_ids": torch.arange(6, 10)[None]} if needs_positions else {}
    logits = model(ids[None, 6:], cache=cache, **positions).logits
    torch.testing.assert_close(logits, whole[:, 6:], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("case", cases(DECODER, names=("default", "mixtral", "linear")), ids=str)
@torch.no_grad()
def test_logits_to_keep_as_number_and_as_indices(case: Case):
    model = case.build()
    ids = prompts()["input_ids"]
    logits = model(ids).logits
    places = torch.tensor([0, 4])
    for keep, expected in ((1, logits[:, -1:]), (3, logits[:, -3:]), (places, logits[:, places])):
        # A product of fewer rows may round otherwise.
        torch.testing.assert_close(model(ids, logits_to_keep=keep).logits, expected, rtol=1e-5, atol=1e-5)
    assert model(ids, logits_to_keep=0).logits.shape[1] == 6


def test_generation_scores_only_the_last_position_of_the_prompt(monkeypatch):
    model = case_of(DECODER).build()
    lengths = []
    model.lm_head.register_forward_hook(lambda module, args, output: lengths.append(output.shape[1]))
    generate(model, prompts())
    assert set(lengths) == {1}


@softmax_decoder_case
def test_prompt_lookup_and_assisted_decoding_equal_greedy_decoding(case: Case):
    model = case.build()
    ids = documents((4,), seed=3)[0].repeat(3)[None]
    expected = generate(model, {"input_ids": ids}, max_new_tokens=12, min_new_tokens=0, eos_token_id=None)
    kwargs = {"max_new_tokens": 12, "min_new_tokens": 0, "eos_token_id": None}
    assert torch.equal(generate(model, {"input_ids": ids}, prompt_lookup_num_tokens=3, **kwargs), expected)
    good, poor = copy.deepcopy(model), case_of(DECODER).build()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in good.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    for assistant in (good, poor):
        assert torch.equal(generate(model, {"input_ids": ids}, assistant_model=assistant, **kwargs), expected)


@pytest.mark.parametrize("case", [case for case in cases(DECODER) if not all(keeps_tokens(case.config()))], ids=str)
def test_assisted_decoding_from_states_is_refused_by_name(case: Case):
    """A recurrent state cannot forget the candidates that were refused."""
    ids = documents((4,), seed=3)[0].repeat(3)[None]
    with pytest.raises(ValueError, match=r"^Assisted decoding requires a cache that can be cropped"):
        generate(case.build(), {"input_ids": ids}, prompt_lookup_num_tokens=3)


def elements(cache: DynamicCache) -> list[int]:
    """Number of stored elements a layer."""
    counts = []
    for layer in cache.layers:
        tensors = [layer.keys, layer.values] if hasattr(layer, "keys") else [layer.recurrent_states[0]]
        counts.append(sum(x.numel() for x in tensors if x is not None))
    return counts


@torch.no_grad()
def test_the_state_of_linear_attention_does_not_grow():
    model = case_of(DECODER, "linear").build()
    sizes = []
    for length in (1, 3, 20, 40):
        sizes.append(elements(model(documents((length,))[0][None], use_cache=True).cache))
    heads, head_dim = model.config.num_attention_heads, model.config.head_dim
    assert sizes == [[heads * head_dim * (head_dim + 1)] * 2] * 4
    short = generate(model, prompts(), return_dict_in_generate=True).cache
    long = generate(model, prompts(), max_new_tokens=30, min_new_tokens=30, return_dict_in_generate=True).cache
    assert elements(short) == elements(long)


@torch.no_grad()
def test_a_sliding_window_cache_does_not_grow_beyond_the_window():
    model = case_of(DECODER, "sliding_full").build()
    key_values = 2 * model.config.num_key_value_heads * model.config.head_dim
    for length in (2, 10, 30):
        sliding, full = elements(model(documents((length,))[0][None], use_cache=True).cache)
        assert sliding == key_values * min(length, model.config.sliding_window - 1)
        assert full == key_values * length
    cache = generate(model, {"input_ids": documents((6,))[0][None]}, return_dict_in_generate=True).cache
    assert elements(cache)[0] == key_values * (model.config.sliding_window - 1)


def test_each_step_of_generation_runs_one_token():
    for case in cases(DECODER, SEQ2SEQ, names=("default", "linear", "sliding")):
        model = case.build()
        lengths: list[int] = []
        model.get_decoder().layers[0].register_forward_pre_hook(
            lambda module, args, kwargs=None, lengths=lengths: lengths.append(args[0].shape[1])
        )
        generate(model, prompts())
        first = 1 if case.sibling == SEQ2SEQ else 6
        assert lengths == [first] + [1] * (NEW - 1), case


@seq2seq_case
def test_the_encoder_runs_once_and_its_keys_are_projected_once(case: Case):
    model = case.build()
    calls = {"encoder": 0, "keys": 0}

    def count(name: str) -> Any:
        def hook(*_: Any) -> None:
            calls[name] += 1

        return hook

    model.get_encoder().layers[0].register_forward_hook(count("encoder"))
    model.get_decoder().layers[-1].cross_attention.k_proj.register_forward_hook(count("keys"))
    outputs = generate(model, prompts((9, 5)), return_dict_in_generate=True)
    assert calls == {"encoder": 1, "keys": 1}
    assert isinstance(outputs.cache, EncoderDecoderCache)
    for layer in outputs.cache.cross_attention_cache.layers:
        assert layer.keys.shape[2] == layer.values.shape[2] == 9


@seq2seq_case
@torch.no_grad()
def test_an_encoder_decoder_in_pieces_with_a_cache_equals_the_whole(case: Case):
    model = case.build()
    inputs = prompts((9, 5))
    ids = torch.stack(documents((10, 10), seed=5))
    whole = model(**inputs, decoder_input_ids=ids, use_cache=False).logits
    cache, pieces = None, []
    for start, end in ((0, 4), (4, 5), (5, 10)):
        outputs = model(
            **inputs,
            decoder_input_ids=ids[:, start:end],
            decoder_attention_mask=torch.ones(2, end, dtype=torch.long),
            cache=cache,
            use_cache=True,
        )
        cache = outputs.cache
        pieces.append(outputs.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=2e-5)


def test_an_encoder_decoder_continues_a_given_start():
    model = case_of(SEQ2SEQ, "sliding").build()
    inputs = prompts((9, 5))
    expected = generate(model, inputs)
    outputs = generate(
        model, inputs, decoder_input_ids=expected[:, :5], max_new_tokens=NEW - 4, min_new_tokens=NEW - 4
    )
    assert torch.equal(outputs, expected)


@pytest.mark.parametrize("case", cases(SEQ2SEQ, names=("default", "pre_norm", "linear", "sliding_alibi")), ids=str)
def test_padded_starts_of_the_output_are_continued_as_if_they_were_alone(case: Case):
    model = case.build(decoder_start_token_id=4)
    inputs = prompts((9, 9))
    starts = [torch.cat([torch.tensor([4]), row]) for row in documents((5, 2), seed=6)]
    ids, mask = pad(starts, "left")
    scores = {"output_logits": True, "return_dict_in_generate": True}
    together = generate(model, inputs, decoder_input_ids=ids, decoder_attention_mask=mask, **scores)
    for row, start in enumerate(starts):
        source = {name: x[row : row + 1] for name, x in inputs.items()}
        alone = generate(model, source, decoder_input_ids=start[None], **scores)
        assert torch.equal(together.sequences[row, -NEW:], alone.sequences[0, -NEW:])
        for one, other in zip(together.logits, alone.logits, strict=True):
            torch.testing.assert_close(one[row], other[0], rtol=1e-4, atol=1e-4)


def served(config: Any) -> bool:
    """Whether paged caches can hold what a decoder remembers."""
    return config.position_type not in ("relative", "alibi") and all(mixer.fits_paged_cache for mixer in config.mixers)


def generate_batch(model: Any, texts: list[list[int]]) -> list[Any]:
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    room = ContinuousBatchingConfig(page_size=16, num_blocks=16, max_batch_tokens=32)
    outputs = model.generate_batch(
        inputs=texts, generation_config=settings, continuous_batching_config=room, warmup=False
    )
    return list(outputs.values())


SERVED = spread([case for case in cases(DECODER) if served(case.config())])


@pytest.mark.parametrize(
    ("case", "implementation"),
    [
        *((case, "sdpa") for case in SERVED),
        # What a configuration adds is the same to both, so few are enough of the second.
        *((case, "eager") for case in cases(DECODER, names=("llama", "sliding_full", "mixtral"))),
    ],
    ids=str,
)
def test_continuous_batching_equals_generate(case: Case, implementation: str):
    model = case.build(attn_implementation=implementation)
    texts = [document.tolist() for document in documents((9, 5, 2), seed=3)]
    for text, output in zip(texts, generate_batch(model, texts), strict=True):
        assert output.error is None
        expected = generate(model, {"input_ids": torch.tensor([text])}, eos_token_id=None, min_new_tokens=0)
        assert output.prompt_ids == text
        assert output.generated_tokens == expected[0, len(text) :].tolist()


@pytest.mark.parametrize("case", [case for case in cases(DECODER) if not served(case.config())], ids=str)
def test_continuous_batching_refuses_what_it_cannot_serve(case: Case):
    model = case.build()
    texts = [document.tolist() for document in documents((4, 3))]
    with pytest.raises(ValueError, match=r"Continuous batching serves .* use generate"):
        generate_batch(model, texts)


def test_a_text_beyond_the_learned_positions_is_refused_with_the_way_out():
    model = case_of(DECODER).build()
    with pytest.raises(ValueError, match=r"43 tokens is longer than .*max_position_embeddings=40"):
        model(documents((43,))[0][None])
    with pytest.raises(ValueError, match="max_position_embeddings=40"):
        generate(model, {"input_ids": documents((38,))[0][None]})


@pytest.mark.parametrize("case", cases(DECODER, names=("t5", "alibi", "no_positions", "linear", "sliding")), ids=str)
def test_texts_beyond_the_trained_length_go_on_where_positions_allow(case: Case):
    model = case.build()
    inputs = {"input_ids": documents((45,))[0][None]}
    check_greedy(model, inputs, generate(model, inputs, output_logits=True, return_dict_in_generate=True))


def test_generation_stops_at_the_end_token_and_pads_the_rest():
    model = case_of(DECODER, "untied").build()
    ids = prompts()["input_ids"]
    free = generate(model, {"input_ids": ids}).tolist()
    place = next(n for n in range(7, 6 + NEW) if free[0][n] not in free[0][6:n] + free[1][6:])
    end = free[0][place]
    outputs = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=end, suppress_tokens=[2])
    assert outputs.tolist() == [free[0][: place + 1] + [0] * (5 + NEW - place), free[1]]


@pytest.mark.parametrize("case", cases(DECODER, names=("default", "all_mixers", "sliding_alibi")), ids=str)
def test_a_static_cache_of_the_callers_is_filled(case: Case):
    model = case.build()
    inputs = prompts((6, 4))
    cache = StaticCache(config=model.config, max_cache_len=20)
    assert torch.equal(generate(model, inputs, cache=cache), generate(model, inputs))


@pytest.mark.parametrize("case", cases(DECODER, names=("default", "linear", "mixtral")), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_generates_with_a_cache_of_its_own_dtype(case: Case, dtype: torch.dtype):
    model = case.build().to(dtype)
    outputs = generate(model, prompts((6, 4)), return_dict_in_generate=True, output_logits=True)
    assert outputs.sequences.shape == (2, 6 + NEW)
    assert all(logits.isfinite().all() for logits in outputs.logits)
    for layer, kind in zip(outputs.cache.layers, model.config.layer_types, strict=True):
        if kind == LINEAR:
            assert layer.recurrent_states[0].dtype == torch.float32  # sums over a text need the room
        else:
            assert layer.keys.dtype == dtype


def test_sliding_layers_of_both_caches_belong_to_the_decoders_own_attention():
    model = case_of(SEQ2SEQ, "sliding").build()
    cache = generate(model, prompts((9, 5)), return_dict_in_generate=True).cache
    decoder = stack_configs(model.config)[1]
    assert decoder.layer_types == [SLIDING, SLIDING]
    assert all(layer.keys.shape[2] == decoder.sliding_window - 1 for layer in cache.self_attention_cache.layers)
    assert all(layer.keys.shape[2] == 9 for layer in cache.cross_attention_cache.layers)


@pytest.mark.parametrize("sibling", [DECODER, SEQ2SEQ])
@pytest.mark.parametrize("name", ["default", "linear", "all_mixers"])
@torch.no_grad()
def test_a_prompt_read_in_chunks_gives_the_same_text(sibling, name):
    model, ids = case_of(sibling, name).build(), torch.randint(3, 71, (2, 7))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    if sibling == SEQ2SEQ:
        options["decoder_input_ids"] = ids[:, :5]
    chunked = model.generate(ids, prefill_chunk_size=2, **options)
    assert torch.equal(chunked, model.generate(ids, use_cache=False, **options))


@pytest.mark.slow
@torch.no_grad()
def test_linear_layers_of_an_encoder_decoder_generate_compiled():
    model = case_of(SEQ2SEQ, "linear").build(num_hidden_layers=1, layer_types=["linear_attention"])
    ids = torch.randint(3, 71, (2, 6))
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, use_cache=False, **options)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    assert torch.equal(model.generate(ids, **options, cache_implementation="static"), expected)


def test_the_encoder_of_another_modality_is_the_model_itself():
    model = case_of(SEQ2SEQ).build()
    assert model.get_encoder() is model.model.encoder and model.get_decoder() is model.model.decoder
    assert model.get_encoder(modality="image") is model and model.model.get_encoder(modality="audio") is model.model
