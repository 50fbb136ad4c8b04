"""Checkpoints: what is saved comes back to the bit, wholly and quietly, in this process and in a fresh one."""

import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from combinations import (
    CASES,
    CONFIGS,
    DECODER,
    ENCODER,
    HEADS,
    IMAGE,
    LINEAR,
    SEQ2SEQ,
    SIBLINGS,
    Case,
    case_of,
    cases,
    first_head,
    layer_types,
    output_mask,
    padded_inputs,
    stack_configs,
)
from processes import run_forked
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_head = pytest.mark.parametrize(
    ("sibling", "head"), [(sibling, head) for sibling in HEADS for head in HEADS[sibling]]
)


def load(auto_or_model, folder, **kwargs) -> torch.nn.Module:
    """Load a model that must find exactly its own weights."""
    model, info = auto_or_model.from_pretrained(folder, output_loading_info=True, **kwargs)
    assert not any(info.values()), info
    return model.eval()


def assert_same_output(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for rounding: a file puts weights at other addresses, at which kernels may take another path."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def saved_keys(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.fixture
def warnings_of_transformers(caplog):
    """What transformers logs, which it does not propagate by itself."""
    transformers.utils.logging.enable_propagation()
    caplog.set_level(logging.WARNING)
    yield caplog
    transformers.utils.logging.disable_propagation()


@every_case
@torch.no_grad()
def test_a_reloaded_model_has_the_same_weights_and_outputs(case: Case, tmp_path, warnings_of_transformers):
    model = case.build()
    inputs = padded_inputs(case.sibling)
    model.save_pretrained(tmp_path)
    _, auto = HEADS[case.sibling][first_head(case.sibling)]
    reloaded = load(auto, tmp_path)
    assert type(reloaded) is type(model)
    assert not warnings_of_transformers.records
    mask = output_mask(case.sibling, inputs)
    assert_same_output(reloaded(**inputs).logits[mask], model(**inputs).logits[mask])
    state, expected = reloaded.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    buffers = dict(reloaded.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())


@every_head
@torch.no_grad()
def test_every_head_reloads_by_its_auto_class(sibling: str, head: str, tmp_path, warnings_of_transformers):
    kwargs = {"num_labels": 6} if "classification" in head else {}
    model = case_of(sibling).build(head, **kwargs)
    model.save_pretrained(tmp_path)
    reloaded = load(HEADS[sibling][head][1], tmp_path)
    assert type(reloaded) is type(model)
    assert not warnings_of_transformers.records
    inputs = padded_inputs(sibling)
    assert_same_output(reloaded(**inputs)[0], model(**inputs)[0])


def settings(config: PreTrainedConfig) -> dict[str, Any]:
    """All fields, apart from where the configuration was read."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


@every_case
def test_configurations_round_trip_through_json_and_read_well(case: Case, tmp_path):
    labels = {"num_labels": 2, "id2label": {0: "+", 1: "f"}, "label2id": {"+": 0, "f": 1}}
    config = case.config(**labels, problem_type="regression")
    config.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    saved = json.loads(text)
    assert saved["model_type"] == CONFIGS[case.sibling].model_type
    reloaded = AutoConfig.from_pretrained(tmp_path)
    assert type(reloaded) is CONFIGS[case.sibling]
    assert settings(reloaded) == settings(config)
    assert reloaded.id2label == {0: "+", 1: "f"} and reloaded.problem_type == "regression"
    reloaded.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == text


@pytest.mark.parametrize("sibling", SIBLINGS)
def test_every_field_of_a_configuration_is_saved(sibling: str, tmp_path):
    config = case_of(sibling).config()
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    parts = [(config, saved)]
    if sibling == SEQ2SEQ:
        parts += [(config.encoder, saved["encoder"]), (config.decoder, saved["decoder"])]
    library = {field.name for field in fields(PreTrainedConfig)}
    for part, written in parts:
        own = {field.name for field in fields(part)} - library - {"mixer_types"}  # the layer types tell them
        assert own and own <= written.keys()


def test_checkpoints_are_safetensors_only(tmp_path):
    for sibling in SIBLINGS:
        folder = tmp_path / sibling
        case_of(sibling).build().save_pretrained(folder)
        files = {path.name for path in folder.iterdir()}
        generates = set() if sibling == ENCODER else {"generation_config.json"}
        assert files == {"config.json", "model.safetensors"} | generates


@pytest.mark.parametrize(
    ("sibling", "name", "tied", "kept"),
    [
        (ENCODER, "default", {"lm_head.weight"}, {"lm_head.bias"}),
        (ENCODER, "untied", set(), {"lm_head.weight"}),
        (DECODER, "default", {"lm_head.weight"}, set()),
        (DECODER, "untied", set(), {"lm_head.weight"}),
        (SEQ2SEQ, "default", {"lm_head.weight", "model.decoder.embed_tokens.weight"}, set()),
        (SEQ2SEQ, "untied", {"model.decoder.embed_tokens.weight"}, {"lm_head.weight"}),
        (SEQ2SEQ, "separate_embeddings", {"lm_head.weight"}, {"model.decoder.embed_tokens.weight"}),
        (SEQ2SEQ, "separate_untied", set(), {"lm_head.weight", "model.decoder.embed_tokens.weight"}),
    ],
)
def test_tied_weights_are_saved_once_and_are_one_tensor_after_loading(
    sibling: str, name: str, tied: set[str], kept: set[str], tmp_path
):
    model = case_of(sibling, name).build()
    model.save_pretrained(tmp_path)
    keys = saved_keys(tmp_path)
    assert not keys & tied and kept <= keys
    assert keys | tied == set(model.state_dict())
    reloaded = load(type(model), tmp_path)
    for each in (model, reloaded):
        source = each.get_input_embeddings().weight
        if sibling == SEQ2SEQ and name.startswith("separate"):
            source = each.get_decoder().embed_tokens.weight
            assert source is not each.get_encoder().embed_tokens.weight
        for key in ("lm_head.weight", "model.decoder.embed_tokens.weight"):
            if key in each.state_dict():
                weight = each.get_parameter(key)
                alone = key not in tied and weight is not each.get_decoder().embed_tokens.weight
                assert (weight is source) == (key in tied) or (alone is False), key


@torch.no_grad()
def test_training_after_loading_keeps_tied_weights_tied(tmp_path):
    case_of(SEQ2SEQ).build().save_pretrained(tmp_path)
    model = load(HEADS[SEQ2SEQ]["language_model"][0], tmp_path)
    model.lm_head.weight += 1
    assert torch.equal(model.lm_head.weight, model.get_encoder().embed_tokens.weight)
    assert torch.equal(model.lm_head.weight, model.get_decoder().embed_tokens.weight)


@pytest.mark.parametrize("sibling", SIBLINGS)
@torch.no_grad()
def test_a_sharded_checkpoint_loads_as_one(sibling: str, tmp_path):
    model = case_of(sibling, "mixtral").build()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2 and (tmp_path / "model.safetensors.index.json").exists()
    inputs = padded_inputs(sibling)
    reloaded = load(type(model), tmp_path)
    mask = output_mask(sibling, inputs)
    assert_same_output(reloaded(**inputs).logits[mask], model(**inputs).logits[mask])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sibling", SIBLINGS)
def test_the_saved_dtype_is_kept_and_another_can_be_asked_for(sibling: str, dtype: torch.dtype, tmp_path):
    model = case_of(sibling).build().to(dtype)
    model.save_pretrained(tmp_path)
    reloaded = load(type(model), tmp_path)
    assert {parameter.dtype for parameter in reloaded.parameters()} == {dtype} == {reloaded.dtype}
    widened = load(type(model), tmp_path, dtype=torch.float64)
    assert {parameter.dtype for parameter in widened.parameters()} == {torch.float64}


@pytest.mark.parametrize("name", ["rotary_scaled", "alibi", "sinusoidal_scaled", "llama"])
@pytest.mark.parametrize("sibling", SIBLINGS)
def test_positions_stay_precise_in_a_half_precision_checkpoint(sibling: str, name: str, tmp_path):
    """Buffers are not saved: they must come back computed, in float32, not as memory garbage or rounded."""
    model = case_of(sibling, name).build()
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    reloaded = load(type(model), tmp_path)
    fresh = case_of(sibling, name).build()
    expected = dict(fresh.named_buffers())
    assert expected or name == "sinusoidal_scaled"
    for buffer_name, buffer in reloaded.named_buffers():
        assert torch.equal(buffer.float(), expected[buffer_name].to(buffer.dtype).float()), buffer_name
        assert buffer.dtype == torch.float32, buffer_name


@pytest.mark.parametrize("name", ["rotary_scaled", "llama"])
@pytest.mark.parametrize("sibling", [ENCODER, DECODER])
@torch.no_grad()
def test_distant_rotary_positions_are_told_apart_in_half_precision(sibling: str, name: str, tmp_path):
    """Frequencies rounded to bfloat16 are wrong by radians a thousand tokens on."""
    case_of(sibling, name).build().to(torch.bfloat16).save_pretrained(tmp_path)
    model_class = HEADS[sibling]["language_model"][0]
    ids = padded_inputs(sibling)["input_ids"][:1, :4]
    positions = torch.tensor([[0, 700, 1400, 2100]])
    expected = load(model_class, tmp_path, dtype=torch.float32)(ids, position_ids=positions).logits
    error = load(model_class, tmp_path)(ids, position_ids=positions).logits.float() - expected
    assert error.abs().mean() < 0.03 * expected.std()


@every_case
def test_nothing_is_left_uninitialised_when_weights_are_missing(case: Case, monkeypatch):
    """From a checkpoint without a single one of the model's weights, all are initialised as in a new model."""
    empty_like = torch.empty_like

    def poisoned(*args, **kwargs):
        tensor = empty_like(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() and tensor.device.type != "meta" else tensor

    monkeypatch.setattr(torch, "empty_like", poisoned)
    for head, (model_class, _) in HEADS[case.sibling].items():
        model = model_class.from_pretrained(None, config=case.config(), state_dict={})
        fresh = model_class(case.config())
        for name, parameter in model.named_parameters():
            other = fresh.get_parameter(name)
            assert parameter.isfinite().all(), (head, name)
            close_scales(parameter, other, (head, name))
        buffers = dict(fresh.named_buffers())
        assert buffers.keys() == dict(model.named_buffers()).keys()
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, buffers[name]), (head, name)


def close_scales(actual: torch.Tensor, expected: torch.Tensor, where: tuple[str, str]) -> None:
    """Equal where constant; else drawn at the same scale, where there are enough numbers to have one."""
    if expected.std(correction=0) == 0:
        assert torch.equal(actual, expected), where
    elif expected.numel() > 8:
        assert 0.5 < actual.std() / expected.std() < 2, where


@pytest.mark.parametrize("name", ["default", "mixtral", "all_mixers"])
def test_new_weights_have_the_configured_scale(name: str):
    config = case_of(DECODER, name).config(initializer_range=0.05, hidden_size=64, head_dim=8)
    model = HEADS[DECODER]["language_model"][0](config)
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            assert 0.04 < parameter.std() < 0.06, parameter_name
        else:
            assert parameter.unique().tolist() in ([0.0], [1.0]), parameter_name


@pytest.mark.parametrize(
    ("sibling", "head"),
    [(ENCODER, "language_model"), (ENCODER, "sequence_classification"), (ENCODER, "token_classification"),
     (DECODER, "language_model"), (DECODER, "sequence_classification"), (SEQ2SEQ, "language_model"),
     (IMAGE, "image_classification")],
)  # fmt: skip
@torch.no_grad()
def test_heads_load_bare_models_and_bare_models_load_heads(sibling: str, head: str, tmp_path):
    head_class, case = HEADS[sibling][head][0], case_of(sibling, "vit" if sibling == IMAGE else "untied")
    base = case.build("base")
    base.save_pretrained(tmp_path / "base")
    model, info = head_class.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    assert info["missing_keys"] and not any(key.startswith("model.") for key in info["missing_keys"])
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all() and parameter.abs().max() < 10, name
        if name.startswith("model."):
            assert torch.equal(parameter, base.get_parameter(name.removeprefix("model."))), name
        elif parameter.ndim > 1:
            assert 0.01 < parameter.std() < 0.03, name

    case.build(head).save_pretrained(tmp_path / "head")
    bare, info = AutoModel.from_pretrained(tmp_path / "head", output_loading_info=True)
    assert not info["missing_keys"]
    inputs = padded_inputs(sibling)
    full = load(head_class, tmp_path / "head")
    assert_same_output(bare.eval()(**inputs)[0], full.model(**inputs)[0])


@torch.no_grad()
def test_a_tied_head_takes_the_embedding_of_a_bare_model(tmp_path):
    for sibling in (DECODER, SEQ2SEQ):
        case_of(sibling).build("base").save_pretrained(tmp_path / sibling)
        model, info = HEADS[sibling]["language_model"][0].from_pretrained(tmp_path / sibling, output_loading_info=True)
        assert not any(info.values()), info
        assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_classifier_with_another_number_of_labels_asks_before_it_drops_the_old_layer(tmp_path):
    model = case_of(ENCODER).build("sequence_classification", num_labels=3)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(model).from_pretrained(tmp_path, num_labels=11)
    other, info = type(model).from_pretrained(
        tmp_path, num_labels=11, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert {key for key, *_ in info["mismatched_keys"]} == {
        "classifier.out_proj.weight",
        "classifier.out_proj.bias",
    }
    assert other.classifier.out_proj.out_features == 11


@pytest.mark.parametrize("sibling", SIBLINGS)
@torch.no_grad()
def test_a_device_map_places_tied_and_untied_weights(sibling: str, tmp_path):
    inputs = padded_inputs(sibling)
    for name in ("default", "untied"):
        model = case_of(sibling, name).build()
        model.save_pretrained(tmp_path)
        mapped = load(type(model), tmp_path, device_map="cpu")
        assert_same_output(mapped(**inputs).logits, model(**inputs).logits)


def test_the_implementations_can_be_chosen_while_loading(tmp_path):
    model = case_of(DECODER, "mixtral").build()
    model.save_pretrained(tmp_path)
    loaded = load(type(model), tmp_path, attn_implementation="eager", experts_implementation="batched_mm")
    assert loaded.config._attn_implementation == "eager"
    assert loaded.config._experts_implementation == "batched_mm"
    saved = json.loads((tmp_path / "config.json").read_text())
    assert not {"_attn_implementation", "attn_implementation"} & saved.keys()


def test_generation_settings_are_saved_beside_the_model(tmp_path):
    model = case_of(DECODER).build()
    assert model.generation_config.eos_token_id == 2 and model.generation_config.pad_token_id == 0
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path)
    assert load(type(model), tmp_path).generation_config.max_new_tokens == 7


def test_the_start_token_of_an_encoder_decoder_reaches_generation(tmp_path):
    model = case_of(SEQ2SEQ).build(decoder_start_token_id=4)
    model.save_pretrained(tmp_path)
    reloaded = load(type(model), tmp_path)
    assert reloaded.generation_config.decoder_start_token_id == 4
    assert reloaded.generate(padded_inputs(SEQ2SEQ)["input_ids"], max_new_tokens=2)[:, 0].tolist() == [4] * 3


SCRIPT = """
import sys, torch, fratrie, transformers
torch.set_num_threads(1)
for name in sys.argv[2:]:
    sibling, auto = name.split(":")
    folder = f"{sys.argv[1]}/{sibling}-{auto}"
    model = getattr(transformers, auto).from_pretrained(folder).eval()
    saved = torch.load(f"{folder}/expected.pt", weights_only=True)
    with torch.no_grad():
        torch.testing.assert_close(model(**saved["inputs"])[0], saved["output"], rtol=1e-5, atol=1e-5)
print("equal", len(sys.argv) - 2)
"""


@pytest.mark.slow
@torch.no_grad()
def test_every_head_gives_the_same_output_in_a_fresh_process(tmp_path):
    names = []
    for sibling in HEADS:
        for head, (_, auto) in HEADS[sibling].items():
            folder = tmp_path / f"{sibling}-{auto.__name__}"
            model = case_of(sibling, "vit_mixers" if sibling == IMAGE else "all_mixers").build(head)
            model.save_pretrained(folder)
            inputs = padded_inputs(sibling)
            torch.save({"inputs": inputs, "output": model(**inputs)[0]}, folder / "expected.pt")
            names.append(f"{sibling}:{auto.__name__}")
    result = run_forked("-c", SCRIPT, tmp_path, *names)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["equal", str(len(names))]


def test_a_wrong_folder_is_named_in_the_error(tmp_path):
    for auto in (AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM):
        with pytest.raises(OSError, match=f"'{tmp_path / 'nowhere'}'"):
            auto.from_pretrained(tmp_path / "nowhere")
        with pytest.raises(ValueError, match=f"^Unrecognized model in {tmp_path}\\."):
            auto.from_pretrained(tmp_path)
    case_of(DECODER).config().save_pretrained(tmp_path)
    with pytest.raises(OSError, match=rf"no file named model\.safetensors\b.* found in directory {tmp_path}\."):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_head_that_a_sibling_has_not_is_refused_by_name(tmp_path):
    case_of(ENCODER).build().save_pretrained(tmp_path)
    refused = r"^Unrecognized configuration class .*\.FratrieEncoderConfig'> for .*: AutoModelForCausalLM\."
    with pytest.raises(ValueError, match=refused):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_saved_configuration_with_an_unknown_field_is_refused(tmp_path):
    config = case_of(ENCODER).config()
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | {"hidden_sise": 3}))
    with pytest.raises(ValueError, match=r"hidden_sise.*hidden_size"):
        AutoConfig.from_pretrained(tmp_path)


def test_an_incomplete_configuration_of_a_saved_encoder_decoder_keeps_its_stacks(tmp_path):
    """Stacks that differ from the defaults come back as they were, not refilled from the top."""
    config = case_of(SEQ2SEQ, "unequal_stacks").config()
    config.save_pretrained(tmp_path)
    reloaded = AutoConfig.from_pretrained(tmp_path)
    for old, new in zip(stack_configs(config), stack_configs(reloaded), strict=True):
        assert type(old) is type(new)
        assert settings(old) == settings(new)
    assert reloaded.encoder.hidden_size == 48 and reloaded.decoder.hidden_size == 32


@pytest.mark.parametrize("case", [case for case in cases(DECODER) if LINEAR in layer_types(case.config())], ids=str)
def test_a_mixer_without_buffers_adds_none_to_the_checkpoint(case: Case, tmp_path):
    case.build().save_pretrained(tmp_path)
    assert not [key for key in saved_keys(tmp_path) if "inv_freq" in key or "slopes" in key or "state" in key]
