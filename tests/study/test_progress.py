from fratrie.study.progress import Progress


def test_the_share_of_the_work_and_the_time_left(capsys):
    show = Progress().of("search")
    for done, total in ((0.0, 10.0), (2.5, 10.0), (20.0, 20.0)):
        show(done, total)
    shown = capsys.readouterr().err
    assert "search:   0 % in 00:00, ? left" in shown and "search: 100 % in 00:00, 00:00 left" in shown
    Progress(hidden=True).of("search")(1.0, 1.0)
    assert capsys.readouterr().err == ""
