"""`fratrie compare-mixers` as a file, which `accelerate launch` takes."""

from fratrie.cli.compare_mixers import main
from fratrie.cli.running import run

if __name__ == "__main__":
    run(main)
