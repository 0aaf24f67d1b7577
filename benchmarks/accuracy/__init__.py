"""How well answers hold when the history is compressed: tasks, conditions and engines, in one command.

``python -m benchmarks.accuracy --help`` says how to run it; docs/accuracy.md what came out.
"""
