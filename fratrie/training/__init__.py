"""What the training scripts share: loop, checkpoints, corpora, collators, schedules, metrics, model cards."""
