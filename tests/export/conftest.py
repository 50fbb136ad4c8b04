"""Makes the tiny models of the model tests importable, and keeps Hugging Face offline and quiet."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

import transformers

transformers.utils.logging.disable_progress_bar()
