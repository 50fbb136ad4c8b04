"""Our decoder beside Hugging Face's Llama with the same weights in lm-eval: tokens a second of log-likelihoods.

Run it with `python benchmarks/lm_eval_speed.py` (it needs the extra `ecosystem`). The two models take turns on the
same requests, so that a drift of the machine's speed cancels out of the ratio.
"""

import statistics
import time
from dataclasses import dataclass, field

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from fratrie.conversion import from_hf
from fratrie.data.corpus import load_family_relations
from fratrie.tokenization import train_byte_level_bpe


@dataclass
class Options:
    """Size of the models and of the measurement."""

    layers: int = field(default=6, metadata={"help": "Layers."})
    width: int = field(default=256, metadata={"help": "Hidden size."})
    requests: int = field(default=64, metadata={"help": "Sentences, each with its second half as the continuation."})
    batch: int = field(default=16, metadata={"help": "Requests a batch."})
    rounds: int = field(default=10, metadata={"help": "Measured rounds."})


def main() -> None:
    """Build both models with the same weights, check that they agree, and time them by turns."""
    (options,) = HfArgumentParser(Options, description=__doc__).parse_args_into_dataclasses()
    torch.manual_seed(0)
    texts = list(load_family_relations()["train"]["text"])
    tokenizer = train_byte_level_bpe(texts, vocab_size=2000, sibling="decoder", show_progress=False)
    sizes = {"hidden_size": options.width, "num_hidden_layers": options.layers, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 3 * options.width}  # fmt: skip
    llama = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=512))
    theirs, ours = (evaluator(model, tokenizer, options) for model in (llama, from_hf(llama)))
    requests, tokens = build_requests(texts[: options.requests], tokenizer)
    answers, our_answers = (model.loglikelihood(requests, disable_tqdm=True) for model in (theirs, ours))
    difference = max(abs(a[0] - b[0]) for a, b in zip(answers, our_answers, strict=True))
    print(f"largest difference of a log-likelihood {difference:.1e}; {tokens} tokens a round")
    print(f"{torch.get_num_threads()} threads, {options.layers} layers of {options.width}, batch {options.batch}")
    times = []
    for number in range(options.rounds):
        turn = [(0, theirs), (1, ours)]
        clocked = {place: clock(model, requests) for place, model in (turn if number % 2 else turn[::-1])}
        times.append((clocked[0], clocked[1]))
    their_speed, our_speed = (tokens / statistics.median(column) for column in zip(*times, strict=True))
    ratios = sorted(their / our for their, our in times)
    print(f"tokens a second: {their_speed:.0f} Llama, {our_speed:.0f} ours")
    print(f"ours / Llama: median {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}")


def evaluator(model: PreTrainedModel, tokenizer: object, options: Options) -> HFLM:
    """A model as lm-eval takes it."""
    return HFLM(pretrained=model.eval(), tokenizer=tokenizer, batch_size=options.batch)


def build_requests(texts: list[str], tokenizer: object) -> tuple[list[Instance], int]:
    """Log-likelihood requests for the second half of each text, and the tokens that the models read."""
    requests, tokens = [], 0
    for number, text in enumerate(texts):
        words = text.split(" ")
        half = max(len(words) // 2, 1)
        context, continuation = " ".join(words[:half]), " " + " ".join(words[half:] or ["oui"])
        requests.append(Instance("loglikelihood", {}, (context, continuation), number))
        tokens += len(tokenizer(context + continuation)["input_ids"]) - 1  # type: ignore[operator]
    return requests, tokens


def clock(model: HFLM, requests: list[Instance]) -> float:
    """Seconds that a model takes for all requests."""
    start = time.perf_counter()
    model.loglikelihood(requests, disable_tqdm=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
