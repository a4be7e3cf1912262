"""The output that a user of the command line sees."""

import re

from cumla.__main__ import main

PROGRESS = re.compile(r"(\d+%, )?\d+ s, \w")  # on a busy machine a command that fails may run for a second, too


def error_line(capsys, argv, status=2):
    """The one line of stderr that a command with that exit status prints."""
    assert main([str(arg) for arg in argv]) == status
    captured = capsys.readouterr()
    (line,) = (line for line in captured.err.splitlines() if not PROGRESS.match(line))
    assert line.startswith("cumla: error: ")
    return line
