"""`python -m jaxfabric` is the same as `jaxfabric`."""

import sys

from jaxfabric.cli import main

sys.exit(main())
