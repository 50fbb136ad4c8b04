"""The models: one configurable block, three siblings. A flat folder, since checkpoints can carry this code."""
