"""What Hugging Face's common tests check of its own models beyond the other files here, for every class.

A `Subject` is a class of ours with a configuration; batches are those of Hugging Face's testers: random ids and masks
with padding and holes.
"""

import copy
import inspect
import logging
import warnings
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from built import copy_of
from combinations import DECODER, ENCODER, HEADS, IMAGE, SEQ2SEQ, SIZES, Case, case_of, cases, stack_configs
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.testing_utils import set_config_for_less_flaky_test
from transformers.utils.output_capturing import CompileableContextVar

import fratrie
from fratrie.modeling.positions import FratrieRotaryEmbedding

BATCH, LENGTH, OUTPUT_LENGTH = 5, 7, 6


@dataclass(frozen=True)
class Subject:
    """A model class with one of the configurations."""

    name: str
    model_class: Any
    config_class: Any
    fields: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return self.name

    @property
    def sibling(self) -> str:
        return self.name.split("-")[0]

    @property
    def is_base(self) -> bool:
        return self.name.endswith("-base")

    @property
    def classifies_rows(self) -> bool:
        return "SequenceClassification" in self.model_class.__name__ or self.sibling == IMAGE

    def config(self, **overrides: Any) -> Any:
        return self.config_class(**{**dict(self.fields), **overrides})

    def build(self, config: Any = None, **overrides: Any) -> Any:
        def build() -> Any:
            torch.manual_seed(0)
            return self.model_class(self.config(**overrides) if config is None else config).eval()

        return copy_of((str(self), repr(overrides)), build) if config is None else build()

    def inputs(self, mask: str = "tril", vocab_size: int = SIZES["vocab_size"]) -> dict[str, torch.Tensor]:
        """Ids and mask: with row i of i + 1 real tokens (`"tril"`), with `"holes"`, or with none."""
        generator = torch.Generator().manual_seed(3)
        if self.sibling == IMAGE:
            return {"pixel_values": torch.randn(BATCH, 3, 12, 12, generator=generator)}
        inputs = {"input_ids": torch.randint(vocab_size, (BATCH, LENGTH), generator=generator)}
        if mask != "none":
            real = torch.ones(BATCH, LENGTH, dtype=torch.long).tril()
            if mask == "holes":
                real = torch.randint(2, (BATCH, LENGTH), generator=generator)
                real[:, 0] = 1
                real[0] = (torch.arange(LENGTH) < 3).long()
            inputs["attention_mask"] = real
        if self.sibling == SEQ2SEQ:
            inputs["decoder_input_ids"] = torch.randint(vocab_size, (BATCH, OUTPUT_LENGTH), generator=generator)
            if mask != "none":
                inputs["decoder_attention_mask"] = torch.ones(BATCH, OUTPUT_LENGTH, dtype=torch.long).tril()
        return inputs

    def training_inputs(self, config: Any) -> dict[str, torch.Tensor]:
        """The inputs with labels of zeros."""
        inputs = self.inputs()
        if self.classifies_rows:
            return inputs | {"labels": torch.zeros(BATCH, dtype=torch.long)}
        length = OUTPUT_LENGTH if self.sibling == SEQ2SEQ else LENGTH
        return inputs | {"labels": torch.zeros(BATCH, length, dtype=torch.long)}


def subjects_of(*chosen: Case) -> list[Subject]:
    return [
        Subject(f"{case}-{head}", model_class, type(case.config()), tuple((SIZES | case.combination.fields).items()))
        for case in chosen
        for head, (model_class, _) in HEADS[case.sibling].items()
    ]


IMAGES = [subject for subject in subjects_of(case_of(IMAGE)) if not subject.is_base]
PLAIN = [*subjects_of(*cases(names=("default",))), *IMAGES]
LAYOUTS = ("llama", "t5", "all_mixers", "deepseek_router", "separate_untied", "token_types")
SPREAD = [*PLAIN, *(s for s in subjects_of(*cases(names=LAYOUTS)) if s.name.endswith("-language_model"))]
BASES = [
    subject
    for subject in subjects_of(
        *cases(names=("default", "llama", "t5", "alibi", "sliding_full", "rotary_by_layer_type", "mixtral", "latent"))
    )
    if subject.is_base
]
every_subject = pytest.mark.parametrize("subject", SPREAD, ids=str)
plain_subjects = pytest.mark.parametrize("subject", PLAIN, ids=str)
text_subjects = pytest.mark.parametrize("subject", [s for s in SPREAD if s.sibling != IMAGE], ids=str)
heads = pytest.mark.parametrize("subject", [s for s in SPREAD if not s.is_base], ids=str)
siblings = pytest.mark.parametrize("sibling", [ENCODER, DECODER, SEQ2SEQ])


