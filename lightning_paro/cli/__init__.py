"""The console script ``lightning-paro``."""
