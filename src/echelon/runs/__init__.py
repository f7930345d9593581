"""Run directories: what a result was made from, written so that it can be made again."""