def subject_of(sibling: str, name: str = "default", head: str = "language_model") -> Subject:
    (subject,) = (s for s in subjects_of(case_of(sibling, name)) if s.name.endswith(f"-{head}"))
    return subject


def close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def tensors_of(output: Any, name: str = "") -> dict[str, torch.Tensor]:
    """The floating-point tensors of an output, by name."""
    if isinstance(output, torch.Tensor):
        return {name: output} if output.is_floating_point() else {}
    if isinstance(output, dict):
        output = dict(output.items())
    elif isinstance(output, (tuple, list)):
        output = dict(enumerate(output))
    else:
        return {}
    return {key: x for place, value in output.items() for key, x in tensors_of(value, f"{name}.{place}").items()}


def same_state(model: Any, other: Any) -> None:
    state = other.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


# --- initialisation ------------------------------------------------------------------------------------------------


@contextmanager
def initialisation(replacement: Any):
    """Put another function around Hugging Face's initialisation of one module."""
    original = PreTrainedModel._initialize_weights
    PreTrainedModel._initialize_weights = lambda *args, **kwargs: replacement(original, *args, **kwargs)
    try:
        yield
    finally:
        PreTrainedModel._initialize_weights = original


def seeded(original: Any, *args: Any, **kwargs: Any) -> None:
    torch.manual_seed(42)
    original(*args, **kwargs)


def skipped(original: Any, *args: Any, **kwargs: Any) -> None:
    pass


@every_subject
def test_weights_missing_from_a_checkpoint_are_initialised_to_the_bit_as_in_a_new_model(subject: Subject):
    with initialisation(seeded):
        new = subject.model_class(subject.config())
        loaded = subject.model_class.from_pretrained(None, config=subject.config(), state_dict={})
    assert not [name for name, x in (*loaded.named_parameters(), *loaded.named_buffers()) if x.is_meta]
    same_state(loaded, new)


@every_subject
@torch.no_grad()
def test_a_model_made_without_memory_is_whole_after_its_initialisation(subject: Subject):
    """All tensors are parameters or buffers, and initialisation brings every buffer back."""
    with initialisation(skipped):
        new = subject.model_class(subject.config())
    with torch.device("meta"):
        model = subject.model_class(subject.config()).eval()
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
    model.init_weights()
    buffers = dict(model.named_buffers())
    assert buffers.keys() == dict(new.named_buffers()).keys()
    for name, buffer in new.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    assert model(**subject.inputs())[0].isfinite().all()


def test_a_model_without_width_or_vocabulary_is_refused():
    """Hugging Face's tests make such configurations, so they are told only when a model is built."""
    for name in ("hidden_size", "vocab_size"):
        for sibling in (ENCODER, DECODER, SEQ2SEQ):
            subject = subject_of(sibling)
            config = subject.config_class(**{name: 0})
            assert getattr(config, name) == 0
            with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
                subject.model_class(config)
            with pytest.raises(ValueError, match=f"{name}=-4 must be at least 1"):
                subject.config_class(**{name: -4})


# --- saving and loading --------------------------------------------------------------------------------------------


@plain_subjects
def test_a_state_dict_alone_makes_a_model(subject: Subject):
    model = subject.build()
    same_state(
        subject.model_class.from_pretrained(None, config=subject.config(), state_dict=model.state_dict()), model
    )


