"""``python -m fsm_rollout``: the command line, where its script is not on the path."""

from fsm_rollout.cli import main

if __name__ == "__main__":
    main()
