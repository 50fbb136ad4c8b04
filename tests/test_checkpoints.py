import json
import os

import pytest
import torch
from safetensors.torch import save_file

from fratrie.checkpoints import check_checkpoint_files, check_counts, check_kinds, check_weights, read_json

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def shards(tmp_path):
    """A folder with weights in two files and their index."""
    save_file({"a": torch.zeros(3)}, tmp_path / A)
    save_file({"b": torch.zeros(2), "c": torch.ones(1)}, tmp_path / B)
    write_index(tmp_path, {"a": A, "b": B, "c": B})
    return tmp_path


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_sound_weights_pass(shards):
    check_weights(shards)
    (shards / A).rename(shards / "blob")
    (shards / A).symlink_to("blob")  # as the cache of the hub has it
    check_weights(shards)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "weight_map must name the file of each weight"),
        ([], "weight_map must name the file of each weight"),
        (None, "weight_map must name the file of each weight"),
        ({"a": 3}, "weight_map must name the file of each weight"),
        ({"a": "pytorch_model.bin"}, "names 'pytorch_model.bin'"),
        ({"a": "../model.safetensors"}, "read from .safetensors files in the folder itself"),
        ({"a": "/etc/model.safetensors"}, "read from .safetensors files in the folder itself"),
        ({"a": "model-00003-of-00003.safetensors"}, "it lacks model-00003-of-00003.safetensors"),
        ({"a": A, "z": A}, "00002.safetensors lacks the weight z"),
    ],
)
def test_an_index_that_cannot_be_is_named(shards, weight_map, message):
    write_index(shards, weight_map)
    with pytest.raises(ValueError, match=message):
        check_weights(shards)


@pytest.mark.parametrize("content", [b"", b"no weights", b"\xff" * 20, b"\x80\x04\x95cposix\nsystem\n.", None])
def test_damaged_weights_are_named(shards, content):
    """Of no length, of another format, pickled, and cut in its midst."""
    whole = (shards / B).read_bytes()
    (shards / B).write_bytes(whole[:-4] if content is None else content)
    with pytest.raises(ValueError, match=f"{B} is damaged"):
        check_weights(shards)
    (shards / B).rename(shards / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        check_weights(shards)


@pytest.mark.parametrize("kind", ["pipe", "loop", "dangling"])
def test_what_is_no_file_is_named_and_not_opened(tmp_path, kind):
    path = tmp_path / "generation_config.json"
    {"pipe": os.mkfifo, "loop": lambda p: p.symlink_to(p.name), "dangling": lambda p: p.symlink_to("x")}[kind](path)
    message = {"pipe": "is a pipe or a device", "loop": "symbolic links", "dangling": "is a link that leads nowhere"}
    with pytest.raises(OSError, match=rf"generation_config\.json:? .*{message[kind]}"):
        check_kinds(tmp_path)


def test_an_adapter_is_not_followed_to_its_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    with pytest.raises(ValueError, match="holds an adapter, whose model lies elsewhere"):
        check_checkpoint_files(tmp_path)


def test_numbers_beyond_reason_are_found_in_nested_configs():
    check_counts("x", {"hidden_size": 10**6, "encoder": {"num_hidden_layers": 10_000}, "layer_norm_eps": 1e-5})
    with pytest.raises(ValueError, match=r"x: num_decoder_layers=10001 is more than 10000"):
        check_counts("x", {"decoder": {"num_decoder_layers": 10_001}})


def test_json_that_is_no_object_is_named(tmp_path):
    path = tmp_path / "a.json"
    for content, message in (("[1]", "must hold a JSON object, not a list"), ("{", "is no JSON file"), ("{}", "")):
        path.write_text(content)
        if not message:
            assert read_json(path) == {}
            continue
        with pytest.raises(ValueError, match=rf"a\.json {message}"):
            read_json(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match=r"a\.json is a pipe"):
        read_json(path)
