"""python -m tests.bench COMMAND; see `commands`."""

import sys

if __name__ == "__main__":
    try:
        from tests.bench.commands import run
    except ModuleNotFoundError as error:
        sys.exit(f"the bench needs {error.name}, a package for developers: pip install -e '.[dev]'")
    sys.exit(run(sys.argv[1:]))
