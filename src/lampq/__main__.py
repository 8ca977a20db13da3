"""python -m lampq."""

from lampq.cli import main

main()
