"""`python -m yolomlir`: the same as the command `yolomlir`."""

import sys

from yolomlir.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
