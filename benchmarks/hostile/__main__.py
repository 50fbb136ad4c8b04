"""Wrong, broken and odd inputs against every script and our own pipelines: how many end otherwise than they should.

A script has to end with exit code 0, or with 2 and `error: …`; never with a traceback, a crash or a hang, and no file
that lay there before may be lost. Inputs are drawn, by the seed, from products of contents and places: tables, values
of options, damaged model folders and checkpoints, inputs of pipelines. Each case runs in a fork of this process, in a
folder of its own, with `y` on its standard input.
Example: python benchmarks/hostile --cases 600; some again, with their output: --case predict/table/deep_array.json
"""

import argparse
import hashlib
import io
import os
import random
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

# What the scripts import is read here once, before the forks.
import accelerate  # noqa: F401
from cases import SCRIPTS, Case, all_cases, changed, make_sound
from sklearn import metrics  # noqa: F401

from fratrie.training import baselines, loop, model_card, pretraining  # noqa: F401

SECONDS = 60
MEMORY = 16 * 2**30


def _run_script(words: list[str] | Callable[[], None], folder: Path) -> str:
    """Run in a fork; how it ended: `""` if it ended as it should."""
    before = _contents(folder)
    child = os.fork()
    if child == 0:
        os._exit(_in_child(words, folder))
    status = _wait(child)
    output = (folder / "output").read_text(errors="replace")
    after = _contents(folder)
    if status is None:
        return "hang"
    if os.WIFSIGNALED(status):
        return f"crash by signal {os.WTERMSIG(status)}"
    code = os.waitstatus_to_exitcode(status)
    if "Traceback (most recent call last)" in output or code not in (0, 2):
        return f"traceback, exit code {code}"
    if (folder / "pwned").exists():
        return "code was run"
    if any(".incomplete-" in name for name in after):
        return "leftovers"
    lost = [name for name, digest in before.items() if after.get(name) != digest]
    if not code:  # a run that went on replaces its own
        lost = [name for name in lost if not name.startswith("model/")]
    return f"lost {', '.join(lost[:3])}" if lost else ""


def _contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "output")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _in_child(words: list[str] | Callable[[], None], folder: Path) -> int:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.chdir(folder)
    (folder / ".stdin").write_text("y\n" * 100)
    for number, path, mode in ((0, ".stdin", os.O_RDONLY), (1, "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
        os.dup2(os.open(path, mode, 0o644), number)
    os.dup2(1, 2)
    sys.stdin, sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(n, "w" if n else "r")) for n in range(3))
    (folder / ".stdin").unlink()
    code: Any = 0
    try:
        if callable(words):
            words()
        else:
            sys.argv = [words[0], *words[1:]]
            runpy.run_path(str(SCRIPTS / f"{words[0]}.py"), run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = 2 if isinstance(stop.code, str) else stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _wait(child: int) -> int | None:
    """The status of a child, `None` where it had to be killed."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def draw(cases: list[Case], number: int, seed: int) -> list[Case]:
    """So many cases, as many of each kind (script and place) as there are."""
    generator, kinds = random.Random(seed), {}
    for case in cases:
        kinds.setdefault("/".join(case.name.split("/")[:2]), []).append(case)
    for members in kinds.values():
        generator.shuffle(members)
    drawn: list[Case] = []
    while len(drawn) < min(number, len(cases)):
        drawn += [members.pop() for members in kinds.values() if members]
    return drawn[:number]


def main() -> None:
    """Draw, run and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=600, help="How many to draw.")
    parser.add_argument("--seed", type=int, default=0, help="Of the draw.")
    parser.add_argument("--case", help="Run those whose name holds this, and show their output.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        sound = Path(place) / "sound"
        sound.mkdir()
        make_sound(sound)
        fault = _run_script(changed("pretrain", sound, output_dir=str(sound / "run")), sound)
        assert not fault, (sound / "output").read_text()
        everything = list(all_cases(sound))
        if arguments.case:
            chosen = [case for case in everything if arguments.case in case.name]
        else:
            chosen = draw(everything, arguments.cases, arguments.seed)
        print(f"{len(chosen)} of {len(everything)} cases", flush=True)
        bad = 0
        counts: Counter[str] = Counter()
        for number, case in enumerate(chosen):
            folder = Path(place) / str(number)
            folder.mkdir()
            verdict = _run_script(case.build(folder), folder)
            counts[f"{'/'.join(case.name.split('/')[:2])}"] += 1
            if verdict or arguments.case:
                bad += bool(verdict)
                print(f"{verdict or 'well'}: {case.name}", flush=True)
                output = (folder / "output").read_text(errors="replace").splitlines()
                print("    " + "\n    ".join(output[-(200 if arguments.case else 6) :]), flush=True)
            shutil.rmtree(folder)
        print(", ".join(f"{kind} {count}" for kind, count in counts.items()))
        print(f"{len(chosen)} cases, {bad} ended otherwise than they should")
        sys.exit(bool(bad))


if __name__ == "__main__":
    main()
