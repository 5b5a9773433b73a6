"""Pictures and pages: an agent as a graph, a trajectory token by token, a run as a report, a timeline.

Invariant: everything here reads and nothing changes; what is drawn is a function of the graph or the journal alone, so
the same input gives the same bytes. A state has the same colour in every view (:mod:`fsm_rollout.diagrams.palette`).
"""
