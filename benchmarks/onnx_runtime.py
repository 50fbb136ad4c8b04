"""onnxruntime beside torch: seconds of a fine-tuned classifier and of a decoder with its cache, as ratios.

Run it on a quiet machine: `python benchmarks/onnx_runtime.py --model runs/demo/model`. Each line is the median over
alternating runs of torch's time divided by onnxruntime's, so that a drift of the machine's speed cancels out.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from transformers import HfArgumentParser

import fratrie
from fratrie.data.corpus import load_family_relations
from fratrie.onnx_export import export_onnx
from fratrie.training.classifiers import load_classifier


@dataclass
class Options:
    """What to run and how often."""

    model: str = field(metadata={"help": "Folder of a fine-tuned classifier of texts."})
    rounds: int = field(default=10, metadata={"help": "Measured rounds, after one to warm up."})
    layers: int = field(default=4, metadata={"help": "Layers of the decoder, which has random weights."})
    width: int = field(default=256, metadata={"help": "Hidden size of the decoder."})
    new_tokens: int = field(default=32, metadata={"help": "Tokens that the decoder writes."})


def main() -> None:
    """Export, check that the results agree, and time both by turns."""
    (options,) = HfArgumentParser(Options, description=__doc__).parse_args_into_dataclasses()
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    print(f"{threads} threads, float32, torch {torch.__version__}, onnxruntime {onnxruntime.__version__}")
    classify(options)
    write(options)


def classify(options: Options) -> None:
    """Batches of the test part, with padding."""
    model, tokenizer, _ = load_classifier(options.model)
    model.eval()
    session = open_session(model)
    texts = load_family_relations()["test"]["text"]
    for size in (1, 8, 32):
        batches = [tokenizer(texts[start : start + size], padding=True, return_tensors="pt")
                   for start in range(0, (options.rounds + 1) * size, size)]  # fmt: skip

        def torch_logits(batch: dict[str, torch.Tensor]) -> np.ndarray:
            with torch.no_grad():
                return model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.numpy()

        def onnx_logits(batch: dict[str, torch.Tensor]) -> np.ndarray:
            (logits,) = session.run(None, {name: batch[name].numpy() for name in ("input_ids", "attention_mask")})
            return logits

        difference = max(float(abs(torch_logits(batch) - onnx_logits(batch)).max()) for batch in batches)
        compare(f"classifier, batch {size:2}, logits differ by {difference:.0e}", torch_logits, onnx_logits, batches)


def write(options: Options) -> None:
    """Greedy continuations of random prompts of one length."""
    config = fratrie.FratrieDecoderConfig(
        vocab_size=8000, hidden_size=options.width, num_hidden_layers=options.layers, num_attention_heads=4,
        intermediate_size=4 * options.width, position_type="rotary", eos_token_id=None, pad_token_id=0)  # fmt: skip
    model = fratrie.FratrieDecoderForCausalLM(config).eval()
    session = open_session(model)

    def torch_text(prompt: torch.Tensor) -> list[list[int]]:
        mask = torch.ones_like(prompt)
        return model.generate(prompt, attention_mask=mask, max_new_tokens=options.new_tokens, do_sample=False).tolist()

    def onnx_text(prompt: torch.Tensor) -> list[list[int]]:
        return continue_text(session, prompt.numpy(), options.new_tokens).tolist()

    for size in (1, 8):
        prompts = [torch.randint(1, 8000, (size, 16)) for _ in range(options.rounds + 1)]
        same = sum(torch_text(prompt) == onnx_text(prompt) for prompt in prompts)
        compare(f"decoder, batch {size}, {same} of {len(prompts)} texts the same", torch_text, onnx_text, prompts)


def continue_text(session: onnxruntime.InferenceSession, text: np.ndarray, new_tokens: int) -> np.ndarray:
    """Greedy decoding with the cache handed from call to call."""
    past = {put.name: np.zeros((len(text), put.shape[1], 0, put.shape[3]), np.float32)
            for put in session.get_inputs() if put.name.startswith("past_key_values")}  # fmt: skip
    step = text
    for _ in range(new_tokens):
        logits, *present = session.run(None, {"input_ids": step, "attention_mask": np.ones_like(text), **past})
        past = dict(zip(past, present, strict=True))
        step = logits[:, -1:].argmax(-1)
        text = np.concatenate([text, step], axis=1)
    return text


def open_session(model: fratrie.FratriePreTrainedModel) -> onnxruntime.InferenceSession:
    """The model in onnxruntime, with as many threads as torch."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        export_onnx(model, Path(folder) / "model.onnx")
        return onnxruntime.InferenceSession(Path(folder) / "model.onnx", settings)


def compare(name: str, torch_run: Callable[[Any], Any], onnx_run: Callable[[Any], Any], inputs: list[Any]) -> None:
    """Print the median ratio of the two times over all inputs but the first."""
    times = [(clock(torch_run, given), clock(onnx_run, given)) for given in inputs][1:]
    ratio = statistics.median(torch_time / onnx_time for torch_time, onnx_time in times)
    milliseconds = statistics.median(onnx_time for _, onnx_time in times) * 1e3
    print(f"{name}: onnxruntime {ratio:.2f} times as fast ({milliseconds:.1f} ms)", flush=True)


def clock(run: Callable[[Any], Any], given: Any) -> float:
    """Seconds of a run."""
    start = time.perf_counter()
    run(given)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
