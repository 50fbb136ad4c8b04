import pytest

from fratrie.training.cli import run


@pytest.mark.parametrize("error", [ValueError("say what"), FileNotFoundError("no file x.txt")])
def test_user_errors_end_with_one_line(capsys, error):
    def main():
        raise error

    with pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {error}\n"


def test_own_mistakes_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 // 0)


def test_nothing_said_on_success(capsys):
    run(lambda: None)
    assert capsys.readouterr() == ("", "")
