from fratrie.cli import compare_mixers
from fratrie.training.comparison import Trained


def test_table_and_plot(tmp_path, monkeypatch, capsys):
    results = [
        Trained("softmax", 1234, 2.5, 1000.4, 3 * 2**20, 2**11, [(10, 3.0), (20, 2.6)]),
        Trained("gru", 2345, 2.25, 500.0, 2**20, 2**10, [(10, 2.9), (20, 2.3)]),
    ]
    monkeypatch.setattr(compare_mixers, "_train_each", lambda options: iter(results))
    monkeypatch.setattr("sys.argv", ["fratrie compare-mixers", "--output_dir", str(tmp_path)])
    compare_mixers.main()
    table = (tmp_path / "mixers.md").read_text(encoding="utf-8")
    assert table.splitlines()[0].endswith("| cache of 256 tokens |")
    assert table.splitlines()[3] == "| `gru` | 2,345 | 2.250 | 500 | 1 MiB | 1 KiB |"
    assert table.strip() in capsys.readouterr().out
    assert (tmp_path / "mixers.png").read_bytes().startswith(b"\x89PNG")
