"""What Hugging Face asks of `generate` beyond greedy decoding: outputs, drafts, caches, compiled steps, exports.

Where its own Llama or T5 cannot, ours fail in the same way; the tests compare the two.
"""

import importlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from combinations import (
    DECODER,
    SEQ2SEQ,
    SIZES,
    SLIDING,
    Case,
    case_of,
    cases,
    documents,
    gives_weights,
    keeps_tokens,
    stack_configs,
)
from greedy import NEW, generate, prompts
from torch._dynamo.utils import counters
from transformers import CompileConfig
from transformers.cache_utils import StaticCache
from transformers.integrations.executorch import Seq2SeqLMExportableModule, TorchExportableModuleWithStaticCache

from fratrie.conversion import from_hf

PROMPT = 6
EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
}
MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "sampled_beams": {"do_sample": True, "num_beams": 3, "num_return_sequences": 2},
}


def llama(**fields: Any) -> Any:
    """Hugging Face's Llama of our tests' sizes."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **fields)).eval()


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 71, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    ).eval()


def failure(call: Any) -> tuple[type, str]:
    """The kind of error of a call, and what it says without the names of classes."""
    with pytest.raises(Exception) as error:
        call()
    return error.type, re.sub(r"\w+For\w+", "", str(error.value))


def width(layer_type: str, tokens: int, new: int, window: int | None) -> int:
    """Keys that a layer's attention sees when `new` of `tokens` are new."""
    return min(tokens, (window or 0) + new - 1) if layer_type == SLIDING else tokens


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", cases(DECODER, SEQ2SEQ, names=("llama", "sliding_full", "all_mixers")), ids=str)
def test_all_outputs_have_their_counts_and_shapes(case: Case, mode: str):
    model = case.build(attn_implementation="eager")
    inputs, settings = prompts((PROMPT, PROMPT - 2)), MODES[mode]
    outputs = generate(model, inputs, **EVERYTHING, **settings)
    decoder = stack_configs(model.config)[-1]
    rows = 2 * max(settings.get("num_beams", 1), settings.get("num_return_sequences", 1))
    start = 1 if case.sibling == SEQ2SEQ else PROMPT
    returned = 2 * settings.get("num_return_sequences", 1)
    assert outputs.sequences.shape == (returned, start + NEW)
    assert ("Beam" in type(outputs).__name__) == ("num_beams" in settings)
    if "num_beams" in settings:
        assert outputs.sequences_scores.shape == (returned,)
        assert outputs.beam_indices.shape == (returned, NEW)
    for scores in (outputs.scores, outputs.logits):
        assert [x.shape for x in scores] == [(rows, decoder.vocab_size)] * NEW
    own = case.sibling == SEQ2SEQ
    states = outputs.decoder_hidden_states if own else outputs.hidden_states
    attentions = outputs.decoder_attentions if own else outputs.attentions
    softmax = [kind for kind, gives in zip(decoder.layer_types, gives_weights(decoder), strict=True) if gives]
    heads = decoder.num_attention_heads
    for step in range(NEW):
        new, tokens = (start if step == 0 else 1), start + step
        assert [x.shape for x in states[step]] == [(rows, new, decoder.hidden_size)] * (decoder.num_hidden_layers + 1)
        widths = [width(kind, tokens, new, decoder.sliding_window) for kind in softmax]
        assert [x.shape for x in attentions[step]] == [(rows, heads, new, keys) for keys in widths]
        if own:
            expected = [(rows, heads, 1, PROMPT)] * decoder.num_hidden_layers
            assert [x.shape for x in outputs.cross_attentions[step]] == expected
    if own:
        encoder = stack_configs(model.config)[0]
        assert len(outputs.encoder_hidden_states) == encoder.num_hidden_layers + 1
        assert len(outputs.encoder_attentions) == sum(gives_weights(encoder))


@pytest.mark.parametrize("case", cases(DECODER), ids=str)
def test_a_conversation_goes_on_from_its_cache(case: Case):
    """Two answers and a longer question between them, against all of it read at once."""
    model = case.build()
    first, second = (torch.stack(documents((length, length), seed)) for length, seed in ((6, 3), (5, 7)))
    answer = generate(model, {"input_ids": first}, max_new_tokens=3, min_new_tokens=3, return_dict_in_generate=True)
    text = {"input_ids": torch.cat([answer.sequences, second], 1)}
    settings = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 3, "min_new_tokens": 3}
    expected = generate(model, text, **settings)
    if not any(keeps_tokens(model.config)):
        with pytest.raises(ValueError, match="give the new tokens as input_ids, and the attention_mask of all"):
            generate(model, text, cache=answer.cache, **settings)
        text = {"input_ids": second, "attention_mask": torch.ones_like(text["input_ids"])}
        # The last token of the answer was never read.
        text["input_ids"] = torch.cat([answer.sequences[:, -1:], second], 1)
    goes_on = generate(model, text, cache=answer.cache, **settings)
    assert torch.equal(goes_on.sequences[:, -3:], expected.sequences[:, -3:])
    torch.testing.assert_close(goes_on.logits, expected.logits, rtol=1e-4, atol=1e-4)