@every_subject
def test_what_is_missing_from_a_checkpoint_is_named_and_nothing_else(subject: Subject, tmp_path):
    model = subject.build()
    model.save_pretrained(tmp_path)
    save_file({"other": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reloaded, info = subject.model_class.from_pretrained(tmp_path, output_loading_info=True)
    names = set(reloaded.state_dict())
    assert info["unexpected_keys"] == {"other"}
    tied = set(reloaded.all_tied_weights_keys)
    assert names - tied <= info["missing_keys"] <= names


@text_subjects
def test_untied_weights_come_back_untied(subject: Subject, tmp_path):
    config = subject.config()
    config.tie_word_embeddings = False
    model = subject.build(config)
    model.save_pretrained(tmp_path)
    reloaded, info = subject.model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    same_state(reloaded, model)


@text_subjects
def test_tied_weights_are_said_to_be_tied(subject: Subject):
    model = subject.build(tie_word_embeddings=True)
    groups = defaultdict(set)
    for name, tensor in model.state_dict().items():
        groups[tensor.data_ptr()].add(name)
    shared = [names for names in groups.values() if len(names) > 1]
    said = set(model.all_tied_weights_keys)
    assert said <= set().union(*shared) if shared else not said
    assert all(len(names - said) == 1 for names in shared)
    assert said or not (subject.name.endswith("language_model") or subject.sibling == SEQ2SEQ)


@plain_subjects
def test_a_checkpoint_of_pickled_tensors_still_loads(subject: Subject, tmp_path):
    model = subject.build()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    same_state(subject.model_class.from_pretrained(tmp_path), model)


@every_subject
def test_what_must_stay_in_full_precision_exists_and_does(subject: Subject, tmp_path):
    model = subject.build()
    kept = model._keep_in_fp32_modules_strict
    names = set(model.state_dict())
    assert all(any(module in name.split(".") for name in names) for module in kept)
    assert bool(kept) == ("deepseek_router" in subject.name)
    if not kept:
        return
    model.save_pretrained(tmp_path)
    for dtype in (torch.float16, torch.bfloat16):
        for name, tensor in subject.model_class.from_pretrained(tmp_path, dtype=dtype).state_dict().items():
            expected = torch.float32 if set(name.split(".")) & kept else dtype
            assert tensor.dtype == expected, name


@pytest.mark.parametrize("sibling", [ENCODER, DECODER])
def test_layers_of_another_size_are_asked_about_and_initialised(sibling: str, tmp_path, caplog):
    subject = subject_of(sibling, head="sequence_classification")
    model = subject.build()
    model.save_pretrained(tmp_path)
    for auto, size in ((AutoModelForSequenceClassification, {"num_labels": 42}), (AutoModel, {"vocab_size": 10})):
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            auto.from_pretrained(tmp_path, **size)
    transformers.utils.logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            other = AutoModelForSequenceClassification.from_pretrained(
                tmp_path, num_labels=42, ignore_mismatched_sizes=True
            )
            bare = AutoModel.from_pretrained(tmp_path, vocab_size=10, ignore_mismatched_sizes=True)
    finally:
        transformers.utils.logging.disable_propagation()
    assert caplog.text.count("Reinit due to size mismatch") >= 2
    assert other(**subject.inputs()).logits.shape == (BATCH, 42)
    assert other.classifier.out_proj.weight.std() < 0.05 and not other.classifier.out_proj.bias.any()
    for name, parameter in model.model.named_parameters():
        assert torch.equal(parameter, other.model.get_parameter(name)), name
    assert bare(**subject.inputs(vocab_size=10))[0].isfinite().all()


@plain_subjects
def test_loading_under_a_device_goes_there_and_without_memory_is_refused(subject: Subject, tmp_path):
    model = subject.build()
    model.save_pretrained(tmp_path)
    with torch.device("cpu"):
        loaded = subject.model_class.from_pretrained(tmp_path)
    assert {x.device.type for x in (*loaded.parameters(), *loaded.buffers())} == {"cpu"}
    same_state(loaded, model)
    with torch.device("meta"), pytest.raises(RuntimeError, match="meta device context manager"):
        subject.model_class.from_pretrained(tmp_path)


@every_subject
@torch.no_grad()
def test_weights_kept_off_the_device_or_on_disk_give_equal_outputs(subject: Subject, tmp_path):
    inputs = subject.inputs()
    expected = subject.build()(**inputs)[0]
    close(cpu_offload(subject.build(), execution_device=torch.device("cpu"))(**inputs)[0], expected)
    on_disk = disk_offload(subject.build(), str(tmp_path), execution_device=torch.device("cpu"))
    assert next(on_disk.parameters()).is_meta
    close(on_disk(**inputs)[0], expected)


@plain_subjects
@torch.no_grad()
def test_an_automatic_device_map_gives_equal_outputs(subject: Subject, tmp_path):
    model = subject.build()
    model.save_pretrained(tmp_path)
    for device_map in ("auto", {"": "cpu"}):
        loaded = subject.model_class.from_pretrained(tmp_path, device_map=device_map)
        close(loaded(**subject.inputs())[0], model(**subject.inputs())[0])


# --- outputs -------------------------------------------------------------------------------------------------------


@every_subject
def test_the_signature_names_the_inputs_and_says_what_can_be_asked_for(subject: Subject):
    parameters = inspect.signature(subject.model_class.forward).parameters
    assert list(parameters)[1] == subject.model_class.main_input_name
    assert "output_attentions" in parameters["kwargs"].annotation.__args__[0].__annotations__
    if subject.sibling != IMAGE:
        assert {"input_ids", "attention_mask", "inputs_embeds"} <= set(parameters)
    if subject.sibling == SEQ2SEQ:
        assert {"decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds"} <= set(parameters)


@pytest.mark.parametrize("subject", BASES, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_what_is_recorded_gets_its_gradient_from_the_output(subject: Subject, training: bool):
    """Padding may not be taken out then: what is put back into the batch is a copy that no output depends on."""
    config = subject.config(attn_implementation="eager")
    for each in {id(c): c for c in (config, *stack_configs(config))}.values():
        each.output_attentions = each.output_hidden_states = True
    outputs = subject.build(config).train(training)(**subject.inputs())
    recorded = [
        getattr(outputs, f"{stack}{kind}")[0]
        for stack in (("encoder_", "decoder_", "") if subject.sibling == SEQ2SEQ else ("",))
        for kind in ("hidden_states", "attentions", "cross_attentions")
        if getattr(outputs, f"{stack}{kind}", None)
    ]
    assert len(recorded) == (5 if subject.sibling == SEQ2SEQ else 2)
    for tensor in recorded:
        tensor.retain_grad()
    outputs[0].flatten()[0].backward(retain_graph=True)
    for tensor in recorded:
        assert tensor.grad is not None
    assert recorded[0].grad.abs().max() > 0


@every_subject
@torch.no_grad()
def test_a_row_alone_equals_the_row_in_a_batch_at_padding_and_holes_too(subject: Subject):
    model = subject.build()
    inputs = subject.inputs("holes")
    for kwargs in ({}, {"use_cache": False}) if subject.sibling in (DECODER, SEQ2SEQ) else ({},):
        whole = tensors_of(model(**inputs, output_hidden_states=True, **kwargs))
        row = tensors_of(model(**{k: x[:1] for k, x in inputs.items()}, output_hidden_states=True, **kwargs))
        assert whole.keys() == row.keys() and len(row) > 3
        for name, tensor in row.items():
            close(whole[name][:1], tensor)


@pytest.mark.parametrize("subject", BASES, ids=str)
def test_states_at_padding_are_zero_with_padding_taken_out_or_not(subject: Subject):
    inputs = subject.inputs()
    mask = inputs["decoder_attention_mask" if subject.sibling == SEQ2SEQ else "attention_mask"].bool()
    kwargs = {"use_cache": False} if subject.sibling != ENCODER else {}
    for unpad in (True, False):
        states = subject.build(unpad_inputs=unpad)(**inputs, **kwargs)[0]
        assert not states[~mask].any() and states[mask].any(-1).all()


@every_subject
@torch.no_grad()
def test_a_tuple_holds_what_the_named_output_holds(subject: Subject):
    model = subject.build(attn_implementation="eager")
    for inputs in (subject.inputs(), {} if subject.is_base else subject.training_inputs(model.config)):
        for names in (
            (),
            ("output_hidden_states",),
            ("output_attentions",),
            ("output_hidden_states", "output_attentions"),
        ):
            if inputs:
                asked = dict.fromkeys(names, True)
                named = model(**inputs, **asked, return_dict=True).to_tuple()
                plain = model(**inputs, **asked, return_dict=False)
                assert len(plain) == len(named)
                close(tensors_of(plain), tensors_of(named))


@pytest.mark.parametrize("subject", [s for s in PLAIN if s.sibling == SEQ2SEQ], ids=str)
@torch.no_grad()
def test_what_the_configuration_of_an_encoder_decoder_asks_for_is_returned_of_both_stacks(subject: Subject):
    config = subject.config(attn_implementation="eager")
    config.output_attentions = config.output_hidden_states = True
    outputs = subject.build(config)(**subject.inputs())
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        assert len(outputs[name]) == 2, name
    for name in ("encoder_hidden_states", "decoder_hidden_states"):
        assert len(outputs[name]) == 3, name


@every_subject
@torch.no_grad()
def test_outputs_are_recorded_by_one_model_at_a_time(subject: Subject, monkeypatch):
    """Nested recorders would share what they collect."""
    recording: Counter[str] = Counter()
    original_set, original_reset = CompileableContextVar.set, CompileableContextVar.reset

    def enter(self: Any, value: dict[str, Any]) -> Any:
        recording.update(value.keys())
        assert max(recording.values(), default=0) <= 1, recording
        return original_set(self, value)

    def leave(self: Any, token: Any) -> None:
        recording.subtract(self.context_var.get().keys())
        original_reset(self, token)

    monkeypatch.setattr(CompileableContextVar, "set", enter)
    monkeypatch.setattr(CompileableContextVar, "reset", leave)
    asked = {"output_attentions": True, "output_hidden_states": True, "output_router_logits": True}
    subject.build(attn_implementation="eager")(**subject.inputs(), **asked)
    assert recording and not +recording


@every_subject
@torch.no_grad()
def test_a_pass_leaves_no_trace(subject: Subject):
    """Neither in the inputs, nor in the model: other batches in between change nothing, and nor does training mode."""
    model, inputs = subject.build(), subject.inputs()
    given = {name: x.clone() for name, x in inputs.items()}
    expected = model(**inputs)[0]
    model.train()(**{name: x[1:4].flip(0) for name, x in inputs.items()})
    model.eval()(**subject.inputs("holes"))
    assert torch.equal(model(**inputs)[0], expected)
    assert all(torch.equal(x, given[name]) for name, x in inputs.items())
    same_state(model, subject.build())


@text_subjects
@torch.no_grad()
def test_a_mask_of_ones_is_none(subject: Subject):
    model, inputs = subject.build(), subject.inputs("none")
    masks = {name.replace("input_ids", "attention_mask"): torch.ones_like(ids) for name, ids in inputs.items()}
    if model.config.pad_token_id is not None and subject.classifies_rows:
        inputs["input_ids"].clamp_min_(3)  # without a mask padding is found by its id
    close(model(**inputs, **masks)[0], model(**inputs)[0])


# --- embeddings ----------------------------------------------------------------------------------------------------


@text_subjects
def test_embeddings_can_be_read_and_set(subject: Subject):
    model = subject.build()
    assert type(model.get_input_embeddings()) is torch.nn.Embedding
    new = torch.nn.Embedding(10, 10)
    model.set_input_embeddings(new)
    assert model.get_input_embeddings() is new
    output = model.get_output_embeddings()
    assert type(output) is torch.nn.Linear if subject.name.endswith("language_model") else output is None


RESIZED = [s for s in SPREAD if s.sibling != IMAGE and dict(s.fields).get("share_embeddings", True)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("subject", [s for s in RESIZED if s in PLAIN], ids=str)
@torch.no_grad()
def test_the_vocabulary_grows_and_shrinks(subject: Subject, tied: bool):
    for start in (SIZES["vocab_size"], 4):  # the second smaller than the width, which another way of filling needs
        config = subject.config(tie_word_embeddings=tied)
        config.vocab_size, config.pad_token_id = start, 3
        model = subject.build(config)
        before = model.get_input_embeddings().weight.clone()
        for size in (start, start + 10, start + 10, max(start - 15, 4)):
            weight = model.resize_token_embeddings(size).weight
            kept = min(size, start)
            assert weight.shape[0] == size == model.config.get_text_config().vocab_size == model.config.vocab_size
            assert torch.equal(weight[:kept], before[:kept])
            output = model.get_output_embeddings()
            for x in (weight, *(() if output is None else (output.weight, output.bias))):
                assert x is None or x.shape[0] == size
                if x is not None and size > start:
                    close(x[:start].mean(0), x[start:].mean(0), 1e-3)
            assert model(**subject.inputs(vocab_size=min(size, 3)))[0].isfinite().all()


@pytest.mark.parametrize("subject", [s for s in RESIZED if s in PLAIN], ids=str)
def test_the_vocabulary_can_be_rounded_up(subject: Subject):
    model = subject.build()
    for size, rounded in ((None, 128), (71, 128), (84, 128), (128, 128), (129, 192)):
        assert model.resize_token_embeddings(size, pad_to_multiple_of=64).weight.shape[0] == rounded
        model = subject.build()
    with pytest.raises(ValueError, match=r"multiple of `1.3`, which is not and integer"):
        model.resize_token_embeddings(71, pad_to_multiple_of=1.3)


@text_subjects
@torch.no_grad()
def test_every_class_takes_embeddings_in_the_place_of_ids(subject: Subject):
    model, inputs = subject.build(), subject.inputs()
    inputs["input_ids"].clamp_min_(1)
    expected = model(**inputs)[0]
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    if subject.sibling == SEQ2SEQ:
        embed = model.get_decoder().get_input_embeddings()
        inputs["decoder_inputs_embeds"] = embed(inputs.pop("decoder_input_ids"))
    close(model(**inputs)[0], expected)


# --- training ------------------------------------------------------------------------------------------------------


def gradients(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@heads
def test_activation_checkpointing_of_every_kind_gives_equal_gradients(subject: Subject):
    config = subject.config()
    model = subject.build(config).train()
    inputs = subject.training_inputs(config)
    expected = gradients(model, inputs)
    assert len(expected) > 5 and not model.is_gradient_checkpointing
    for settings in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model.gradient_checkpointing_enable(settings)
        assert model.is_gradient_checkpointing
        if settings == {"use_reentrant": True}:
            model.enable_input_require_grads()
        close(gradients(model, inputs), expected)
        model.gradient_checkpointing_disable()
        assert not model.is_gradient_checkpointing
    model.disable_input_require_grads()


@plain_subjects
def test_activation_checkpointing_can_be_asked_for_in_other_ways(subject: Subject, tmp_path):
    config = subject.config()
    config.gradient_checkpointing = True
    model = subject.build(config)
    assert model.is_gradient_checkpointing
    model.save_pretrained(tmp_path)
    assert not subject.model_class.from_pretrained(tmp_path).is_gradient_checkpointing
    if subject.is_base:
        return
    model = subject.build().train()
    inputs = subject.training_inputs(model.config)
    expected = gradients(model, inputs)
    model.activation_checkpointing_enable(every_n_layers=2)
    close(gradients(model, inputs), expected)
    model.activation_checkpointing_disable()


@heads
def test_inputs_that_need_gradients_train_a_frozen_model_under_checkpointing(subject: Subject):
    """As adapters do: all weights but some late ones are frozen."""
    model = subject.build().train()
    inputs = subject.training_inputs(model.config)
    model.requires_grad_(False)
    trained = [x for name, x in model.named_parameters() if "layers.1.mixer.v_proj" in name or "kv_a" in name]
    trained = trained or list(model.parameters())[-1:]
    for parameter in trained:
        parameter.requires_grad_(True)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model.zero_grad()
        model(**inputs).loss.backward()
        assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in trained)
        model.disable_input_require_grads()


@pytest.mark.parametrize("subject", [s for s in SPREAD if s.classifies_rows], ids=str)
@pytest.mark.parametrize(
    ("problem", "labels"), [("multi_label_classification", 2), ("single_label_classification", 3), ("regression", 1)]
)
def test_classifiers_train_every_kind_of_problem_without_broadcasting(subject: Subject, problem: str, labels: int):
    config = subject.config()
    config.problem_type, config.num_labels = problem, labels
    model = subject.build(config).train()
    shape = (BATCH, labels) if problem.startswith("multi") else (BATCH,)
    dtype = torch.long if problem.startswith("single") else torch.float
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**subject.inputs(), labels=torch.zeros(shape, dtype=dtype)).loss.backward()
    assert all(x.grad is not None for x in model.classifier.parameters())


# All heads, and one body with experts.
STEPS = [s for s in SPREAD if (s in PLAIN and not s.is_base) or s.name == "decoder-deepseek_router-language_model"]


@pytest.mark.slow
@pytest.mark.parametrize("subject", STEPS, ids=str)
def test_a_step_compiled_in_one_graph_has_equal_gradients(subject: Subject):
    torch._dynamo.reset()
    model = subject.build().train()
    if "deepseek" in subject.name:
        model.set_experts_implementation("batched_mm")
    inputs = subject.training_inputs(model.config)
    if subject.sibling == DECODER:
        inputs["use_cache"] = False
    expected = gradients(model, inputs)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    model.zero_grad()
    compiled(**inputs).loss.backward()
    close({name: x.grad for name, x in model.named_parameters() if x.grad is not None}, expected, 1e-4)


@pytest.mark.parametrize(
    "subject", [s for s in SPREAD if s in PLAIN or str(s) == "decoder-deepseek_router-language_model"], ids=str
)
@torch.no_grad()
def test_every_class_is_exported_with_equal_outputs(subject: Subject):
    model = subject.build()
    for config in {id(c): c for c in (model.config, *stack_configs(model.config))}.values():
        config.use_cache = False
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    inputs = subject.inputs()
    expected = tensors_of(model(**inputs))
    with torch.enable_grad():
        exported = torch.export.export(model, args=(), kwargs=copy.deepcopy(inputs), strict=False)
    close(tensors_of(exported.module()(**inputs)), expected, 1e-4)


# --- attention implementations -------------------------------------------------------------------------------------


@every_subject
def test_the_attention_implementation_is_set_by_every_way_at_once(subject: Subject):
    def implementations(config: PreTrainedConfig) -> set[str]:
        return {each._attn_implementation for each in (config, *stack_configs(config))}

    fields = subject.config().to_diff_dict() | {"attn_implementation": "eager"}
    config = subject.config_class(**{name: x for name, x in fields.items() if not name.startswith("_attn")})
    assert implementations(config) == {"eager"}
    config._attn_implementation = "sdpa"
    assert implementations(config) == {"sdpa"}
    config._attn_implementation = "eager"
    model = subject.build(config)
    assert model._can_set_attn_implementation() and implementations(model.config) == {"eager"}
    model.set_attn_implementation("sdpa")
    assert implementations(model.config) == {"sdpa"}
    with pytest.raises(ValueError, match='Specified `attn_implementation="foo"` is not supported'):
        model.set_attn_implementation("foo")
    assert implementations(model.config) == {"sdpa"}


@pytest.mark.parametrize("subject", [s for s in SPREAD if s.sibling == SEQ2SEQ], ids=str)
def test_each_stack_of_an_encoder_decoder_can_have_its_own_implementation(subject: Subject, tmp_path):
    model = subject.build(attn_implementation={"": "eager", "encoder": "eager", "decoder": "eager"})
    stacks = model.config.encoder, model.config.decoder
    assert [stack._attn_implementation for stack in stacks] == ["eager", "eager"]
    assert {id(m.config) for m in model.modules() if isinstance(m, PreTrainedModel)} == {
        id(c) for c in (model.config, *stacks)
    }
    model.set_attn_implementation({"": "sdpa"})
    assert model.config._attn_implementation == "sdpa"
    assert [stack._attn_implementation for stack in stacks] == ["eager", "eager"]
    model.set_attn_implementation({"decoder": "sdpa"})
    assert [stack._attn_implementation for stack in stacks] == ["eager", "sdpa"]
    model.save_pretrained(tmp_path)
    loaded = subject.model_class.from_pretrained(tmp_path, attn_implementation={"": "eager", "encoder": "sdpa"})
    assert loaded.config.encoder._attn_implementation == "sdpa"
    config = subject.config()
    config.get_text_config(decoder=True)._attn_implementation = "eager"
    assert subject.build(config).config.decoder._attn_implementation == "eager"


TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@every_subject
@torch.no_grad()
def test_eager_equals_sdpa_after_a_window_was_set_and_the_model_saved(subject: Subject, tmp_path):
    """Hugging Face's test sets a window and epsilons of many names on any configuration, and reloads the model."""
    config = subject.config()
    set_config_for_less_flaky_test(config)
    if hasattr(config, "sliding_window"):
        config.sliding_window = 2
    subject.build(config).save_pretrained(tmp_path)
    for dtype, tolerance in TOLERANCES.items():
        sdpa = subject.model_class.from_pretrained(tmp_path, dtype=dtype, attn_implementation="sdpa").eval()
        eager = copy.deepcopy(sdpa)
        eager.set_attn_implementation("eager")
        inputs = {k: x.to(dtype) if x.is_floating_point() else x for k, x in subject.inputs().items()}
        asked = {"output_hidden_states": True, "output_attentions": True}
        close(eager(**inputs, **asked)[0].float(), sdpa(**inputs, **asked)[0].float(), tolerance)


def test_only_models_with_experts_say_that_these_have_implementations():
    """Hugging Face skips its tests of experts for classes that say no, and runs them whatever the configuration."""
    for sibling in (ENCODER, DECODER, SEQ2SEQ):
        sparse, dense = subject_of(sibling, "mixtral"), subject_of(sibling)
        assert not sparse.model_class._can_set_experts_implementation()
        assert sparse.build()._can_set_experts_implementation() and not dense.build()._can_set_experts_implementation()
    model = subject_of(SEQ2SEQ, "linear_to_sliding").build()
    model.set_experts_implementation("batched_mm")
    assert model.config.decoder._experts_implementation == "batched_mm"


@text_subjects
@torch.no_grad()
def test_feed_forward_in_chunks_is_accepted_and_changes_nothing(subject: Subject):
    inputs = subject.inputs()
    close(subject.build(chunk_size_feed_forward=1)(**inputs)[0], subject.build()(**inputs)[0])


# --- configurations ------------------------------------------------------------------------------------------------

CONFIGS = [fratrie.FratrieEncoderConfig, fratrie.FratrieDecoderConfig, fratrie.FratrieSeq2SeqConfig]
every_config = pytest.mark.parametrize("config_class", CONFIGS, ids=lambda config_class: config_class.model_type)
PROPERTIES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


@every_config
def test_the_common_properties_can_be_read_set_and_given(config_class: Any):
    config = config_class()
    for value, name in enumerate(PROPERTIES):
        assert hasattr(config, name)
        setattr(config, name, value)
        assert getattr(config, name) == value
        assert all(getattr(stack, name) == value for stack in stack_configs(config))
        assert getattr(config_class(**{name: value}), name) == value
    assert len(config_class(num_labels=5).id2label) == 5
    config.num_labels = 3
    assert len(config.id2label) == len(config.label2id) == 3


@every_config
def test_common_arguments_are_kept(config_class: Any):
    given = {
        "return_dict": False, "output_hidden_states": True, "output_attentions": True, "dtype": "float16",
        "chunk_size_feed_forward": 5, "architectures": ["BertModel"], "id2label": {0: "label"},
        "label2id": {"label": "0"}, "problem_type": "regression",
    }  # fmt: skip
    config = config_class(**given)
    for name, value in given.items():
        assert getattr(config, name) == (torch.float16 if name == "dtype" else value), name


@every_config
def test_configurations_come_back_from_files_folders_and_the_whole(config_class: Any, tmp_path):
    config = config_class(vocab_size=99)
    config.to_json_file(tmp_path / "config.json")
    assert config_class.from_json_file(tmp_path / "config.json").to_dict() == config.to_dict()
    config.save_pretrained(tmp_path / "one" / "test")
    whole = config_class.from_pretrained(tmp_path / "one", subfolder="test")
    assert whole.to_dict() == config.to_dict()
    with pytest.raises(OSError):
        config_class.from_pretrained(f".{tmp_path}/nowhere")
    for name, stack_class in config_class.sub_configs.items():
        alone = stack_class.from_pretrained(tmp_path / "one" / "test")
        expected = config.to_dict()[name]
        assert {k: v for k, v in alone.to_dict().items() if k != "transformers_version"} == expected
        assert type(alone) is type(getattr(whole, name))


def test_a_field_of_one_stack_can_be_changed_on_loading(tmp_path):
    config = case_of(SEQ2SEQ, "unequal_stacks").config()
    config.save_pretrained(tmp_path)
    changed = type(config).from_pretrained(tmp_path, decoder={"vocab_size": 20})
    assert changed.get_text_config().to_dict() == config.decoder.to_dict() | {"vocab_size": 20}
    shared = case_of(SEQ2SEQ).config()
    shared.save_pretrained(tmp_path)
    changed = type(shared).from_pretrained(tmp_path, decoder={"vocab_size": 20})
    with pytest.raises(ValueError, match=r"share_embeddings=True, but .*\(71, 32\) and \(20, 32\)"):
        fratrie.FratrieSeq2SeqModel(changed)


def test_the_width_of_the_encoder_reaches_the_decoders_cross_attention():
    config = case_of(SEQ2SEQ, "separate_embeddings").config()
    config.encoder.hidden_size = 64
    model = fratrie.FratrieSeq2SeqModel(config)
    assert model.decoder.layers[0].cross_attention.k_proj.in_features == 64


@every_config
def test_attributes_that_are_no_fields_are_not_saved_and_said_so(config_class: Any, tmp_path, caplog):
    config = config_class()
    config.rms_norm_eps, config.norm_eps = 1.0, 0.5
    transformers.utils.logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            config.save_pretrained(tmp_path)
    finally:
        transformers.utils.logging.disable_propagation()
    assert "rms_norm_eps" in caplog.text
    assert not hasattr(config_class.from_pretrained(tmp_path), "rms_norm_eps")


@text_subjects
@torch.no_grad()
def test_a_configuration_without_the_common_fields_makes_a_model(subject: Subject):
    common = ("pad_token_id", "eos_token_id", "bos_token_id", "tie_word_embeddings", "decoder_start_token_id")
    fields = subject.config().to_diff_dict()
    for kept in (fields, *(x for x in fields.values() if isinstance(x, dict) and "model_type" in x)):
        for name in common:
            kept.pop(name, None)
    config = subject.config_class(**fields)
    config.pad_token_id = config.eos_token_id = config.bos_token_id = 0
    assert subject.build(config)(**subject.inputs())[0].isfinite().all()


# --- rotary positions ----------------------------------------------------------------------------------------------


def rotary_config(**rope: Any) -> Any:
    config = case_of(DECODER, "llama").config()
    config.rope_parameters = {**config.rope_parameters, **rope}
    return config


@torch.no_grad()
def test_scaled_rotary_positions_are_what_their_name_says():
    short, long = torch.arange(10)[None], torch.arange(60)[None]  # the model is meant for 40
    x = torch.zeros(1)
    plain = FratrieRotaryEmbedding(config=rotary_config())
    cos, sin = plain(x, long)
    close(plain(x, short), (cos[:, :, :10], sin[:, :, :10]))

    linear = FratrieRotaryEmbedding(config=rotary_config(rope_type="linear", factor=10.0))
    for scaled, original in zip(linear(x, long), (cos, sin), strict=True):
        close(scaled[:, :, ::10], original[:, :, :6])

    dynamic = FratrieRotaryEmbedding(config=rotary_config(rope_type="dynamic", factor=10.0))
    close(dynamic(x, short), plain(x, short))
    assert not torch.allclose(dynamic(x, long)[0], cos)
    assert (dynamic.inv_freq <= plain.inv_freq).all()
    close(dynamic(x, short), plain(x, short))

    yarn = FratrieRotaryEmbedding(config=rotary_config(rope_type="yarn", factor=10.0))
    assert not torch.allclose(yarn(x, short)[0], plain(x, short)[0])


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn"])
@torch.no_grad()
def test_a_model_with_scaled_rotary_positions_differs_where_it_should(rope_type: str):
    subject = subject_of(DECODER, "llama", "base")
    plain, scaled = subject.build(rotary_config()), subject.build(rotary_config(rope_type=rope_type, factor=10.0))
    short, long = (torch.randint(3, 71, (1, length)) for length in (10, 60))
    assert torch.allclose(plain(short)[0], scaled(short)[0], atol=1e-5) == (rope_type == "dynamic")
    assert not torch.allclose(plain(long)[0], scaled(long)[0], atol=1e-5)
