"""``python -m nnsight_lab``: the command line where its script is not on the PATH."""

import sys

from nnsight_lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
