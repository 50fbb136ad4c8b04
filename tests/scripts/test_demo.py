import os
import runpy
import signal
import threading
from pathlib import Path

import pytest

from fratrie.training.stopping import Stopped, stopping_at_once

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo.py"
SAVING = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), open("saved", "w").close(), exit(143)))
open("ready", "w").close()
time.sleep(60)
"""


def test_a_step_that_is_stopped_saves_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "slow.py").write_text(SAVING)

    def stop_when_ready():
        while not (tmp_path / "ready").exists():
            threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_ready, daemon=True).start()
    with pytest.raises(Stopped, match="SIGTERM"), stopping_at_once():
        runpy.run_path(str(SCRIPT), run_name="demo")["script"]("slow")
    assert (tmp_path / "saved").exists()
