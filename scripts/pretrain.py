"""`fratrie pretrain` as a file, which `accelerate launch` takes."""

from fratrie.cli.pretrain import main
from fratrie.cli.running import run

if __name__ == "__main__":
    run(main)
