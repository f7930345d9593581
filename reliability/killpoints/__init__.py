"""On PYTHONPATH, not imported as a package, in the processes that a killed command starts."""
