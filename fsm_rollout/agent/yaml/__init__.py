"""From the text of a YAML file to checked plain data, with the line of everything kept, and back.

`source` reads strictly and knows the lines, `overrides` changes and interpolates, and `dump` goes the other way.
"""
