"""`push_to_hub` by construction: what it uploads, written into a local folder, loads like any checkpoint."""

import io
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from combinations import HEADS, SIBLINGS, case_of, padded_inputs
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.utils import hub

from fratrie.tokenization import train_byte_level_bpe


class FolderHub:
    """The calls of the Hub's client that an upload makes, on a folder."""

    def __init__(self, folder):
        self.folder = folder

    def create_repo(self, repo_id, **_):
        return SimpleNamespace(repo_id=repo_id)

    def create_commit(self, repo_id, operations, **_):
        for operation in operations:
            path = self.folder / repo_id / operation.path_in_repo
            path.parent.mkdir(parents=True, exist_ok=True)
            source = operation.path_or_fileobj
            if isinstance(source, (str, Path)):
                shutil.copyfile(source, path)
            else:
                path.write_bytes(source.read() if isinstance(source, io.IOBase) else source)


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    def no_card(name, **_):
        raise EntryNotFoundError(name)

    monkeypatch.setattr(hub, "hf_api", lambda: FolderHub(tmp_path))
    monkeypatch.setattr(ModelCard, "load", no_card)
    return tmp_path


@pytest.mark.parametrize(("sibling", "head"), [(s, head) for s in SIBLINGS for head in HEADS[s]])
@torch.no_grad()
def test_a_pushed_model_loads_from_its_repository(sibling, head, local_hub):
    model = case_of(sibling).build(head)
    model.push_to_hub("me/mine")
    folder = local_hub / "me/mine"
    expected = {"README.md", "config.json", "model.safetensors"}
    expected |= {"generation_config.json"} if model.can_generate() else set()
    assert {path.name for path in folder.iterdir()} == expected
    _, auto = HEADS[sibling][head]
    loaded: PreTrainedModel = auto.from_pretrained(folder)
    assert type(loaded) is type(model)
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in model.state_dict().items())
    inputs = padded_inputs(sibling)
    torch.testing.assert_close(loaded(**inputs)[0], model(**inputs)[0], atol=1e-6, rtol=1e-6)


def test_configuration_and_tokenizer_are_pushed_alone(local_hub):
    config = case_of("decoder").config()
    config.push_to_hub("me/config")
    loaded = AutoConfig.from_pretrained(local_hub / "me/config")
    assert loaded.to_diff_dict() == config.to_diff_dict() and type(loaded) is type(config)
    tokenizer = train_byte_level_bpe(["ma mère", "mon père"], vocab_size=270, show_progress=False)
    tokenizer.push_to_hub("me/tokenizer")
    reloaded = AutoTokenizer.from_pretrained(local_hub / "me/tokenizer")
    assert reloaded("ma mère et moi").input_ids == tokenizer("ma mère et moi").input_ids
