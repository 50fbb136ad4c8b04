"""ONNX: a classifier and a decoder with its cache run in onnxruntime at sizes that were not exported."""

import numpy as np
import onnxruntime
import pytest
import torch
from combinations import DECODER, ENCODER, SEQ2SEQ, case_of, documents, pad

import fratrie
from fratrie.onnx_export import export_onnx

pytestmark = pytest.mark.ecosystem


def session(model, tmp_path):
    export_onnx(model, tmp_path / "model.onnx")
    return onnxruntime.InferenceSession(tmp_path / "model.onnx")


def run(session, inputs):
    return session.run(None, {name: np.asarray(value) for name, value in inputs.items()})


def test_a_classifier_gives_the_same_logits_and_labels(tmp_path):
    """Relative positions, token types, several labels, calibrated; one text or many, one token or thirty, padding on
    either side."""
    model = case_of(ENCODER, "t5").build(
        "sequence_classification",
        type_vocab_size=2,
        num_labels=5,
        problem_type="multi_label_classification",
        label_calibration=[[[-0.1, -1], [0.1, 2]], [[-0.2, -1], [0, 0], [0.1, 3]]] * 2 + [[[0, 0], [1, 1]]],
    )
    assert model.config.unpad_inputs
    onnx = session(model, tmp_path)
    for lengths in ((9, 6, 3), (1,), (30, 2, 17, 8, 8), (4, 4)):
        for side in ("right", "left"):
            ids, mask = pad(documents(lengths), side)
            inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}
            with torch.no_grad():
                logits = model(**inputs).logits.numpy()
            (found,) = run(onnx, inputs)
            np.testing.assert_allclose(found, logits, atol=1e-4)
            assert ((found > 0) == (logits > 0)).all()


def test_a_classifier_of_images_gives_the_same_logits(tmp_path):
    config = fratrie.FratrieEncoderConfig(
        patch_size=4, image_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    model = fratrie.FratrieEncoderForImageClassification(config).eval()
    images = torch.randn(5, 3, 8, 8)
    (found,) = run(session(model, tmp_path), {"pixel_values": images})
    np.testing.assert_allclose(found, model(images).logits.detach().numpy(), atol=1e-4)


def test_the_encoder_of_an_encoder_decoder_gives_the_same_states(tmp_path):
    encoder = case_of(SEQ2SEQ, "llama").build().get_encoder()
    ids, mask = pad(documents((7, 4)), "left")
    (found,) = run(session(encoder, tmp_path), {"input_ids": ids, "attention_mask": mask})
    with torch.no_grad():
        states = encoder(ids, attention_mask=mask).last_hidden_state
    np.testing.assert_allclose(found[mask.bool()], states[mask.bool()], atol=1e-4)


@pytest.mark.parametrize("name", ["sliding_alibi", "mixtral"])
def test_a_decoder_continues_texts_like_generate(tmp_path, name):
    """Greedy decoding from an empty cache, one token a step; a window, a position bias, grouped heads and experts."""
    model = case_of(DECODER, name).build(eos_token_id=None).train()
    experts = model.get_experts_implementation()
    onnx = session(model, tmp_path)
    assert model.training
    assert model.get_experts_implementation() == experts
    model.eval()
    for lengths in ((9, 6, 3), (1,)):
        ids, mask = pad(documents(lengths), "left")
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        past = {
            put.name: np.zeros((len(ids), put.shape[1], 0, put.shape[3]), np.float32)
            for put in onnx.get_inputs()
            if put.name.startswith("past_key_values")
        }
        text, step = ids, ids
        for _ in range(8):
            logits, *present = run(onnx, {"input_ids": step, "attention_mask": mask, **past})
            with torch.no_grad():
                whole = model(text, attention_mask=mask, use_cache=False).logits[:, -1]
            np.testing.assert_allclose(logits[:, -1], whole, atol=1e-4)
            step = torch.from_numpy(logits[:, -1:].argmax(-1))
            text, mask = torch.cat([text, step], 1), torch.cat([mask, torch.ones_like(step)], 1)
            past = dict(zip(past, present, strict=True))
        assert text.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("sibling", "name", "message"),
    [(SEQ2SEQ, "default", r"get_encoder\(\)"), (DECODER, "linear_full", r"mixer_types=\['linear', 'softmax'\]")],
)
def test_what_cannot_be_exported_is_refused(tmp_path, sibling, name, message):
    with pytest.raises(ValueError, match=message):
        export_onnx(case_of(sibling, name).build(), tmp_path / "model.onnx")


@pytest.mark.parametrize("name", ["short_conv", "gated_delta", "kimi_delta", "ssd", "bigbird"])
def test_mixers_that_onnx_cannot_run_are_refused_by_name(tmp_path, name):
    model = case_of(DECODER).build("sequence_classification", mixer_types=["softmax", name])
    with pytest.raises(ValueError, match=rf"ONNX .* mixer_types=\['softmax', '{name}'\]: export a model without them"):
        export_onnx(model, tmp_path / "model.onnx")