SOFTMAX = ("default", "llama", "t5", "sliding_alibi", "mixtral", "latent")


@pytest.mark.parametrize("case", cases(DECODER, names=SOFTMAX), ids=str)
def test_drafts_of_other_models_and_of_ones_own_first_layers_change_nothing(case: Case):
    model, theirs = case.build(), llama()
    inputs = {"input_ids": documents((PROMPT,), seed=3)[0][None]}
    expected = generate(model, inputs)
    assert torch.equal(generate(model, inputs, assistant_model=theirs), expected)
    assert torch.equal(generate(theirs, inputs, assistant_model=model), generate(theirs, inputs))
    passed = []
    model.model.layers[-1].register_forward_hook(lambda *_: passed.append(1))
    assert torch.equal(generate(model, inputs, assistant_early_exit=1), expected)
    assert model.config.num_hidden_layers == len(model.model.layers)
    assert 0 < len(passed) < 2 * NEW, "the last layer rests while the first one drafts"


@torch.no_grad()
def test_an_early_exit_reads_the_states_of_its_layer():
    model = case_of(DECODER, "llama").build()
    ids = prompts()["input_ids"]
    states = model.model(ids, output_hidden_states=True).hidden_states[1]
    model.config.num_hidden_layers = 1
    torch.testing.assert_close(model.model(ids).last_hidden_state, model.model.norm(states))


def test_a_quantised_cache_gives_what_hugging_faces_llama_gives_with_it(monkeypatch):
    # Quanto would compile its kernel, which takes most of a minute; this is what it computes.
    def unpack(packed, bits):
        return torch.cat([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)])

    kernels = importlib.import_module("optimum.quanto.library.extensions.extension").get_extension("quanto_cpp")
    monkeypatch.setattr(kernels, "_lib", SimpleNamespace(unpack=unpack))
    theirs = llama(num_key_value_heads=2)
    model = from_hf(theirs)
    settings = {"cache_implementation": "quantized", "output_logits": True, "return_dict_in_generate": True}
    settings["cache_config"] = {"nbits": 4, "q_group_size": 32, "residual_length": 4}
    one, other = (generate(x, prompts(), **settings) for x in (model.eval(), theirs))
    assert type(one.cache).__name__ == "QuantizedCache"
    assert torch.equal(one.sequences, other.sequences)
    torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=1e-4)
    exact = generate(model, prompts(), output_logits=True, return_dict_in_generate=True)
    assert not torch.equal(torch.stack(exact.logits), torch.stack(one.logits))


@pytest.mark.parametrize("case", cases(DECODER, names=("sliding_full", "linear")), ids=str)
def test_a_quantised_cache_refuses_other_layers_than_full_ones_by_name(case: Case):
    with pytest.raises(ValueError, match=r"only supported for models with only full attention.*(sliding|linear)_att"):
        generate(case.build(), prompts(), cache_implementation="quantized")


def test_an_encoder_decoder_refuses_a_quantised_cache_as_t5_does():
    ours, theirs = (
        failure(lambda model=model: generate(model, prompts(), cache_implementation="quantized"))
        for model in (case_of(SEQ2SEQ).build(), t5())
    )
    assert ours == theirs


@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
def test_an_offloaded_cache_needs_an_accelerator_as_llamas_does(implementation: str):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = [case_of(DECODER, "llama").build().to(device), llama().to(device)]
    inputs = {name: x.to(device) for name, x in prompts().items()}
    if device == "cpu":
        ours, theirs = (
            failure(lambda model=model: generate(model, inputs, cache_implementation=implementation))
            for model in models
        )
        assert ours == theirs
    else:
        outputs = generate(models[0], inputs, cache_implementation=implementation)
        assert torch.equal(outputs, generate(models[0], inputs))


@pytest.mark.parametrize(
    "settings",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
        {"num_beams": 4, "force_words_ids": [[5]]},
    ],
    ids=lambda settings: [*settings][-1],
)
def test_ways_of_decoding_that_left_transformers_are_refused_as_by_llama(settings: dict[str, Any]):
    ours, theirs = (
        failure(lambda model=model: generate(model, prompts(), **settings))
        for model in (case_of(DECODER, "llama").build(), llama())
    )
    assert ours == theirs


@pytest.mark.parametrize(
    "case",
    [
        *cases(DECODER, names=("default", "t5", "linear", "latent")),
        *cases(SEQ2SEQ, names=("default",)),
    ],
    ids=str,
)
def test_a_compiled_step_with_a_static_cache_is_one_graph_for_all_tokens(case: Case):
    torch._dynamo.reset()
    counters.clear()
    model = case.build()
    settings = {"cache_implementation": "static", "output_logits": True, "return_dict_in_generate": True}
    expected = generate(model, prompts((6, 4)), disable_compile=True, **settings)
    compiled = CompileConfig(backend="eager", fullgraph=True, dynamic=False, mode=None)
    compiled._compile_all_devices = True
    for _ in range(2):
        outputs = generate(model, prompts((6, 4)), compile_config=compiled, **settings)
        assert torch.equal(outputs.sequences, expected.sequences)
        torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("case", cases(DECODER, names=("all_mixers",)), ids=str)
