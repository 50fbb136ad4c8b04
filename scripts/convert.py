"""`fratrie convert` as a file, which `accelerate launch` takes."""

from fratrie.cli.convert import main
from fratrie.cli.running import run

if __name__ == "__main__":
    run(main)
