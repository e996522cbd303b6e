"""``python -m lightning_paro`` is the console script ``lightning-paro``."""

from lightning_paro.cli.main import main

main()
