import sys

from whywait.cli import main

sys.exit(main())
