"""setfit: labels of the family-relations task from a few sentences, several a sentence."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from setfit import SetFitModel, Trainer, TrainingArguments
from transformers import BertConfig, BertModel

from fratrie import FratrieEncoderConfig, FratrieEncoderModel
from fratrie.data import LABELS
from fratrie.data.corpus import load_family_relations

pytestmark = pytest.mark.ecosystem

FEW = ("m", "p", "s")
SHOTS = 8


@pytest.fixture(scope="module")
def sentences():
    """Texts about mother, father or siblings, at least eight of each, and which of the labels they have."""
    train = load_family_relations()["train"]
    numbers = [LABELS.index(label) for label in FEW]
    labels = np.array([[int(number in given) for number in numbers] for given in train["labels"]])
    chosen = sorted({row for column in labels.T for row in np.flatnonzero(column)[:SHOTS].tolist()})
    return train.select(chosen)["text"], labels[chosen]


def save_encoder(kind, tokenizer, fields, folder):
    model = BertModel(BertConfig(**fields)) if kind == "bert" else FratrieEncoderModel(FratrieEncoderConfig(**fields))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("encoder", "strategy"), [("ours", "one-vs-rest"), ("ours", "multi-output"), ("bert", "one-vs-rest")]
)
def test_a_few_sentences_teach_several_labels_at_once(
    encoder, strategy, sentences, encoder_tokenizer, config_fields, tmp_path
):
    texts, labels = sentences
    folder = save_encoder(encoder, encoder_tokenizer, config_fields(encoder_tokenizer), tmp_path / "encoder")
    model = SetFitModel.from_pretrained(folder, multi_target_strategy=strategy, labels=list(FEW))
    before = model.encode(list(texts))
    arguments = TrainingArguments(
        str(tmp_path / "run"), batch_size=8, max_steps=8, body_learning_rate=1e-3, report_to="none",
        show_progress_bar=False,
    )  # fmt: skip
    dataset = Dataset.from_dict({"text": list(texts), "label": labels.tolist()})
    Trainer(model=model, args=arguments, train_dataset=dataset).train()
    assert np.abs(model.encode(list(texts)) - before).max() > 1e-2
    given = model.predict(list(texts), as_numpy=True)
    constant = labels == labels.mean(0).round()
    assert (given == labels).mean() > constant.mean() + 0.05

    model.save_pretrained(str(tmp_path / "model"))
    again = SetFitModel.from_pretrained(str(tmp_path / "model"))
    assert type(again.model_body[0].model) is (BertModel if encoder == "bert" else FratrieEncoderModel)
    probabilities, expected = (torch.as_tensor(m.predict_proba(list(texts))) for m in (again, model))
    torch.testing.assert_close(probabilities, expected, atol=1e-5, rtol=1e-5)
