"""From the text of a YAML file to checked plain data, with the line of everything kept.

`yaml_source` reads strictly, `source_map` knows the lines, `overrides` changes and interpolates, `normal_form` and
`form` bring an agent into the shape of :mod:`fsm_rollout.agent.graph`, `model_errors` puts pydantic's errors into the user's
words, and `dumping` goes the other way. Use :mod:`fsm_rollout.agent.loader` and :mod:`fsm_rollout.jobs.run_config`.
"""
