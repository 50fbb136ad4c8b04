import os
import signal
import sys
import threading

import pytest

from fratrie.cli import demo
from fratrie.training.stopping import Stopped, stopping_at_once

SAVING = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), open("saved", "w").close(), exit(143)))
open("ready", "w").close()
time.sleep(60)
"""


def test_a_step_that_is_stopped_saves_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    slow = tmp_path / "slow.py"
    slow.write_text(SAVING)
    monkeypatch.setattr(demo, "PROGRAM", (sys.executable, str(slow)))

    def stop_when_ready():
        while not (tmp_path / "ready").exists():
            threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_ready, daemon=True).start()
    with pytest.raises(Stopped, match="SIGTERM"), stopping_at_once():
        demo.command("slow")
    assert (tmp_path / "saved").exists()
