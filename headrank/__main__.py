"""python -m headrank."""

from headrank.cli import main

main()
