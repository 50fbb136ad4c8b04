"""Reads exported checkpoints in a process that cannot import fratrie: `python without_fratrie.py plan.json`.

The plan is a list of calls `[function, arguments]`; what they return is written beside it, as JSON and safetensors.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, pipeline

sys.modules["fratrie"] = None
torch.set_num_threads(1)


def load(folder, auto="AutoModel", **kwargs):
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, **kwargs)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    return model


def outputs(folder, auto, inputs, generate=False):
    """Weights and outputs of a model, its class, and whether a fresh copy of its own saving gives the same."""
    model, inputs = load(folder, auto).eval(), load_file(inputs)
    assert transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True).auto_map == model.config.auto_map
    with torch.no_grad():
        result = model(**inputs)
        # Of one copy of the code: what a mixer makes is recognised by the masks and caches.
        own = {type(part).__module__.rpartition(".")[0] for part in model.modules()}
        assert len({package for package in own if package.startswith("transformers_modules")}) == 1, own
        tensors = {"output": result[0].clone()}
        if generate:
            prompts = {name: value for name, value in inputs.items() if not name.startswith("decoder")}
            options = {"max_new_tokens": 5, "do_sample": False}
            tensors["generated"] = model.generate(**prompts, **options).clone()
        again = f"{folder}-again"
        model.save_pretrained(again)
        tensors["again"] = load(again, auto).eval()(**inputs)[0].clone()
    tensors |= {f"weight.{name}": weight.clone() for name, weight in model.state_dict().items()}
    return type(model).__name__, tensors


def heads(folder, autos):
    """The classes that other Auto classes load from a checkpoint."""
    return {auto: type(load(folder, auto)).__name__ for auto in autos}, {}


def tokens(folder, text):
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)(text)["input_ids"], {}


def serve(folder, task, text, **kwargs):
    pipe = pipeline(task, model=folder, trust_remote_code=True, device="cpu")
    assert type(pipe.model).__module__.startswith("transformers_modules."), type(pipe.model)
    return pipe(text, **kwargs), {}


def serve_saved_again(folder, auto, task, text):
    """What the pipeline says of a model that was loaded and saved here."""
    again = f"{folder}-served"
    load(folder, auto).save_pretrained(again)
    AutoTokenizer.from_pretrained(folder, trust_remote_code=True).save_pretrained(again)
    return serve(again, task, text)


def main():
    plan = Path(sys.argv[1])
    said, tensors = [], {}
    for index, (function, arguments) in enumerate(json.loads(plan.read_text())):
        answer, values = globals()[function](**arguments)
        said.append(answer)
        tensors |= {f"{index}.{name}": value.contiguous() for name, value in values.items()}
    plan.with_suffix(".said.json").write_text(json.dumps(said, default=float))
    save_file(tensors, plan.with_suffix(".safetensors"))


if __name__ == "__main__":
    main()