def test_a_compiled_forward_with_a_static_cache_makes_a_graph_for_the_prompt_and_one_for_all_tokens(case: Case):
    torch._dynamo.reset()
    counters.clear()
    model = case.build()
    settings = {"cache_implementation": "static", "max_new_tokens": 20, "min_new_tokens": 20}
    expected = generate(model, prompts((PROMPT,)), **settings)
    model.forward = torch.compile(model.forward, backend="eager")
    for _ in range(2):
        assert torch.equal(generate(model, prompts((PROMPT,)), **settings), expected)
        assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.parametrize("case", cases(DECODER, names=("llama", "t5")), ids=str)
@torch.no_grad()
def test_an_exported_step_with_a_static_cache_scores_as_the_model_does(case: Case):
    model = case.build()
    ids = prompts((PROMPT,))["input_ids"]
    expected = model(ids).logits
    model.generation_config.update(cache_implementation="static", use_cache=True)
    module = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=16)
    example = {"input_ids": ids[:, :1], "cache_position": torch.tensor([0])}
    step = torch.export.export(module, (), example, strict=True).module()
    for place in range(PROMPT):
        logits = step(input_ids=ids[:, place : place + 1], cache_position=torch.tensor([place]))
        torch.testing.assert_close(logits, expected[:, place : place + 1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_an_exported_encoder_decoder_generates_as_the_model_does():
    model = case_of(SEQ2SEQ, "t5").build()
    ids = prompts((PROMPT,))["input_ids"]
    module = Seq2SeqLMExportableModule(model, batch_size=1, max_hidden_seq_length=32, max_cache_length=16)
    module.export(encoder_hidden_states=torch.zeros(1, 10, model.config.encoder.hidden_size))
    expected = model.generate(ids, max_new_tokens=NEW, min_new_tokens=0, do_sample=False)[0].tolist()
    assert module.generate(ids, NEW + 1) == expected


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize(
    "case", cases(DECODER, SEQ2SEQ, names=("default", "t5", "sliding_full", "linear_no_positions")), ids=str
)
def test_embeddings_start_a_text_with_beams_ids_and_a_static_cache(case: Case, beams: int):
    model, inputs = case.build(), prompts((6, 6))
    expected = generate(model, inputs, num_beams=beams)
    embedded = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach()}
    embedded["attention_mask"] = inputs["attention_mask"]
    assert torch.equal(generate(model, embedded, num_beams=beams)[:, -NEW:], expected[:, -NEW:])
    if case.sibling == DECODER:
        assert torch.equal(generate(model, inputs | embedded, num_beams=beams), expected)
    else:
        theirs = failure(lambda: generate(t5(), inputs | {"inputs_embeds": torch.zeros(2, 6, 32)}))
        assert failure(lambda: generate(model, inputs | embedded)) == theirs
    outputs = generate(model, embedded, num_beams=beams, cache_implementation="static")
    assert torch.equal(outputs[:, -NEW:], expected[:, -NEW:])


@pytest.mark.parametrize("case", cases(DECODER, names=("default", "llama", "linear")), ids=str)
def test_a_text_without_a_prompt_begins_with_the_bos_token(case: Case):
    model = case.build()
    expected = generate(model, {"input_ids": torch.tensor([[SIZES["bos_token_id"]]])})
    assert torch.equal(generate(model, {}), expected)


@pytest.mark.parametrize("case", cases(SEQ2SEQ, names=("default", "sliding_full", "linear_to_sliding")), ids=str)
def test_a_given_encoding_is_decoded(case: Case):
    model, inputs = case.build(), prompts((6, 4))
    expected = generate(model, inputs)
    encoded = model.get_encoder()(**inputs)
    outputs = generate(model, {"attention_mask": inputs["attention_mask"]}, encoder_outputs=encoded)
    assert torch.equal(outputs, expected)


@pytest.mark.parametrize("case", cases(DECODER, SEQ2SEQ, names=("default", "llama")), ids=str)
def test_settings_come_from_the_call_then_the_model_then_its_folder(case: Case, tmp_path):
    model = case.build()
    start = 1 if case.sibling == SEQ2SEQ else PROMPT
    model.generation_config.update(max_new_tokens=5, min_new_tokens=5, forced_eos_token_id=7, forced_bos_token_id=9)
    model.save_pretrained(tmp_path)
    for one in (model, type(model).from_pretrained(tmp_path).eval()):
        outputs = one.generate(**prompts(), do_sample=False)
        assert outputs.shape == (2, start + 5)
        assert (outputs[:, -1] == 7).all()
        assert (outputs[:, 1] == 9).all() or case.sibling == DECODER  # the second token of an output
        assert one.generate(**prompts(), max_new_tokens=3, min_new_tokens=3).shape == (2, start + 3)


def test_static_caches_are_laid_out_by_the_configuration():
    config = case_of(DECODER, "all_mixers").config()
    names = [type(layer).__name__ for layer in StaticCache(config=config, max_cache_len=8).layers]
    assert names == ["StaticSlidingWindowLayer", "LinearAttentionLayer", "StaticLayer"]
