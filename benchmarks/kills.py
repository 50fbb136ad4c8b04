"""Kill training runs by SIGKILL at random moments, go on until they end, and compare with runs that nobody killed.

Checked after each run: the weights are equal to the bit, the folder holds the same files, and nobody holds its lock.
With a checkpoint a step most kills fall into saving, deleting and the writing of the final model.

python benchmarks/kills.py --kills 50
"""

import argparse
import collections
import multiprocessing
import os
import random
import runpy
import sys
import tempfile
import time
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

from fratrie import files
from fratrie.tokenization import train_byte_level_bpe

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "fratrie" / "data" / "family_relations" / "train.txt"
SIZES = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64,hidden_dropout=0.1"
COMMON = ["--config_overrides", SIZES, "--disable_progress", "true", "--report_to", "none", "--max_steps", "30"]
COMMON += ["--save_steps", "1", "--save_total_limit", "2", "--eval_strategy", "steps", "--eval_steps", "10"]
PRETRAIN = ["pretrain.py", "--block_size", "32", "--per_device_train_batch_size", "4"]
RUNS = {
    "masked words": [*PRETRAIN, "--objective", "mlm"],
    "next words, a worker": [*PRETRAIN, "--objective", "clm", "--dataloader_num_workers", "1"],
    "next words, a stream": [*PRETRAIN, "--objective", "clm", "--streaming"],
    "a classifier": ["finetune.py", "--model_type", "encoder", "--per_device_train_batch_size", "4"],
}


def work(arguments: list[str], log: str) -> None:
    """Run a script in this process, which was forked from one that has the imports."""
    sys.stdout = sys.stderr = open(log, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
    multiprocessing.set_start_method("fork", force=True)  # of the loader's workers, as in a script
    script, *sys.argv[1:] = arguments
    sys.argv[0] = str(ROOT / "scripts" / script)
    runpy.run_path(sys.argv[0], run_name="__main__")


class Killer:
    """Starts runs, kills them, and counts what it sees."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random, self.counts = folder, random.Random(seed), collections.Counter[str]()
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["fratrie.training.loop", "fratrie.training.labelled_data", "fratrie"])

    def run(self, name: str, out: Path, seconds: float | None = None) -> bool:
        """Run `name` into `out`, going on where it has checkpoints; killed after `seconds`, False."""
        resume = ["--resume_from_checkpoint", "last"] if any(out.glob("checkpoint-*")) else []
        data = {"pretrain.py": ["--files", self.folder / "texts.txt"], "finetune.py": ["--train_file", CORPUS]}
        given = ["--tokenizer", self.folder / "tokenizer", *data[RUNS[name][0]], "--output_dir", out, *COMMON]
        log = self.folder / "log.txt"
        process = self.context.Process(target=work, args=([*RUNS[name], *map(str, [*given, *resume])], str(log)))
        process.start()
        process.join(seconds)
        killed = process.is_alive()
        process.kill()
        process.join()
        if not killed and process.exitcode:
            raise SystemExit(f"{name}: exit code {process.exitcode}\n{log.read_text(encoding='utf-8')}")
        return not killed

    def measure(self, name: str, out: Path) -> tuple[float, float]:
        """Seconds until a run has taken its first step, and until its end."""
        started = time.time()
        self.run(name, out)
        return (out / "run_config.json").stat().st_mtime - started, time.time() - started

    def kill_until_done(self, name: str, reference: Path, moments: tuple[float, float], kills: int) -> None:
        """Kill one run again and again, at the start or while it trains, then let it end and compare it."""
        first, last = moments
        out = reference.with_name(f"{reference.name}-{self.counts['runs']}")
        for _ in range(kills):
            if self.run(name, out, self.random.uniform(0.9 * first, (first + last) / 2)):
                break
            self.counts["kills"] += 1
            self.counts["kills that left something half-made"] += any(out.glob(".*"))
            self.counts["kills in the final model"] += (out / "model.safetensors").exists()
        else:
            self.run(name, out)
        self.counts["runs"] += 1
        self.compare(reference, out)

    def compare(self, reference: Path, out: Path) -> None:
        """Count what differs from the run that nobody killed."""
        weights = [(folder / "model.safetensors").read_bytes() for folder in (reference, out)]
        self.counts["runs with other weights"] += weights[0] != weights[1]
        listed = [
            {str(path.relative_to(folder)) for path in folder.rglob("*") if "logs" not in path.parts}
            for folder in (reference, out)
        ]
        if listed[0] != listed[1]:
            print(f"{out}: {sorted(listed[0] ^ listed[1])} is in one folder alone", flush=True)
        self.counts["runs with other files"] += listed[0] != listed[1]
        try:
            with files.held(out):
                pass
        except BlockingIOError:
            self.counts["folders that stayed locked"] += 1


def main() -> None:
    """Kill all kinds of runs in turn until there were enough kills, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="Kills at least.")
    parser.add_argument("--kills_a_run", type=int, default=7, help="Kills of one run at most.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the moments.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, killer = Path(name), Killer(Path(name), arguments.seed)
        texts = [line.partition(" ")[2] for line in CORPUS.read_text(encoding="utf-8").splitlines()[:200]]
        files.write_text(folder / "texts.txt", "\n".join(texts) + "\n")
        train_byte_level_bpe(texts, vocab_size=400, show_progress=False).save_pretrained(folder / "tokenizer")
        killer.run("masked words", folder / "warm-up")  # waits for the imports
        references: dict[str, tuple[Path, tuple[float, float]]] = {}
        while killer.counts["kills"] < arguments.kills:
            for number, kind in enumerate(RUNS):
                left = arguments.kills - killer.counts["kills"]
                if left <= 0:
                    break
                if kind not in references:
                    out = folder / f"run-{number}"
                    references[kind] = out, killer.measure(kind, out)
                    print(f"{kind}: first step, end after {references[kind][1]} seconds", flush=True)
                killer.kill_until_done(kind, *references[kind], min(left, arguments.kills_a_run))
                print(f"{kind}: {dict(killer.counts)}", flush=True)
    wrong = ("runs with other weights", "runs with other files", "folders that stayed locked")
    raise SystemExit(int(any(killer.counts[name] for name in wrong)))


if __name__ == "__main__":
    main()
