"""What a step of training has the host read from an accelerator, and when: before the blocks, and nothing after.

The meta device stands for an accelerator, since reading a number from it raises. The reads that are allowed are
replaced, and noted: how the documents lie, the number of targets, and Hugging Face's look for padding in a group.
"""

import pytest
import torch
from combinations import DECODER, ENCODER, SIZES, pad
from transformers import masking_utils

import fratrie
from fratrie.modeling import decoder, encoder, layout
from fratrie.training.schedules import build_optimizer

PADDED = pad([torch.arange(3, 10), torch.arange(3, 8), torch.arange(3, 9)], "right")[1]
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 3)
LABELS = {"one": (3,), "several": (3, 5), "tokens": (3, 7)}


@pytest.fixture
def noted(monkeypatch):
    """The reads in their order."""
    notes, find_groups = [], layout.find_groups

    def groups_of_meta(shape, padding, position_ids, *_):
        notes.append("documents")
        found = find_groups(shape, None if padding is None else PADDED, None if position_ids is None else PACKED)
        return found.to(torch.device("meta"))

    def ignore(*_args, **_kwargs):
        notes.append("padding of a group")
        return False

    def rows_of_meta(labels):
        notes.append("targets")
        return torch.arange(4, device=labels.device)

    monkeypatch.setattr(layout, "find_groups", groups_of_meta)
    monkeypatch.setattr(decoder, "find_groups", groups_of_meta)
    monkeypatch.setattr(encoder, "target_rows", rows_of_meta)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # which meta has not
    monkeypatch.setattr(masking_utils, "_ignore_bidirectional_mask_sdpa", ignore)
    return notes


@pytest.mark.parametrize(
    ("sibling", "head", "labels", "fields", "reads"),
    [
        (ENCODER, "MaskedLM", "tokens", {"sparse_prediction": True}, {"documents", "targets", "padding of a group"}),
        (ENCODER, "SequenceClassification", "one", {}, {"documents", "padding of a group"}),
        (ENCODER, "SequenceClassification", "several", {}, {"documents", "padding of a group"}),
        (ENCODER, "TokenClassification", "tokens", {}, {"documents", "padding of a group"}),
        (DECODER, "CausalLM", "tokens", {"chunked_loss": True}, {"documents"}),
        (DECODER, "CausalLM", "tokens", {"mixer_types": ["linear"] * 2}, {"documents"}),
        (DECODER, "CausalLM", "tokens", {"packed": True}, {"documents"}),
    ],
)
def test_a_step_of_training_reads_nothing_once_its_blocks_have_begun(sibling, head, labels, fields, reads, noted):
    packed = fields.pop("packed", False)
    fields = {**SIZES, "position_type": "learned", "num_labels": 5, **fields}
    config = getattr(fratrie, f"Fratrie{sibling.title()}Config")(**fields)
    with torch.device("meta"):
        model = getattr(fratrie, f"Fratrie{sibling.title()}For{head}")(config).train()
        inputs = {"input_ids": torch.ones(3, 7, dtype=torch.long)}
        inputs["labels"] = torch.ones(LABELS[labels], dtype=torch.float if labels == "several" else torch.long)
    inputs |= {"position_ids": PACKED.to("meta")} if packed else {"attention_mask": PADDED.to("meta")}
    model.model.layers[0].register_forward_pre_hook(lambda *_: noted.append("blocks"))
    optimizer = build_optimizer(model, 1e-3, 0.1)
    model(**inputs).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert noted[-1] == "blocks" and set(noted[:-1]) == reads


def test_positions_are_read_only_where_some_may_lie_beyond_the_table(monkeypatch):
    model = fratrie.FratrieEncoderModel(fratrie.FratrieEncoderConfig(**SIZES, position_type="learned"))
    read = []
    largest = torch.Tensor.max
    monkeypatch.setattr(torch.Tensor, "max", lambda self, *args: read.append(1) or largest(self, *args))
    for mask in (None, torch.ones(1, 40, dtype=torch.long)):
        model(torch.ones(1, 40, dtype=torch.long), attention_mask=mask)
        assert not read
    with pytest.raises(ValueError, match="41 tokens is longer"):
        model(torch.ones(1, 41, dtype=torch.long))
    assert read


def test_labels_of_other_values_are_refused_on_a_cpu_and_make_the_loss_nan_elsewhere(monkeypatch):
    config = fratrie.FratrieEncoderConfig(**SIZES, num_labels=2, problem_type="multi_label_classification")
    model = fratrie.FratrieEncoderForSequenceClassification(config)
    inputs = {"input_ids": torch.ones(1, 3, dtype=torch.long), "labels": torch.tensor([[0.0, 2.0]])}
    with pytest.raises(ValueError, match="between 0 and 1"):
        model(**inputs)
    monkeypatch.setattr("fratrie.modeling.losses._any", lambda mistakes: False)
    assert model(**inputs).loss.isnan()
    assert model(inputs["input_ids"], labels=torch.tensor([[0.0, 1.0]])).loss.isfinite()
