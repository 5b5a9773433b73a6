"""From the text of a YAML file to checked plain data, with the line of everything kept, and back.

`source` reads strictly and knows the lines, `overrides` changes and interpolates, `normal_form` writes the short
spellings of an agent out, and `dump` goes the other way. Use :mod:`fsm_rollout.agent.loader` and
:mod:`fsm_rollout.jobs.run_config`.
"""
