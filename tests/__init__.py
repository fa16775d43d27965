"""The tests. A package, so that ranks can import test functions by name."""
