"""`fratrie train-tokenizer` as a file, which `accelerate launch` takes."""

from fratrie.cli.running import run
from fratrie.cli.train_tokenizer import main

if __name__ == "__main__":
    run(main)
