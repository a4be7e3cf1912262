"""What a user sees of the command line."""

from cumla.__main__ import main


def error_line(capsys, argv, status=2):
    """The one line of stderr that a command with that exit status prints."""
    assert main([str(arg) for arg in argv]) == status
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("cumla: error: ")
    return line
