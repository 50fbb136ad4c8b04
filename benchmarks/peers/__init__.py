"""Other tools that label sentences, each in its own virtual environment, beside ours: `python -m benchmarks.peers`."""
