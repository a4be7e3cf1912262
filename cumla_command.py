"""What `cumla` on the command line starts: a Ctrl-C while the package is imported is no traceback either."""

import sys


def main() -> int:
    try:
        from cumla.__main__ import main as run
    except KeyboardInterrupt:
        print("cumla: interrupted", file=sys.stderr)
        return 130
    return run()
