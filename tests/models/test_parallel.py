"""Parallel plans: they name what a configuration builds, and two processes that split a model give what one gives."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from combinations import DECODER, ENCODER, HEADS, SEQ2SEQ, SIBLINGS, Case, case_of, cases
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

KINDS = ("tp", "ep", "pp", "fsdp")
TP, EP, FSDP, PP = {"tp_size": 2}, {"tp_size": 2, "ep_size": 2}, {"fsdp_size": 2}, {"pp_size": 2}
EP_FSDP = {"fsdp_size": 2, "ep_size": 2}


def plans_of(model: Any) -> dict[str, dict[str, Any]]:
    return {kind: getattr(model, f"{kind}_plan") for kind in KINDS}


def without_numbers(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_plans_name_what_the_configuration_builds(case: Case):
    heads = HEADS[case.sibling] if case.name == "default" else {"base": HEADS[case.sibling]["base"]}
    for head, (model_class, _) in heads.items():
        with torch.device("meta"):
            model = model_class(case.config())
        parameters = {without_numbers(name) for name, _ in model.named_parameters()}
        modules = {without_numbers(name) for name, _ in model.named_modules()}
        for kind, plan in plans_of(model).items():
            assert plan.keys() <= parameters | modules, (head, kind)
        assert {*model.tp_plan.values(), *model.ep_plan.values()} <= {*ALL_PARALLEL_STYLES}
        for experts in {name for name in parameters if ".experts." in name}:
            assert experts in model.tp_plan and experts in model.ep_plan
        projections = {name.rpartition(".")[0] for name in parameters if ".layers." in name and "_proj." in name}
        whole = {name for name in projections if name.endswith("q_down_proj")}  # it leads into a latent
        assert projections - model.tp_plan.keys() == whole
        tied = model.all_tied_weights_keys
        split = {name.rpartition(".")[0] in model.tp_plan for name in (*tied.keys(), *tied.values())}
        assert len(split) <= 1, "tied weights are split together or not at all"


@pytest.mark.parametrize("case", cases(names=("default", "mixtral", "latent")), ids=str)
def test_plans_stay_out_of_the_file_and_follow_the_fields(case: Case):
    config = case.config()
    assert "base_model_" not in config.to_json_string(use_diff=False)
    for kind in KINDS:
        assert getattr(type(config)(**config.to_dict()), f"base_model_{kind}_plan") == getattr(
            config, f"base_model_{kind}_plan"
        )


# What is split how, and whether the checkpoint is written again.
SPLITS: dict[str, tuple[str, list[dict[str, int]], bool]] = {
    "llama": (DECODER, [TP, FSDP, PP], True),
    "mixtral": (DECODER, [TP, EP, EP_FSDP, PP], True),
    "default": (DECODER, [TP, FSDP, PP], True),
    "t5": (DECODER, [TP, PP], False),
    "sliding_alibi": (DECODER, [TP], False),
    "sliding_full": (DECODER, [PP], False),
    "all_mixers": (DECODER, [TP, PP], False),
    "latent": (DECODER, [TP], False),
    "recurrent": (DECODER, [TP], False),
    "hybrid": (DECODER, [TP, PP], False),
    "windows": (SEQ2SEQ, [TP], False),
    "compressed_to_states": (SEQ2SEQ, [TP], False),
    "shared_experts": (DECODER, [TP, EP], False),
    "deepseek_router": (DECODER, [EP], False),
    "query_key_layer_norm": (ENCODER, [TP], False),
    "rotary_by_layer_type": (ENCODER, [FSDP], False),
    "padding_kept": (ENCODER, [TP], True),
    "separate_untied": (SEQ2SEQ, [TP, FSDP], True),
    "unequal_stacks": (SEQ2SEQ, [TP, FSDP], False),
    "linear_to_sliding": (SEQ2SEQ, [TP, EP], False),
    "biases_off": (SEQ2SEQ, [FSDP], False),
}
# What no process can run: the message that says so.
REFUSED: dict[str, tuple[Case, dict[str, int], str]] = {
    "heads": (case_of(DECODER, "multi_query"), TP, r"tp_size=2 does not divide num_key_value_heads=1"),
    "experts": (case_of(DECODER, "odd_experts_linear"), EP, r"3 experts across 2"),
    "encoder": (case_of(ENCODER), PP, r"pp_size=2: .* not FratrieEncoderForMaskedLM"),
    "seq2seq": (case_of(SEQ2SEQ), PP, r"pp_size=2: .* not FratrieSeq2SeqForConditionalGeneration"),
}
SMALL = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
HUGGING_FACES = {
    "llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**SMALL, hidden_size=32, intermediate_size=48),
        PP,
    ),
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig(**SMALL, hidden_size=32, intermediate_size=48), PP),
    "t5": (
        transformers.T5ForConditionalGeneration,
        transformers.T5Config(vocab_size=64, num_layers=2, num_heads=4, d_model=32, d_kv=8, d_ff=48),
        FSDP,
    ),
}


def name_of(case: Case, sizes: dict[str, int]) -> str:
    return "-".join([str(case), *sizes])


SPLIT_CASES = [
    (case_of(sibling, name), sizes, save) for name, (sibling, ways, save) in SPLITS.items() for sizes in ways
]


def dtype_of(sizes: dict[str, int]) -> str:
    """Float64, where no tolerance has to allow for rounding, but for what FSDP divides wrongly.

    A group of experts that one process holds is divided by the number of processes in float64, and not in float32.
    """
    return "float32" if sizes == EP_FSDP else "float64"


def start(cases_file: Path) -> list[dict[str, Any]]:
    """Run the cases in two processes that speak with each other, and return what each of them found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).with_name("parallel_run.py")), str(cases_file)]
    processes = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(outputs)[-3000:]
    return [json.loads(cases_file.with_name(f"results{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes found about all splits, in one start."""
    folder, todo = tmp_path_factory.mktemp("parallel"), {}
    for name, (model_class, config, sizes) in HUGGING_FACES.items():
        path = folder / f"hf-{name}"
        model_class(config).save_pretrained(path)
        name = f"transformers.{model_class.__name__}"
        todo[path.name] = {"path": str(path), "model": name, "sizes": sizes, "dtype": "float32"}
    refused = [(case, sizes, False) for case, sizes, _ in REFUSED.values()]
    for case, sizes, save in (*SPLIT_CASES, *refused):
        name, path = name_of(case, sizes), folder / name_of(case, sizes)
        model = case.build()
        model.save_pretrained(path)
        todo[name] = {"path": str(path), "model": f"fratrie.{type(model).__name__}", "sizes": sizes, "save": save}
        todo[name]["dtype"] = dtype_of(sizes)
    (folder / "cases.json").write_text(json.dumps(todo))
    return start(folder / "cases.json")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "sizes", "save"), SPLIT_CASES, ids=[name_of(case, sizes) for case, sizes, _ in SPLIT_CASES]
)
def test_two_processes_give_what_one_gives(case: Case, sizes: dict[str, int], save: bool, found):
    rounding = 1e-12 if dtype_of(sizes) == "float64" else 1e-5
    for result in (results[name_of(case, sizes)] for results in found):
        assert "error" not in result, result["error"]
        assert result["forward"] < rounding
        assert result["held"] < 0.95, "the weights are split"
        if case.sibling != ENCODER:
            same_texts, scores = result["generation"]
            assert same_texts and scores < rounding
        if sizes != PP:
            assert result["loss"] < rounding
            assert result["gradient"][0] < rounding, result["gradient"]
            if save:
                assert result["saving"] == {"lacks": [], "changed": [], "beyond": []}


@pytest.mark.distributed
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused_by_name(name: str, found):
    case, sizes, message = REFUSED[name]
    for results in found:
        error = results[name_of(case, sizes)]["error"]
        assert error.startswith("ValueError") and re.search(message, error), error


@pytest.mark.distributed
def test_what_hugging_faces_own_classes_cannot_do_on_this_version(found):
    """A pipeline of Llama loses the padding, BERT has none, a sharded T5 cannot generate; ours differ from these."""
    llama, bert, t5 = (found[0][f"hf-{name}"] for name in HUGGING_FACES)
    assert llama["generation"][1] > 1e-3
    assert bert["error"] == "AttributeError: 'BertModel' object has no attribute 'layers'"
    assert t5["error"].startswith("RuntimeError") and "DTensor" in t5["error"]


@pytest.mark.parametrize("sibling", SIBLINGS)
def test_one_process_needs_no_plan(sibling: str, tmp_path: Path):
    model = case_of(sibling).build()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, distributed_config={"tp_size": 1})
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
