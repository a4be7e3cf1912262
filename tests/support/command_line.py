"""The output that a user of the command line sees."""

from cumla.__main__ import main


def error_line(capsys, argv, status=2):
    """The one line of stderr that a command with that exit status prints."""
    assert main([str(arg) for arg in argv]) == status
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("cumla: error: ")
    return line
