"""What trainers take, one module for each: pure functions from rows to their types, and plugs for the live ones.

Invariant: each trained token of the rows given reaches the trainer once, with its log probability and, where the
trainer's type has a place for them, its weight version and its trajectory's score. A trainer's package is imported only
where its types are made.
"""
