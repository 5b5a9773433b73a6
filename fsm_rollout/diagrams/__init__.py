"""An agent's picture: DOT, SVG, PNG and Mermaid.

Invariant: everything here reads and nothing changes; the same graph gives the same bytes. A state has the same colour
in every view (:mod:`fsm_rollout.diagrams.palette`).
"""
