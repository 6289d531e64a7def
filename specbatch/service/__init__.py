"""One verb per use case, one transaction each."""
