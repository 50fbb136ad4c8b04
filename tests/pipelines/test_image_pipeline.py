"""Hugging Face's image-classification pipeline, unmodified, on a folder with our model and an image processor."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, ViTImageProcessorPil, pipeline

import fratrie

LABELS = ["chat", "chien", "oiseau", "poisson"]
MEAN, STD = [0.5, 0.4, 0.3], [0.5, 0.25, 0.2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    torch.manual_seed(0)
    config = fratrie.FratrieEncoderConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        initializer_range=0.3,
        patch_size=4,
        image_size=16,
        max_position_embeddings=17,
        classifier_pooling="first",
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
        **fratrie.norm_slots("pre"),
    )
    fratrie.FratrieEncoderForImageClassification(config).save_pretrained(path)
    # The processor that needs Pillow alone.
    ViTImageProcessorPil(size={"height": 16, "width": 16}, image_mean=MEAN, image_std=STD).save_pretrained(path)
    return path


def photos():
    """Images of several sizes, one of the model's own, one grey."""
    generator = np.random.default_rng(0)
    sizes = [(16, 16, 3), (16, 16, 3), (31, 20, 3), (9, 40, 3), (64, 64)]
    return [Image.fromarray(generator.integers(0, 256, size, dtype=np.uint8)) for size in sizes]


@torch.no_grad()
def scores_of(model, photo):
    """Probabilities by the formula, resized by Pillow alone."""
    resized = photo.convert("RGB").resize((16, 16), Image.Resampling.BILINEAR)
    pixels = (torch.from_numpy(np.asarray(resized).copy()) / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    probabilities = model(pixel_values=pixels.permute(2, 0, 1)[None].float()).logits[0].softmax(-1)
    return dict(zip(LABELS, probabilities.tolist(), strict=True))


def as_dict(results):
    return {result["label"]: result["score"] for result in results}


def test_images_get_the_scores_of_the_model(folder):
    pipe = pipeline("image-classification", model=str(folder))
    assert isinstance(pipe.model, fratrie.FratrieEncoderForImageClassification)
    best = set()
    for photo in photos():
        expected = scores_of(pipe.model, photo)
        results = pipe(photo)
        assert as_dict(results) == pytest.approx(expected, abs=1e-5)
        assert [result["score"] for result in results] == sorted(as_dict(results).values(), reverse=True)
        assert results[0]["label"] == max(expected, key=expected.get)
        assert pipe(photo, top_k=1) == results[:1]
        best.add(results[0]["label"])
    assert len(best) > 1  # images are told apart


def test_batches_give_the_scores_of_single_images(folder):
    pipe = pipeline("image-classification", model=str(folder))
    singles = [pipe(photo) for photo in photos()]
    for batched, single in zip(pipe(photos(), batch_size=3), singles, strict=True):
        assert as_dict(batched) == pytest.approx(as_dict(single), abs=1e-5)


def test_files_of_images_are_read_without_the_network(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    path = tmp_path / "photo.png"
    photos()[2].save(path)
    pipe = pipeline(model=str(folder), task="image-classification")
    assert as_dict(pipe(str(path))) == pytest.approx(as_dict(pipe(photos()[2])))


def test_several_labels_at_once_get_sigmoids(folder):
    pipe = pipeline("image-classification", model=str(folder))
    photo = photos()[0]
    softmax = pipe(photo)
    pipe.model.config.problem_type = "multi_label_classification"
    logits = pipe(photo, function_to_apply="none")
    expected = {result["label"]: torch.tensor(result["score"]).sigmoid().item() for result in logits}
    assert as_dict(pipe(photo)) == pytest.approx(expected, abs=1e-6)
    assert as_dict(softmax) != pytest.approx(expected, abs=1e-3)


def test_half_precision(folder):
    pipe = pipeline("image-classification", model=str(folder), dtype=torch.bfloat16)
    full = pipeline("image-classification", model=str(folder), dtype=torch.float32)
    assert pipe.model.dtype == torch.bfloat16
    assert as_dict(pipe(photos()[1])) == pytest.approx(as_dict(full(photos()[1])), abs=0.05)


def test_the_pipeline_takes_model_and_processor_too(folder):
    processor = AutoImageProcessor.from_pretrained(folder)
    model = fratrie.FratrieEncoderForImageClassification.from_pretrained(folder)
    pipe = pipeline("image-classification", model=model, image_processor=processor)
    assert as_dict(pipe(photos()[3])) == pytest.approx(scores_of(model.eval(), photos()[3]), abs=1e-5)


def test_images_that_a_processor_leaves_at_another_size_are_named(folder):
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    pipe = pipeline("image-classification", model=str(folder), image_processor=processor)
    with pytest.raises(ValueError, match=r"Pixels of shape \(1, 3, 8, 8\) .*\(batch, 3, 16, 16\).*image processor"):
        pipe(photos()[0])
