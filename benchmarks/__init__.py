"""Side-by-side measurements; `python -m benchmarks.all` prints the table of speeds."""
